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
from machines.model.rollout import Target
from machines.states import CARRIES_CHANGE, EXCEPTIONS, IN_FLIGHT_PHASES, Outcome, Phase
from rolloutd.control.fleet import wire_fleet

MAX_KEPT_STATES = 500_000
"""Nodes of closed rollouts whose state is kept, 130 bytes each; further ones are read again."""

NEVER: wire_fleet.ChangeState = "never"

ChangeKey = tuple[str, str]
"""A plan's name and the hash of what it does."""


@dataclass(slots=True, eq=False)
class RolloutStates:
    """What a rollout says of its nodes and since when, by its targets as they were last read."""

    closed: bool
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

    def add(self, node: str, groups: Iterable[str]) -> None:
        """Count a known node in its groups."""
        said = [each.states[node] for each in self.rollouts.values() if node in each.states]
        # The rollout that touched it last decides; of equal ones the first.
        state = max(said, key=lambda each: (each[0] != "pending", each[1]))[0] if said else NEVER
        self.states[node] = state
        self.counts[state] += 1
        for group in groups:
            if group not in self.group_counts:
                self.group_counts[group] = Counter()
            self.group_counts[group][state] += 1

    def remove(self, node: str, groups: Iterable[str]) -> None:
        """Count a node no longer."""
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
        self._pool_keys: tuple[str, ...] = ()

    def has_closed(self, key: ChangeKey, rollout: str) -> bool:
        """Return whether the targets of a closed rollout are kept."""
        known = self._changes[key].rollouts.get(rollout) if key in self._changes else None
        return known is not None and known.closed

    def update(
        self,
        index: Index,
        changes: Mapping[ChangeKey, Sequence[str]],
        closed: Mapping[str, Sequence[Target]],
        plan: str | None,
    ) -> Mapping[ChangeKey, ChangeCounts]:
        """Return the changes of a plan, or all; `changes` names the rollouts of each.

        `closed` has the targets of closed rollouts that are not kept.
        """
        self._update_nodes(index)
        found = {key: self._update_change(index, key, names, closed) for key, names in changes.items()}
        others = {key: each for key, each in self._changes.items() if plan not in (None, key[0])}
        self._changes = {**others, **found}
        self._limit(index)
        return found

    def _update_nodes(self, index: Index) -> None:
        if index.pool_keys != self._pool_keys:
            # Every node may be in other pools.
            self._pool_keys = index.pool_keys
            self._changes, self._nodes, self._groups = {}, {}, {}
        changed, removed = _differences(self._nodes, index.nodes)
        # The facts write to a copy of it once they are forked, so it stays as it is.
        self._nodes = index.nodes
        for name in (*changed, *removed):
            before, after = self._groups.pop(name, None), None
            if name in self._nodes:
                after = self._groups[name] = tuple(_groups(index, self._nodes[name]))
            for change in self._changes.values():
                if before is not None:
                    change.remove(name, before)
                if after is not None:
                    change.add(name, after)

    def _update_change(
        self,
        index: Index,
        key: ChangeKey,
        names: Sequence[str],
        closed: Mapping[str, Sequence[Target]],
    ) -> ChangeCounts:
        known = self._changes.get(key, ChangeCounts())
        read = {name: index.targets_by_node(name) for name in names if name in index.rollouts}
        read |= {name: {each.node: each for each in closed[name]} for name in names if name in closed}
        rollouts: dict[str, RolloutStates] = {}
        changed: list[str] = []
        for name in names:
            is_closed = name not in index.rollouts or index.rollouts[name].closed
            states = known.rollouts.get(name)
            if states is None or states.closed is not is_closed:
                states = RolloutStates(is_closed)
            rollouts[name] = states
            if name in read:
                changed += states.read(read[name])
            if name not in index.rollouts:
                states.targets = {}  # it is not read again
        if list(known.rollouts.values()) != list(rollouts.values()):
            known = ChangeCounts()
            changed = list(self._nodes)
        known.rollouts = rollouts
        for node in changed:
            if node in known.states:
                known.remove(node, self._groups[node])
            if node in self._groups:
                known.add(node, self._groups[node])
        return known

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
        return "failed"
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
