"""Inventory refresh: a node is the union of what the sources report under its name.

Each source has its own schedule.  A source that fails changes nothing: its last answer stays in effect, also
after a restart, and the status shows its age.  Settings without any source change nothing either: a typo must
not remove every node.  Contradictions between sources quarantine their nodes (inventory_conflicts.py).
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from machines.facts.apply import rollout_of
from machines.facts.index import Index
from machines.facts.node_work import work_on
from machines.model.events import Event, NodesDiscovered, NodesRemoved
from machines.model.node import Conflict as SourceConflict
from machines.model.node import ConflictKind, Node
from machines.model.plan import Plan
from machines.model.rollout import Actor
from machines.model.timefmt import format_rfc3339
from machines.model.trust_events import IdentityPinned, InventoryAccepted
from machines.scheduler.membership import membership_events, renamed_targets
from rolloutd.configuration.target_values import changed_values
from rolloutd.engine.background.inventory_comparison import FleetAnswers, FleetChange, compare_fleet
from rolloutd.engine.background.inventory_differences import ComparedInventory
from rolloutd.engine.background.inventory_sources import SourceReader
from rolloutd.engine.state import CommitFunction, State
from rolloutd.engine.tasks import compute_over
from rolloutd.errors import Conflict, NotFound, Refused, StoreFailed
from rolloutd.ports import JSON, Inventory, SourceRules
from rolloutd.texts.cause_text import describe_causes
from rolloutd.texts.formats import pluralize

log = logging.getLogger(__name__)

FIRST_COMMIT_WAIT_S = 2.0
"""Wait for slower sources before the first commit: a new node is known within five seconds."""

REMOVED_KEPT_S = 24 * 3600.0
"""So long a node that was removed in flight stays in quarantine: people have a day to look at it."""

NO_SOURCE_CONDITION = "inventory"
"""Key of the daemon's condition while the settings name no source."""


