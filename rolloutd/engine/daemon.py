"""The loop: ask the core for a decision, commit it, start drivers and background work.

A commit, an observation, a timer or a refresh wakes the loop.  A wakeup carries no data: the loop decides
again.
It knows ports and the core, never an adapter.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial

from machines.facts.apply import rollout_of
from machines.model.causes import Cause, CauseCode
from machines.model.decision import AwaitTurn, Decision, NextRound, Observe
from machines.model.limits import Refusal
from machines.model.rollout import NodeOrder
from machines.model.timefmt import format_rfc3339
from machines.scheduler.decide import decide
from machines.scheduler.decided_events import EventGroup, GroupKind, events_of
from machines.scheduler.isolation_aborts import decide_giving_way, record_giving_way
from machines.states import IN_FLIGHT_PHASES
from rolloutd.engine.background.audit_monitor import INTERVAL_S, RETRY_S, AuditMonitor
from rolloutd.engine.background.drift_checks import DriftChecker
from rolloutd.engine.background.inventory_refresh import InventoryRefresher
from rolloutd.engine.background.jobs import CommandJobs, job_kinds
from rolloutd.engine.background.node_observations import OnDemandObserver
from rolloutd.engine.background.progress_reports import ProgressReporter
from rolloutd.engine.check_mode import CheckMode
from rolloutd.engine.drivers.driver import Driver
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.engine.state import STORE_RETRY_S, CommitFunction, InvariantViolation, State
from rolloutd.errors import Conflict, FactsBehind, LeadershipLost, RolloutdError, StoreFailed
from rolloutd.ports import AuditReport, Inventory, Observer, SourceRules, Timers
from rolloutd.ports.guards import adapter_errors
from rolloutd.texts.cause_text import describe_causes

log = logging.getLogger(__name__)

MIN_PAUSE_S = 0.01
"""Pause between two decisions: one decision answers a burst of wakeups."""

REFUSAL_RETRY_S = 60.0
"""Pause before a rollout is decided again whose decision was refused: the audit is verified meanwhile."""


class Daemon:
    """Carries out the core's decisions until it is cancelled."""

    def __init__(
        self,
        state: State,
        adapters: AdapterSet,
        *,
        inventories: Sequence[Inventory],
        observers: Sequence[Observer],
        timers: Timers,
        source_rules: Mapping[str, SourceRules] | None = None,
    ) -> None:
        self._state = state
        self._adapters = adapters
        state.runners = adapters.runners.statuses
        self._timers = timers
        self._wakeup = asyncio.Event()
        self._started_at = state.now()
        self._drivers: dict[tuple[str, str], Driver] = {}
        self._connected_nodes: frozenset[str] | None = None
        self.check_mode = CheckMode(state, adapters.runners)
        self.drift = DriftChecker(state, adapters.source, self.check_mode)
        self._jobs = CommandJobs(state, job_kinds(state, adapters, self.check_mode, self.drift))
        self._observer = OnDemandObserver(state, observers)
        self._inventory_refresher = InventoryRefresher(state, inventories, source_rules)
        self._progress_reporter = ProgressReporter(state, adapters)
        self._audit_monitor = AuditMonitor(state)
        self._decision_duration_s = 0.0
        self._soak_note_until = 0.0
        self._membership_conflict = ""
        self._is_stopping = False
        self.iteration_listeners: list[Callable[[float], None]] = []
        """The loop calls each with the seconds that the decision took."""
        self.first_iteration_done = asyncio.Event()
        state.wake_up_listeners.append(self._wakeup.set)
        self.wake_up = self._wakeup.set
        self.accept_inventory = self._inventory_refresher.accept
        self.pin_identity = self._inventory_refresher.pin_identity

    async def run(self) -> None:
        """Refresh the inventory, then decide whenever something has changed.

        Raises, in a group, LeadershipLost once another daemon has taken over, and FactsBehind once the facts
        in memory are behind the store.
        """
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(self._stop_when_leadership_lost(), name="leadership")
            tasks.create_task(self._stop_when_facts_behind(), name="facts")
            # Before the first driver: no node is moved by a row that the audit does not account for.
            await self._retry_unless(self._audit_monitor.begin)
            check = partial(self._start_on_audit, self._audit_monitor.check)
            self._timers.call_every("audit", INTERVAL_S, check)
            # No daemon remembers which isolations gave way: without it a node that waits for a slot would be
            # changed now, because the first decision comes only after the inventory's answer.
            decision = decide_giving_way(self._state.index, await self._state.advance())
            record_giving_way(self._state.index, decision)
            self._update_drivers()
            # Nodes in flight continue at once; a new node starts only on a fresh inventory.
            await self._inventory_refresher.refresh()
            self.reschedule()
            self._start_on_audit(self._verify_audit_if_due)
            self._wakeup.set()
            try:
                await self._iterate_for_ever()
            finally:
                self._is_stopping = True

    async def _iterate_for_ever(self) -> None:
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            await self._iterate()
            for listener in self.iteration_listeners:
                listener(self._decision_duration_s)
            await self._state.clock.sleep(MIN_PAUSE_S)

    async def _stop_when_leadership_lost(self) -> None:
        """End the daemon when a write shows that another daemon has taken over: only one may act."""
        await self._state.leadership_lost.wait()
        self._state.require_leadership()  # it may say why
        raise LeadershipLost("state directory: another daemon has taken over; this one ends")

    async def _stop_when_facts_behind(self) -> None:
        """End the daemon when a written event could not be applied: each decision would use older facts."""
        await self._state.facts_behind.wait()
        raise FactsBehind("facts: they are behind the database; the daemon ends, its next start reads them")

    async def observe_nodes(self, nodes: Sequence[str]) -> None:
        """Observe these nodes now, because a hold is granted or refused by their latest observations."""
        await self._observer.observe_now(nodes)

    def refresh_inventory(self, *sources: str) -> None:
        if not self._is_stopping:
            self._tasks.create_task(self._inventory_refresher.refresh(*sources))

    def reschedule(self) -> None:
        """Schedule each source's refresh at its own interval, else at that of the current settings."""
        default_s = self._state.settings.inventory_refresh_s
        for source, seconds in self._inventory_refresher.intervals_s(default_s).items():
            refresh = partial(self.refresh_inventory, source)
            self._timers.call_every(f"inventory {source}", seconds, refresh)

    async def verify_audit(self) -> AuditReport:
        """Verify the audit for a user, and obey the report."""
        return await self._audit_monitor.verify()

    def _start_on_audit(self, check: Callable[[], Awaitable[bool]]) -> None:
        if not self._is_stopping:  # a timer may fire while the last tasks end
            self._tasks.create_task(self._retry_unless(check), name="audit")

    def _start_audit_verification(self) -> None:
        self._start_on_audit(self._audit_monitor.try_to_verify)

    async def _retry_unless(self, check: Callable[[], Awaitable[bool]]) -> None:
        """Verify the whole audit later unless the check could read it."""
        if not await check():
            retry_at = self._state.now() + RETRY_S
            self._timers.call_at("audit-retry", retry_at, self._start_audit_verification)

    async def _verify_audit_if_due(self) -> bool:
        # First decide: a start waits only for the checkpoint, and a whole verification may be due.
        await self.first_iteration_done.wait()
        return await self._audit_monitor.verify_if_due()

    # -- one iteration

    async def _iterate(self) -> None:
        # Before the decision: a node whose attempt has ended is where its sources report it.
        await self._inventory_refresher.apply_due_moves()
        try:
            decision = await self._decide()
        except StoreFailed as failure:
            log.error("decision: not written: %s", failure)
            self._state.last_write_error = str(failure)
            self._timers.call_at("store", self._state.now() + STORE_RETRY_S, self._wakeup.set)
            self._update_drivers()  # a user's order must not wait until the store can write
            return
        self._state.reasons = decision.reasons
        for key in record_giving_way(self._state.index, decision):
            if key in self._drivers:
                self._drivers[key].wake_up()
        for waiting in decision.of(AwaitTurn):
            self._state.index.record_train_wait(waiting.rollout, waiting.node, self._state.now())
        self._observer.request_observations(self._tasks, [each.node for each in decision.of(Observe)])
        for next_round in decision.of(NextRound):
            self._state.index.record_next_round(next_round)
        self._jobs.start(self._tasks, decision.commands)
        # By the results that came in since the decision too.
        self._jobs.start(self._tasks, self._state.index.dry_run_results.permanent())
        self._progress_reporter.send_queued(self._tasks)
        if decision.wake_at is not None and decision.wake_at <= self._state.now():
            self._wakeup.set()  # the next decision continues this one
        elif decision.wake_at is not None:
            self._timers.call_at("wake", decision.wake_at, self._wakeup.set)
        self._update_drivers()
        self.first_iteration_done.set()

    async def _decide(self) -> Decision:
        """Decide and commit the decision; no other commit can happen in between."""
        async with self._state.exclusive_commit() as commit:
            await self._commit_due_membership(commit)
            now = await self._state.advance()
            began = asyncio.get_running_loop().time()
            decision = decide(self._state.index, now)
            # Before anything is awaited: what changes after the decision makes groups ready again.
            self._state.index.record_backoffs(decision.backoffs)
            self._decision_duration_s = asyncio.get_running_loop().time() - began
            if now >= self._soak_note_until:
                self._state.conditions.pop("clock", None)
            for group in events_of(self._state.index, decision, now, describe_causes):
                await self._commit_group(commit, group, now)
        return decision

    async def _commit_group(self, commit: CommitFunction, group: EventGroup, now: float) -> None:
        """Commit a part of a decision; what time has ended must not fail with the rest."""
        match group.kind:
            case GroupKind.DECIDED:
                await self._commit_decided(commit, group, now)
            case GroupKind.EXPIRED:
                await self._commit_ended(commit, group, CauseCode.TIME_IS_OVER, now)
            case GroupKind.SOAKS_RESTARTED:
                if await self._commit_ended(commit, group, CauseCode.CLOCK_SET_BACK, now):
                    rollouts = {rollout for event in group.events if (rollout := rollout_of(event))}
                    self._report_restarted_soaks(sorted(rollouts), now)

    async def _commit_decided(self, commit: CommitFunction, group: EventGroup, now: float) -> None:
        """Commit what was decided for a rollout; a refusal stops that rollout until it is tried again."""
        index, rollout = self._state.index, group.rollout
        if index.is_refused(rollout):
            return  # an earlier part of this decision was
        try:
            # Check the invariants at the time of the decision: an observation may have expired since then.
            await commit(group.events, "decided", now)
        except (Conflict, InvariantViolation) as refusal:
            log.error("%s: nothing of it is decided now: %s", rollout, refusal)
            before = index.refusals.get(rollout)
            index.record_refusal(rollout, Refusal(str(refusal), now + REFUSAL_RETRY_S))
            # Once for each problem: a row changed by hand is more likely than a mistake of the rules.
            if before is None or before.problem != str(refusal):
                self._start_audit_verification()
            self._wakeup.set()

    async def _commit_due_membership(self, commit: CommitFunction) -> None:
        """Adapt the targets to an inventory that was written without them."""
        try:
            await self._inventory_refresher.commit_due_membership(commit)
        except Conflict as conflict:
            # Once: a verification wakes the loop, and until the row is settled each decision fails here.
            if str(conflict) == self._membership_conflict:
                return
            self._membership_conflict = str(conflict)
            # One altered row must not stop the fleet: the comparison finds it, and then its rollout waits.
            log.error("membership: not written: %s", conflict)
            self._start_audit_verification()
        else:
            self._membership_conflict = ""

    async def _commit_ended(
        self, commit: CommitFunction, group: EventGroup, code: CauseCode, now: float
    ) -> bool:
        """Record what time alone has ended or begun again; return whether it was written."""
        try:
            await commit(group.events, describe_causes((Cause(code),)), now)
        except Conflict as conflict:
            # The row is not as the audit says: the comparison finds it, and then nothing expires by it.
            log.error("expiry: not written: %s", conflict)
            self._start_audit_verification()
            return False
        return True

    def _report_restarted_soaks(self, rollouts: Sequence[str], now: float) -> None:
        """Report soaks that begin again, for as long as they last."""
        plans = (self._state.index.rollout(each).plan for each in rollouts)
        self._soak_note_until = now + max(wave.soak_s for plan in plans for wave in plan.waves)
        self._state.conditions["clock"] = (
            f"clock: it was set back; the soak of {', '.join(rollouts)} counts from {format_rfc3339(now)}"
        )

    # -- drivers

    def _update_drivers(self) -> None:
        """Start a driver for each node that needs one, and pass on what has changed."""
        for target in self._state.index.needing_driver():
            key = (target.rollout, target.node)
            if key in self._drivers or self._state.index.has_doubtful_records(*key):
                continue
            driver = Driver(self._state, self._adapters, *key, daemon_started_at=self._started_at)
            self._drivers[key] = driver
            self._tasks.create_task(self._run_driver(key, driver), name=f"drive {key[0]}/{key[1]}")
        nodes = frozenset(node for _, node in self._drivers)
        self._keep_connections(nodes)
        index, are_alone = self._state.index, len(nodes) == len(self._drivers)
        drivers_of = {} if are_alone else Counter(node for _, node in self._drivers)
        for key, driver in self._drivers.items():
            if key[0] not in index.rollouts:
                driver.wake_up()  # the rollout was deleted while the node's last step ends
                continue
            driver.recheck_isolation()
            target = index.target(*key)
            if target.order is NodeOrder.STOP:
                driver.stop_current_action()
            elif (
                target.phase not in IN_FLIGHT_PHASES
                or drivers_of.get(target.node, 1) > 1
                or index.outage_progress(target).waits
            ):
                driver.wake_up()  # of several on one node, each may wait for another

    def _keep_connections(self, nodes: frozenset[str]) -> None:
        """Let the runs of each node in work share a connection, until its driver has ended."""
        if nodes != self._connected_nodes:
            self._connected_nodes = nodes
            self._tasks.create_task(self._end_other_connections(nodes), name="connections")

    async def _end_other_connections(self, nodes: Collection[str]) -> None:
        try:
            with adapter_errors("runner"):
                await self._adapters.runners.keep_connections(nodes)
        except (RolloutdError, TimeoutError) as error:
            log.warning("connections of runs are not ended: %s", error)

    async def _run_driver(self, key: tuple[str, str], driver: Driver) -> None:
        try:
            await driver.run()
        finally:
            # The node may need another driver at once, as for an order that came during its last step.
            del self._drivers[key]
            self._wakeup.set()
