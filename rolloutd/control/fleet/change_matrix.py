"""Which node has which change, across rollouts.

It is kept between answers, so that an answer costs what has changed since the last one.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import eq, is_not

from machines.facts.index import Index
from machines.model.node import Node, NodeKind
from machines.model.rollout import FailureCode, Target
from machines.states import CARRIES_CHANGE, EXCEPTIONS, IN_FLIGHT_PHASES, Outcome, Phase
from rolloutd.control.fleet import wire_fleet
from rolloutd.control.fleet.version_table import CARRIED
from rolloutd.texts.versions import Version

MAX_KEPT_STATES = 500_000
"""Nodes of closed rollouts whose state is kept, 130 bytes each; further ones are read again."""

NEVER: wire_fleet.ChangeState = "never"

ChangeKey = tuple[str, str]
"""A plan's name and the hash of what it does."""


@dataclass(slots=True, eq=False)
class RolloutStates:
    """What a rollout says of its nodes and since when, by its targets as they were last read."""

    closed: bool
    version: Version | None = None
    """What the rollout brings; read for the latest rollout of a change only."""
    targets: Mapping[str, Target] = field(default_factory=dict)
    states: dict[str, tuple[wire_fleet.ChangeState, float]] = field(default_factory=dict)

    def read(self, targets: Mapping[str, Target]) -> list[str]:
        """Return the nodes whose target has changed."""
        changed, _ = _differences(self.targets, targets)
        self.targets = targets
        for node in changed:
            state = _state_of(targets[node], closed=self.closed)
            if state is None:
                self.states.pop(node, None)
            else:
                self.states[node] = (state, targets[node].since)
        return changed


class ChangeCounts:
    """One change: the state of each known node, counted for the fleet and for each group."""

    def __init__(self) -> None:
        self.rollouts: dict[str, RolloutStates] = {}
        """Latest first."""
        self.states: dict[str, wire_fleet.ChangeState] = {}
        self.counts: Counter[wire_fleet.ChangeState] = Counter()
        self.group_counts: dict[str, Counter[wire_fleet.ChangeState]] = {}

    def carried_at(self, node: str) -> float:
        """Return when the node last got the change; 0.0 if it did not."""
        said = (each.states.get(node) for each in self.rollouts.values())
        return max((each[1] for each in said if each is not None and each[0] in CARRIED), default=0.0)

    def add(self, node: str, groups: Iterable[str], replaced_at: float, *, is_held: bool) -> None:
        """Count a known node in its groups.

        At `replaced_at` it last got a change of the plan: what was before is of another one.
        """
        said = [each.states[node] for each in self.rollouts.values() if node in each.states]
        current = [each for each in said if each[0] == "pending" or each[1] >= replaced_at]
        # The rollout that touched it last decides; of equal ones the first.
        state = max(current, key=lambda each: (each[0] != "pending", each[1]))[0] if current else NEVER
        if state == "pending" and is_held:
            state = "held"
        elif said and not current:
            state = "replaced"
        self.states[node] = state
        self.counts[state] += 1
        for group in groups:
            if group not in self.group_counts:
                self.group_counts[group] = Counter()
            self.group_counts[group][state] += 1

    def remove(self, node: str, groups: Iterable[str]) -> None:
        state = self.states.pop(node)
        self.counts[state] -= 1
        for group in groups:
            counts = self.group_counts[group]
            counts[state] -= 1
            if not counts.total():
                del self.group_counts[group]


