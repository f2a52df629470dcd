"""The daemon's facts, and the one way to change them.

The index has the facts that decisions need; the store keeps the same facts.  Every change ends in
`State._commit`: check the invariants, write, apply, publish, in this order and one commit at a time, so that
no decision uses facts that are older than the store.  commit() is for events that are known, commit_decided()
and exclusive_commit() for those that are decided under the lock. It knows neither sockets nor adapters nor
drivers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from machines.facts.apply import count_rows
from machines.facts.node_work import WAITS_FOR, NodeWork, WorkKind
from machines.facts.preparations import BUILD_NODE
from machines.facts.projection import Projection
from machines.invariants.violations import apply_judged, first_violation
from machines.model.events import DaemonStarted, Event, MismatchSettled
from machines.model.preparation import PreparationState
from machines.model.reasons import Reason
from machines.model.rollout import DAEMON, Actor
from machines.rules.node_claims import work_blocker
from machines.scheduler.expiry import extend_deadlines
from machines.scheduler.why import Live
from machines.workflow.live_step import LiveStep
from machines.workflow.prepare_try import has_lost_run
from rolloutd import ports
from rolloutd.configuration.sealed_variables import unseal
from rolloutd.engine.adapter_failures import AdapterFailures
from rolloutd.engine.change_notifier import ChangeNotifier
from rolloutd.engine.commit_lock import CommitLock, nodes_of_steps
from rolloutd.engine.connection_variables import ConnectionVariables
from rolloutd.engine.source_state import SourceState
from rolloutd.engine.tasks import compute, compute_in_parts, free, wait_until_done
from rolloutd.engine.transition_log import log_entries
from rolloutd.errors import Conflict, FactsBehind, LeadershipLost, NotFound, Refused, StoreFailed
from rolloutd.settings import Settings
from rolloutd.store import Store

log = logging.getLogger(__name__)

STARTED = "daemon started"
"""Cause of the first commit of each daemon."""

STORE_RETRY_S = 5.0
"""Pause before what the store could not write is tried again: a user must first free a full disk."""


class CommitFunction(Protocol):
    """Commits events with their cause; `at` is when they were decided (default: now)."""

    def __call__(
        self, events: Sequence[Event], cause: str, at: float | None = None
    ) -> Awaitable[tuple[ports.AuditEntry, ...]]: ...


class InvariantViolation(StoreFailed):
    """A change was refused because it would break an invariant; nothing was written."""


LARGE_COMMIT_ROWS = 100
"""Rows of a commit that is judged and applied in a thread: each takes up to a tenth of a millisecond."""

DATABASE_ID_LENGTH = 16
"""Hexadecimal digits in a fencing token by which a node distinguishes two databases."""

NO_RUN = ports.RunState(None)


@dataclass(slots=True)
class StepProgress(LiveStep):
    """What a node in flight is doing at this moment, with the run of its step; never stored."""

    run: ports.RunState = NO_RUN


async def _refuse_secrets(kind: str, host: ports.Host, name: str, key: str) -> str:
    raise Refused("no-secrets", f"change {kind}: this daemon has no runners; its values cannot name secrets")


@dataclass(slots=True)
class State:
    """The facts of this daemon, shared by its loop, its drivers and its handlers."""

    index: Projection
    store: Store
    clock: ports.Clock
    settings: Settings
    changes: ChangeNotifier
    connections: ConnectionVariables = field(default_factory=ConnectionVariables)
    canonical_names: Mapping[tuple[str, str], str] = field(default_factory=dict)
    step_progress: dict[tuple[str, str], StepProgress] = field(default_factory=dict)
    runners: Mapping[str, ports.RunnerStatus] = field(default_factory=dict)
    source_limits: Mapping[str, ports.LimitsSources] = field(default_factory=dict)
    """The runners, by name, that cannot run the playbooks of every source."""
    forecasts: Mapping[str, Mapping[str, ports.JSON]] = field(default_factory=dict)
    """The latest forecast of each open rollout, as the API answers it; never stored."""
    sources: dict[str, SourceState] = field(default_factory=dict)
    reports: Mapping[str, Sequence[ports.DiscoveredNode]] = field(default_factory=dict)
    """What each source last reported of a node, by the fleet's name."""
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    last_write_error: str = ""
    conditions: dict[str, str] = field(default_factory=dict)
    stored_volume: ports.StoredVolume = field(default_factory=ports.StoredVolume)
    """What the database held at the last pass of the retention."""
    job_failures: Counter[str] = field(default_factory=Counter)
    """Unexpected errors of background jobs since the start, by kind."""
    adapter_failures: AdapterFailures = field(default_factory=AdapterFailures)
    epoch: int = 0
    large_commit_rows: int = LARGE_COMMIT_ROWS
    redaction_key: bytes = field(default_factory=lambda: os.urandom(32))
    """Key of the digests that stand for values of variables, and of the variables in the database."""
    wake_up_listeners: list[Callable[[], None]] = field(default_factory=list)
    digest_secret: Callable[[str, ports.Host, str, str], Awaitable[str]] = _refuse_secrets
    """Returns a digest of a secret by kind of change, node, name and key."""
    commit_listeners: list[Callable[[Sequence[Event], float], None]] = field(default_factory=list)
    """Each is called with the events of a commit and the seconds that it took."""
    inventory_refreshed: asyncio.Event = field(default_factory=asyncio.Event)
    submit_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    leadership_lost: asyncio.Event = field(default_factory=asyncio.Event)
    require_leadership: Callable[[], None] = lambda: None
    """Raises LeadershipLost once another daemon may lead: called before each call that acts on a node."""
    facts_behind: asyncio.Event = field(default_factory=asyncio.Event)
    """The store has an event that could not be applied: this process must not decide."""
    reboot_approvers: dict[str, Mapping[int, frozenset[str]]] = field(default_factory=dict)
    """By FleetLock group, the teams that those who approved had at the last call; an outage hides teams."""
    _database_id: str = ""
    _write_lock: CommitLock = field(default_factory=CommitLock)
    _advance_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def now(self) -> float:
        """Return the wall clock, epoch seconds."""
        return self.clock.now()

    async def advance(self) -> float:
        """Let observations and holds expire while the loop continues; return until when (epoch seconds)."""
        # Before a question: one that is due forks the facts and lets all of it expire at once.
        # One caller at a time: the parts of many waiting requests would run in one turn of the loop.
        async with self._advance_lock:
            await compute_in_parts(lambda: self.index.advance_in_part(self.now()))
        return self.index.now

    @property
    def live(self) -> Live:
        """Return what `why` needs in addition to the facts."""
        return Live(self.step_progress, self.runners)

    def wake_up(self) -> None:
        """Ask the loop to decide again soon."""
        for listener in self.wake_up_listeners:
            listener()

    def host(self, node: str) -> ports.Host:
        """Return a node and its connection variables; raises NotFound when the inventory no longer has it."""
        if (known := self.index.nodes.get(node)) is None:
            raise NotFound(f"the inventory no longer has {node}")
        return self.connections.host(known)

    def awaited_sources(self, node: str) -> tuple[str, ...]:
        """Return the sources that must answer before the node's secrets are known; empty if they are."""
        if ports.WITHHELD not in self.connections.get(node, {}):
            return ()
        sources = self.index.nodes[node].sources if node in self.index.nodes else ()
        answered = {name for name, each in self.sources.items() if each.has_answered}
        # All of them, if each has answered without the secrets: only another answer can bring them.
        return tuple(each for each in sources if each not in answered) or sources

    async def load_connections(self) -> None:
        """Take over the nodes' variables that an earlier daemon stored; raises StoreFailed."""
        stored = await self.store.load_connections()
        self.connections.change({name: unseal(each, self.redaction_key) for name, each in stored.items()})

    async def database_id(self) -> str:
        """Return a part of the hash of the first audit entry, also after that was exported."""
        if not self._database_id:
            origin = (await self.store.load_audit_base()).origin
            if not origin and (first := await self.store.read_audit(limit=1)):
                origin = first[0].hash
            self._database_id = origin[:DATABASE_ID_LENGTH]
        return self._database_id or "unnamed"

    async def fence_token(self) -> str:
        """Return a run's fencing token: `epoch.number database-id start`; epoch and number only grow."""
        return f"{self.epoch}.{self.changes.latest_seq} {await self.database_id()} {int(self.now())}"

    async def has_unfinished_run(self, node: str) -> bool:
        """Return whether a run may have left processes on the node; a lost build counts for its host."""
        builds = (
            self.index.preparation(rollout.id, BUILD_NODE, stage.name)
            for rollout in self.index.rollouts.values()
            for stage in rollout.plan.prepare
            if stage.host == node
        )
        if any(row and row.state is PreparationState.FAILED and has_lost_run(row) for row in builds):
            return True
        return bool(await self.store.unfinished_runs(node))

    def problems(self) -> tuple[str, ...]:
        """Return what needs a user or a restart, adapters that keep failing, and the last write's error."""
        # A failing inventory source has a condition of its own.
        reported = self.adapter_failures.reported()
        failures = (str(each) for each in reported if each.adapter not in self.conditions)
        refusals = (
            f"{rollout}: a decision was refused: {refusal.problem}; see `rolloutctl audit verify`"
            for rollout, refusal in self.index.refusals.items()
            if self.index.is_refused(rollout)
        )
        return (*self.conditions.values(), *refusals, *failures, *filter(None, (self.last_write_error,)))

    def report_job(self, kind: str, name: str, error: str) -> None:
        """Show that a background job failed, until its next try; an empty error ends that."""
        if not error:
            self.conditions.pop(f"job {name}", None)
            return
        self.job_failures[kind] += 1
        self.conditions[f"job {name}"] = f"{name}: {error}; it is tried again"

    def record_try(self, adapter: str, error: str = "") -> None:
        """Record that an adapter tried to reach its API; without an error it was answered."""
        self.adapter_failures.record_try(adapter, error, self.now())

    async def record_start(self, started: DaemonStarted, last_entry: ports.AuditEntry | None) -> None:
        """Commit the daemon's start; no isolation's deadline counts the time since the last entry."""
        extended: list[Event] = []
        if last_entry is not None:
            extended += extend_deadlines(self.index, json.loads(last_entry.text)["at"], started.at)
        try:
            # One commit: at the next start this one is the last sign of a daemon.
            await self.commit([started, *extended], cause=STARTED)
        except Conflict as conflict:
            log.error("deadlines: not extended: %s", conflict)
            await self.commit([started], cause=STARTED)

    async def commit(
        self, events: Sequence[Event], *, actor: Actor = DAEMON, cause: str
    ) -> tuple[ports.AuditEntry, ...]:
        """Write and apply the events, all or none.

        The way to the disk: first_violation() of the invariants, Store.commit(), Writer.commit() with the
        audit entries, write_events() in store/stored_rows.py, apply.writes() for each event's rows, TABLES.
        Raises InvariantViolation, Conflict or StoreFailed; in each case nothing has changed.
        """
        return await self.commit_decided(lambda: events, actor=actor, cause=cause)

    async def commit_decided(
        self, decide: Callable[[], Sequence[Event]], *, actor: Actor = DAEMON, cause: str
    ) -> tuple[ports.AuditEntry, ...]:
        """Commit what `decide` returns under the lock; raises as commit().  `decide` is called repeatedly."""
        nodes = self._nodes_of_sharing(decide())
        async with self._write_lock.held(nodes):
            events = decide()
            if self._nodes_of_sharing(events) == nodes:
                return await self._commit(events, actor, cause)
        # An earlier commit has made it concern more than its node.
        async with self._write_lock.held():
            return await self._commit(decide(), actor, cause)

    def _nodes_of_sharing(self, events: Sequence[Event]) -> frozenset[str]:
        """Return the nodes for which these events share the lock; none if they need it alone."""
        # The fork of a large commit replaces the facts, so what another one applied meanwhile would be lost.
        return frozenset() if self._is_large(events) else nodes_of_steps(events)

    def _is_large(self, events: Sequence[Event]) -> bool:
        return count_rows(events) >= self.large_commit_rows

    @asynccontextmanager
    async def exclusive_commit(self, actor: Actor = DAEMON) -> AsyncIterator[CommitFunction]:
        """Make all other commits wait while the body decides and commits.

        Yields a function that commits on behalf of the actor.
        """
        async with self._write_lock.held():
            yield lambda events, cause, at=None: self._commit(events, actor, cause, at)

    @asynccontextmanager
    async def begin_work(self, kind: WorkKind, node: str, rollout: str = "") -> AsyncIterator[Reason | None]:
        """Record work that no stored fact shows while the body runs; yield what it waits for, if anything."""
        work = NodeWork(kind, node, rollout)
        # Under the lock: a start that is being written is not in the facts yet.
        async with self._write_lock.held():
            obstacle = work_blocker(self.index, kind, node, self.now())
            if obstacle is None:
                self.index.record_work(work)
        try:
            yield obstacle
        finally:
            if obstacle is None:
                self.end_work(work)

    def end_work(self, work: NodeWork) -> None:
        """Record that work on a node has ended, and let what waited for it begin."""
        self.index.end_work(work)
        if work.kind in WAITS_FOR[WorkKind.ATTEMPT] | WAITS_FOR[WorkKind.STAGE]:
            self.wake_up()

    async def _commit(
        self, events: Sequence[Event], actor: Actor, cause: str, at: float | None = None
    ) -> tuple[ports.AuditEntry, ...]:
        if not events:
            return ()
        # The store checks the term in its transaction; this only spares a write that must fail.
        if self.leadership_lost.is_set():
            raise LeadershipLost("leadership: another daemon leads; this one wrote nothing and ends")
        if self.facts_behind.is_set():
            raise FactsBehind("facts: they are behind the database; the daemon wrote nothing and ends")
        now = self.now() if at is None else at
        if self._is_large(events):
            writing = asyncio.create_task(self._write_large(events, actor, cause, now))
        else:
            broken = first_violation(self.index, events, now)
            if broken is not None:
                raise InvariantViolation(broken)
            writing = asyncio.create_task(self._write(events, actor, cause, now))
        try:
            return await asyncio.shield(writing)
        except asyncio.CancelledError:
            # The write continues, so the lock must stay held until it ends.  Its result or error must not
            # replace the cancellation: a cancelled task would continue.
            await wait_until_done(writing)
            raise

    async def _write_large(
        self, events: Sequence[Event], actor: Actor, cause: str, now: float
    ) -> tuple[ports.AuditEntry, ...]:
        """Judge and apply the events in a thread, to a fork that replaces the facts once they are written."""
        # The lock is held alone: no event comes meanwhile, and the journal has what comes in without one.
        facts, after = self.index, self.index.fork()
        facts.journal = []
        try:
            successor: Projection | None = after
            try:
                broken = await compute(apply_judged, after, events, now)
            except (LookupError, ValueError):
                # A row is not as an event expects: the store has the last word, and says which.
                successor, broken = None, first_violation(facts, events, now)
            if broken is not None:
                raise InvariantViolation(broken)
            entries = await self._write(events, actor, cause, now, successor)
        finally:
            facts.journal = None
        replaced = [facts]
        del facts, after, successor
        await free(replaced)
        return entries

    async def _write(
        self,
        events: Sequence[Event],
        actor: Actor,
        cause: str,
        now: float,
        successor: Projection | None = None,
    ) -> tuple[ports.AuditEntry, ...]:
        """Write the events, then apply and publish them, even if the caller was cancelled.

        `successor` has them already, and not yet what came in since it was made.
        """
        began = asyncio.get_running_loop().time()
        try:
            entries = await self.store.commit(events, actor=actor, cause=cause, at=now)
        except LeadershipLost:
            self.leadership_lost.set()
            raise
        except FactsBehind:
            self.facts_behind.set()
            raise
        except Conflict:
            raise
        except StoreFailed as failure:
            # Of a person's command too: only its own response would say it, and the status that all is well.
            self.last_write_error = str(failure)
            raise
        self.last_write_error = ""
        commit_s = asyncio.get_running_loop().time() - began
        await self._apply(events, successor)
        # After the facts: no subscriber may find an index that is older than its audit entry.
        for listener in self.commit_listeners:
            try:
                listener(events, commit_s)
            except Exception as error:
                # The events are written: an error here must not look like a refused commit.
                log.exception("commit listener: %r; it misses a commit", error)
        self.changes.notify_committed(entries)
        log_entries(entries)
        self.wake_up()
        return entries

    async def _apply(self, events: Sequence[Event], successor: Projection | None) -> None:
        """Apply what is written, and only that: no decision may use a fact that a crash would lose.

        Raises FactsBehind, which ends the daemon, if an event cannot be applied.
        """
        try:
            if successor is None:
                for event in events:
                    self.index.apply(event)
            else:
                for record in self.index.journal or ():
                    record(successor)
                self.index = successor
            # A settled row may be of any table, and no event says what follows from it.
            if any(isinstance(event, MismatchSettled) for event in events):
                self.index = self.index.rebuilt(await self.store.load_snapshot())
        except Exception as error:
            self.facts_behind.set()
            raise FactsBehind(
                f"facts: a written event was not applied: {error!r}; the daemon ends"
            ) from error