class InventoryRefresher:
    """The inventory sources and their latest nodes; `rules` are by source, and may lack one."""

    def __init__(
        self, state: State, inventories: Sequence[Inventory], rules: Mapping[str, SourceRules] | None = None
    ) -> None:
        self._state = state
        rules = rules or {}
        self._readers = {
            each.source: SourceReader(state, each, rules.get(each.source, SourceRules()))
            for each in inventories
        }
        self._is_restored = False
        self._is_membership_due = False
        self._accepted_removals: set[str] = set()
        self._deferred_moves: set[str] = set()
        self._membership_basis: object = None
        self._compared = ComparedInventory()
        self._due_nodes: set[str] = set()
        """The nodes that changed since the targets were adapted to all nodes."""
        self._due_values: set[str] = set()
        """The nodes that changed since the values of the targets were compared."""
        self._valued: dict[str, Plan] = {}
        """The plans of the rollouts of which the values of all targets were compared."""
        self._commit_lock = asyncio.Lock()
        self._report_unknown_expectations()

    def intervals_s(self, default_s: float) -> Mapping[str, float]:
        return {name: reader.rules.refresh_s or default_s for name, reader in self._readers.items()}

    async def refresh(self, *sources: str) -> None:
        """Query these sources, or all, at once; commit what changed and amend the rollouts.

        Early answers are committed together; a late source is committed when it answers, and no other
        source waits for it.
        """
        await self._restore()
        readers = [self._readers[name] for name in sources or self._readers]
        async with asyncio.TaskGroup() as tasks:
            late = {tasks.create_task(reader.query()) for reader in readers}
            if late:
                _, late = await asyncio.wait(late, timeout=FIRST_COMMIT_WAIT_S)
            await self._commit_results()
            for answered in asyncio.as_completed(late):
                await answered
                await self._commit_results()
        self._state.inventory_refreshed.set()
        self._state.wake_up()

    async def accept(self, source: str, actor: Actor, reason: str) -> None:
        """Let the held answer of a source take effect; raises NotFound, Refused, StoreFailed."""
        reader = self._readers.get(source)
        if reader is None:
            raise NotFound(f"{source}: no such inventory source; list them with rolloutctl inventory")
        held, nothing_held = reader.status.held, f"{source}: no answer is held; there is nothing to accept"
        if held is None:
            raise Refused("not-held", nothing_held)

        async def record() -> None:
            event = InventoryAccepted(source, len(held.removed), actor, reason, self._state.now())
            await self._state.commit([event], actor=actor, cause=f"inventory accept: {reason}")

        async with self._commit_lock:
            if not await reader.accept(held.removed, record):
                again = (
                    f"{source}: it has answered again meanwhile; read rolloutctl inventory and accept again"
                )
                raise Refused("not-held", nothing_held if reader.status.held is None else again)
        await self._commit_results()

    async def pin_identity(self, node: str, actor: Actor, reason: str) -> None:
        """Accept what the sources report of a node now: its identity, its new name, or its removal.

        Raises NotFound, Refused for a node that is still in flight or whose new name must wait.
        """
        async with self._commit_lock:
            known = self._state.index.nodes.get(node)
            if known is None:
                raise NotFound(f"{node}: no such node; list them with rolloutctl inventory")
            is_removed = any(each.kind is ConflictKind.REMOVED_IN_FLIGHT for each in known.conflicts)
            if is_removed and self._is_in_flight(node):
                raise Refused("in-flight", f"{node}: still in flight; accept its removal after that")
            if any(each.kind is ConflictKind.RENAMED for each in known.conflicts):
                # Steps, holds and isolations are recorded by the name.
                work = next(work_on(self._state.index, node, self._state.now()), None)
                if work is not None:
                    problem = f"{node}: {work.kind}; accept its new name when the node is in service and free"
                    raise Refused("node-busy", problem)
            pinned = IdentityPinned(node, actor, reason, self._state.now())
            # A node without a pinned identity is pinned to what its sources report next.
            unpinned = NodesDiscovered((replace(known, identity={}),))
            await self._state.commit([pinned, unpinned], actor=actor, cause=f"inventory pin: {reason}")
            if is_removed:  # after the audit's entry: no node is removed without a record of who accepted it
                self._accepted_removals.add(node)
            shown = [value for each in known.conflicts for value in each.values.values()]
            for report in self._state.reports.get(node, ()):
                if report.conflicts and report.source in self._readers:
                    await self._readers[report.source].accept_node(report.name, shown)
        await self._commit_results()

    async def _restore(self) -> None:
        """Load the sources' last answers of an earlier daemon, before their first query."""
        if self._is_restored:
            return
        # Before the first await: two refreshes at the start restore once.
        self._is_restored = True
        try:
            answers = await self._state.store.load_source_answers()
        except StoreFailed as failure:
            log.error("the sources' last answers could not be read: %s", failure)
            return
        for answer in answers:
            if answer.source in self._readers:
                self._readers[answer.source].restore(answer)

    async def _commit_results(self) -> None:
        """Commit the nodes that the sources have reported so far."""
        async with self._commit_lock:
            if any(reader.nodes is None for reader in self._readers.values()) and not self._state.index.nodes:
                log.warning("no node is known yet: an inventory source has never answered")
            try:
                change = await self._compare()
                # No decision in between: a node that starts is not removed, a target has the team and the
                # pools of its node, and none starts with a value that has changed.
                async with self._state.exclusive_commit() as commit:
                    try:
                        if change is not None:
                            await self._commit_change(change, commit)
                    finally:
                        await self._compare_values()
                for reader in self._readers.values():
                    await reader.save()
            except StoreFailed as failure:
                log.error("the inventory could not be written: %s", failure)
                self._state.last_write_error = str(failure)
            self._state.index.record_sources([each.status.freshness for each in self._readers.values()])
            self._report_held_and_stale()
            self._state.wake_up()

    async def _compare_values(self) -> None:
        """Record which targets have other values than people voted for, in whatever phase they are now."""
        index = self._state.index
        plans = {
            rollout.id: rollout.plan
            for rollout in index.rollouts.values()
            if rollout.plan.values and not rollout.closed
        }
        names: dict[str, Collection[str]] = {}
        for rollout, plan in plans.items():
            targets = index.targets_by_node(rollout)
            is_new = self._valued.get(rollout) is not plan
            names[rollout] = (
                targets.keys() if is_new else {each for each in self._due_values if each in targets}
            )
        before = {
            (rollout, node): changed
            for (rollout, node), changed in index.changed_values.items()
            if rollout in plans and node not in names[rollout]
        }
        count, nodes = sum(map(len, names.values())), index.fork().nodes
        found = await compute_over(count, _changed_values, plans, names, nodes, self._state.connections)
        self._state.index.record_changed_values(before | found)
        self._valued, self._due_values = plans, set()

    async def _compare(self) -> FleetChange | None:
        """Return what the sources' answers change, None without sources."""
        if not self._readers:
            self._report_no_source()
            return None
        answers = FleetAnswers(
            {name: reader.nodes for name, reader in self._readers.items()},
            {name: reader.rules.expect for name, reader in self._readers.items()},
            self._state.index.fork().nodes,
            self._state.connections,
            tuple(self._state.index.limits.pools),
            self._state.now(),
            self._state.redaction_key,
        )
        # With their answers: a query may give others at any time.
        renamed = {name: reader.renamed for name, reader in self._readers.items()}
        # In a thread; nodes and variables change only under the lock that is held here.
        change = await compute_over(answers.size, compare_fleet, answers, self._compared)
        change.renamed = renamed
        self._compared, self._state.reports = change.compared, change.compared.reports
        for reader in self._readers.values():
            reader.fleet_names = change.compared.canonical_names
        self._state.canonical_names = change.canonical_names
        self._report_rejected(change.rejected)
        return change

    async def _commit_change(self, change: FleetChange, commit: CommitFunction) -> None:
        known = self._state.index.nodes
        kept = {name: node for name in change.removed if (node := self._kept(known[name])) is not None}
        reported = self._without_moves(change)
        changed = (*reported, *(node for name, node in kept.items() if known[name] != node))
        removed = tuple(name for name in change.removed if name not in kept)
        events: list[Event] = []
        if changed:
            events.append(NodesDiscovered(changed, change.stored))
        if removed:
            events.append(NodesRemoved(removed))
        # In the same commit: after a crash a renamed node would be a new one to its rollouts.
        events += self._renamed_targets(change, events)
        await commit(events, "inventory refreshed")
        for name, renamed in change.renamed.items():
            reader = self._readers[name]
            reader.renamed = dict(reader.renamed.items() - renamed.items())
        self._state.connections.change(change.connections, removed)
        self._compared = change.compared.after_write(change.changed, change.final - self._deferred_moves)
        self._accepted_removals.difference_update(removed)
        self._due_nodes.update(removed, (node.name for node in changed))
        self._due_values.update(removed, (node.name for node in changed), change.connections)
        self._is_membership_due = True
        await self.commit_due_membership(commit)

    async def commit_due_membership(self, commit: CommitFunction) -> None:
        """Adapt the targets to the inventory, unless it was done; a decision must not come before.

        Raises Conflict, after the other rollouts, if a rollout has a row that is not as expected.
        """
        if not self._is_membership_due:
            return
        conflict: Conflict | None = None
        index, now, basis = self._state.index, self._state.now(), _membership_basis(self._state.index)
        names = self._due_nodes if basis == self._membership_basis else None
        found: Sequence[Event] = ()
        if names is None or names:
            # In a thread also for few nodes: one that joins is placed behind all targets.
            found = await compute_over(
                len(index.nodes), membership_events, index.fork(), now, describe_causes, names
            )
        # One commit for each rollout: an altered row must not keep the nodes of others with their old teams.
        for _, events in groupby(found, key=rollout_of):
            try:
                await commit(tuple(events), "inventory changed")
            except Conflict as error:
                conflict = error
        if conflict is not None:
            raise conflict
        self._is_membership_due = False
        self._membership_basis = basis
        self._due_nodes.clear()

    async def apply_due_moves(self) -> None:
        """Move the nodes to their new pools whose attempts have ended since their sources reported these."""
        if any(not self._is_in_flight(name) for name in self._deferred_moves):
            await self._commit_results()

    def _without_moves(self, change: FleetChange) -> list[Node]:
        """Return the changed nodes; one in flight stays in its pools: its peers would start meanwhile."""
        known, changed = self._state.index.nodes, []
        self._deferred_moves = set()
        for node in change.changed:
            before = known.get(node.name)
            if before is not None and self._is_in_flight(node.name):
                # Those too that only a plan names: its other nodes would start.
                staying = _in_pools_of(node, before, self._state.index.pool_keys, self._state.now())
                if staying is not node:
                    self._deferred_moves.add(node.name)
                if staying == before and node.name not in change.connections:
                    continue
                node = staying
            changed.append(node)
        return changed

    def _renamed_targets(self, change: FleetChange, events: Sequence[Event]) -> Iterable[Event]:
        """Return the targets of the nodes whose new names an admin has accepted since the last commit."""
        new, old_names = {node.name for node in change.changed} - self._state.index.nodes.keys(), {}
        for name, renamed in change.renamed.items():
            for old, own_name in renamed.items():
                fleet_name = change.compared.canonical_names.get((name, own_name), own_name)
                if fleet_name in new and old in change.removed:
                    old_names[fleet_name] = old
        if not old_names:
            return ()
        facts = self._state.index.fork()
        for event in events:
            facts.apply(event)
        return renamed_targets(facts, old_names, self._state.now(), describe_causes)

    def _kept(self, node: Node) -> Node | None:
        """Return a node that no source reports and that stays: in flight, then quarantined for a day."""
        now, kind = self._state.now(), ConflictKind.REMOVED_IN_FLIGHT
        others = tuple(each for each in node.conflicts if each.kind is not kind)
        since = next((each.since for each in node.conflicts if each.kind is kind), None)
        is_accepted = node.name in self._accepted_removals
        is_kept = since is not None and now - since < REMOVED_KEPT_S and not is_accepted
        if not is_kept and not self._is_in_flight(node.name):
            return None
        reported = dict.fromkeys(node.sources, "")
        removed = SourceConflict(kind, "inventory", reported, now if since is None else since)
        return replace(node, conflicts=(*others, removed))

    def _is_in_flight(self, node: str) -> bool:
        """Return whether an attempt, an order or a prepare stage is under way on the node."""
        index = self._state.index
        return any(each.needs_driver for each in index.targets_on(node)) or any(
            index.preparing_rollouts(node)
        )

    def _report_no_source(self) -> None:
        if self._state.index.nodes:
            self._state.conditions[NO_SOURCE_CONDITION] = (
                "the settings name no inventory: nodes stay as last known; name one and restart the daemon"
            )

    def _report_rejected(self, rejected: Mapping[str, Sequence[str]]) -> None:
        for name, reader in self._readers.items():
            if reader.is_failing or reader.nodes is None:
                continue
            if problems := [*reader.invalid.values(), *rejected.get(name, ())]:
                more = f" (and {len(problems) - 1} more of its nodes)" if len(problems) > 1 else ""
                reader.set_error(problems[0] + more)
            else:
                reader.clear_error()

    def _report_held_and_stale(self) -> None:
        """Report what keeps nodes of a source from starting as a condition of the daemon."""
        now = self._state.now()
        for name, reader in self._readers.items():
            status, key = reader.status, f"inventory {name}"
            if status.held is not None:
                held = status.held
                self._state.conditions[key] = _describe_held_answer(name, len(held.removed), held.known)
            elif status.freshness.is_stale(now):
                self._state.conditions[key] = _describe_stale_source(name, status.refreshed_at, status.error)
            elif reader.is_failing:
                since = status.failing_since or now
                self._state.conditions[key] = _describe_failing_source(name, since, status.error)
            else:
                self._state.conditions.pop(key, None)

    def _report_unknown_expectations(self) -> None:
        for name, reader in self._readers.items():
            for unknown in sorted(reader.rules.expect.keys() - self._readers.keys()):
                problem = f"inventory {name}: expect names {unknown}, which is not a source; correct it"
                self._state.conditions[f"expect {name}"] = problem