class ChangeMatrix:
    """The counts of all changes, as last read; who uses it holds its lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._changes: dict[ChangeKey, ChangeCounts] = {}
        self._nodes: Mapping[str, Node] = {}
        self._groups: dict[str, tuple[str, ...]] = {}
        self._held: frozenset[str] = frozenset()
        self._pool_keys: tuple[str, ...] = ()

    def has_closed(self, key: ChangeKey, rollout: str) -> bool:
        known = self._rollout(key, rollout)
        return known is not None and known.closed

    def has_version(self, key: ChangeKey, rollout: str) -> bool:
        """Return whether it is kept what a rollout brings."""
        known = self._rollout(key, rollout)
        return known is not None and known.version is not None

    def _rollout(self, key: ChangeKey, rollout: str) -> RolloutStates | None:
        return self._changes[key].rollouts.get(rollout) if key in self._changes else None

    def update(
        self,
        index: Index,
        changes: Mapping[ChangeKey, Sequence[str]],
        closed: Mapping[str, Sequence[Target]],
        versions: Mapping[str, Version],
        plan: str | None,
    ) -> Mapping[ChangeKey, ChangeCounts]:
        """Return the changes of a plan, or all; `changes` names the rollouts of each.

        `closed` has the targets of closed rollouts that are not kept, `versions` what rollouts bring of which
        that is not kept.
        """
        changed = self._update_nodes(index)
        others = {key: each for key, each in self._changes.items() if plan not in (None, key[0])}
        # The nodes of each plan that are counted again, in all its changes: one may replace another.
        again = {name: set(changed) for name, _ in (*self._changes, *changes)}
        for name, _ in self._changes.keys() - others.keys() - changes.keys():
            again[name].update(self._nodes)
        found: dict[ChangeKey, ChangeCounts] = {}
        for key, names in changes.items():
            found[key], moved = self._update_change(index, key, names, closed, versions)
            again[key[0]].update(moved)
        self._changes = {**others, **found}
        for name, nodes in again.items():
            self._count_again([each for key, each in self._changes.items() if key[0] == name], nodes)
        self._limit(index)
        return found

    def _update_nodes(self, index: Index) -> set[str]:
        """Return the nodes that are to be counted again; those that are gone are no longer counted."""
        if index.pool_keys != self._pool_keys:
            # Every node may be in other pools.
            self._pool_keys = index.pool_keys
            self._changes, self._nodes, self._groups = {}, {}, {}
        changed, removed = _differences(self._nodes, index.nodes)
        # The facts write to a copy of it once they are forked, so it stays as it is.
        self._nodes = index.nodes
        for name in (*changed, *removed):
            if (before := self._groups.pop(name, None)) is not None:
                for change in self._changes.values():
                    change.remove(name, before)
            if name in self._nodes:
                self._groups[name] = tuple(_groups(index, self._nodes[name]))
        held = frozenset(hold.node for hold in index.holds)
        moved, self._held = held ^ self._held, held
        return {*changed, *moved}

    def _count_again(self, changes: Sequence[ChangeCounts], nodes: Iterable[str]) -> None:
        for node in nodes:
            groups = self._groups.get(node)
            if groups is None:
                continue
            replaced_at = max((each.carried_at(node) for each in changes), default=0.0)
            for change in changes:
                if node in change.states:
                    change.remove(node, groups)
                change.add(node, groups, replaced_at, is_held=node in self._held)

    def _update_change(
        self,
        index: Index,
        key: ChangeKey,
        names: Sequence[str],
        closed: Mapping[str, Sequence[Target]],
        versions: Mapping[str, Version],
    ) -> tuple[ChangeCounts, Iterable[str]]:
        """Return a change as its rollouts say now, and the nodes that are to be counted again."""
        known = self._changes.get(key, ChangeCounts())
        read = {name: index.targets_by_node(name) for name in names if name in index.rollouts}
        read |= {name: {each.node: each for each in closed[name]} for name in names if name in closed}
        rollouts: dict[str, RolloutStates] = {}
        changed: list[str] = []
        for name in names:
            is_closed = name not in index.rollouts or index.rollouts[name].closed
            states = known.rollouts.get(name)
            version = versions.get(name, None if states is None else states.version)
            if states is None or states.closed is not is_closed:
                states = RolloutStates(is_closed)
            states.version = version
            rollouts[name] = states
            if name in read:
                changed += states.read(read[name])
            if name not in index.rollouts:
                states.targets = {}  # it is not read again
        if list(known.rollouts.values()) != list(rollouts.values()):
            known = ChangeCounts()
            changed = list(self._nodes)
        known.rollouts = rollouts
        return known, changed

    def _limit(self, index: Index) -> None:
        """Drop the changes whose closed rollouts have too many nodes."""
        kept = 0
        for key, change in list(self._changes.items()):
            closed = [each for name, each in change.rollouts.items() if name not in index.rollouts]
            kept += sum(len(each.states) for each in closed)
            if closed and kept > MAX_KEPT_STATES:
                del self._changes[key]


def _differences(before: Mapping[str, object], after: Mapping[str, object]) -> tuple[list[str], list[str]]:
    """Return the keys of values that are new or another object, and those that are gone."""
    # Mostly the keys are the same and in the same order, and then 100,000 of them take some milliseconds.
    if len(before) == len(after) and all(map(eq, before, after)):
        return list(compress(after, map(is_not, before.values(), after.values()))), []
    changed = [key for key, value in after.items() if before.get(key) is not value]
    return changed, [key for key in before if key not in after]


def _state_of(target: Target, *, closed: bool) -> wire_fleet.ChangeState | None:
    """Return what a rollout says of a node; None for one that left, or that it will never start."""
    if target.outcome is Outcome.LEFT:
        return None
    if target.outcome in CARRIES_CHANGE:
        return "done" if target.drift is None else "drifted"
    if target.outcome in EXCEPTIONS:
        return "skipped"
    if target.phase is Phase.FAILED:
        is_unknown = target.failure is not None and target.failure.code is FailureCode.UNKNOWN
        return "unknown" if is_unknown else "failed"
    if target.phase in IN_FLIGHT_PHASES:
        return "in-flight"
    return None if closed else "pending"


def _groups(index: Index, node: Node) -> Iterator[str]:
    """Yield the groups of a node: its pools, team and site, and the cluster of a Kubernetes node."""
    found = [pool.id for pool in index.all_pools(node.name)]
    found += [f"{key}/{node.labels[key]}" for key in ("team", "site", "cluster") if key in node.labels]
    if node.kind is NodeKind.KUBERNETES and "cluster" not in node.labels:
        found += [f"cluster/{source}" for source in node.sources]
    yield from dict.fromkeys(found)