def _in_pools_of(node: Node, before: Node, pool_keys: Sequence[str], now: float) -> Node:
    """Return the node with the pools that it had before, and what its sources report of them as a warning."""
    moved = [key for key in pool_keys if node.labels.get(key) != before.labels.get(key)]
    if not moved:
        return node
    labels = {key: value for key, value in node.labels.items() if key not in moved}
    labels |= {key: before.labels[key] for key in moved if key in before.labels}
    kind = ConflictKind.MOVE_DEFERRED
    since = {each.about: each.since for each in before.conflicts if each.kind is kind}
    warnings = (
        SourceConflict(
            *(kind, key, {"now": before.labels.get(key, ""), "then": node.labels.get(key, "")}),
            since.get(key, now),
        )
        for key in moved
    )
    return replace(node, labels=labels, conflicts=(*node.conflicts, *warnings))


def _changed_values(
    plans: Mapping[str, Plan],
    names: Mapping[str, Collection[str]],
    nodes: Mapping[str, Node],
    connections: Mapping[str, Mapping[str, JSON]],
) -> dict[tuple[str, str], tuple[tuple[str, str, str], ...]]:
    """Return the values of some targets that are not those of the vote, by rollout and node."""
    found = {
        (rollout, node): changed_values(plan, node, nodes[node].labels, connections.get(node, {}))
        for rollout, plan in plans.items()
        for node in names[rollout]
        if node in nodes
    }
    return {key: changed for key, changed in found.items() if changed}


def _describe_held_answer(source: str, removed: int, known: int) -> str:
    return (
        f"inventory {source}: its answer is held, as it would remove {removed} of {pluralize(known, 'node')};"
        f" accept it with rolloutctl inventory accept {shlex.quote(source)} --reason ..."
    )


def _describe_stale_source(source: str, refreshed_at: float | None, error: str) -> str:
    last = "never answered" if refreshed_at is None else f"last answered at {format_rfc3339(refreshed_at)}"
    return f"inventory {source}: it {last}, so no node of it starts{error and f': {error}'}"


def _describe_failing_source(source: str, since: float, error: str) -> str:
    """Return that an inventory source does not answer, which keeps no node yet."""
    text = f"inventory {source}: it fails since {format_rfc3339(since)}; its nodes stay as last known"
    return f"{text}: {error}"


def _membership_basis(index: Index) -> object:
    """Return what the targets follow besides their nodes; of equal ones only changed nodes change targets."""
    open_rollouts = tuple(rollout.id for rollout in index.rollouts.values() if rollout.ended_at is None)
    return (open_rollouts, index.limits)
