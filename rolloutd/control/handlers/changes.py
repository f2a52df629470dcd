"""The matrix of changes and nodes, across rollouts, and its handler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from machines.facts.index import Index
from machines.model.node import Node, NodeKind, natural_sort_key
from machines.model.rollout import Target
from machines.states import CARRIES_CHANGE, EXCEPTIONS, IN_FLIGHT_PHASES, Outcome, Phase
from rolloutd.control import requests, wire_fleet
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.engine.tasks import compute

routes = RouteTable()

MAX_CLOSED = 50
"""Closed rollouts that are read, the latest: each may have ten thousand nodes."""

NEVER: wire_fleet.ChangeState = "never"


@dataclass(slots=True)
class _Change:
    """One change, and each node's rank and state; the higher rank counts."""

    plan: str
    change: str
    rollouts: list[str] = field(default_factory=list)
    states: dict[str, tuple[tuple[bool, float], wire_fleet.ChangeState]] = field(default_factory=dict)

    def add(self, rollout: str, targets: Iterable[Target], *, closed: bool) -> None:
        self.rollouts.append(rollout)
        for target in targets:
            found = _state_of(target, closed=closed)
            if found is None:
                continue
            rank = (found != "pending", target.since)
            if target.node not in self.states or self.states[target.node][0] < rank:
                self.states[target.node] = (rank, found)


@routes.add("GET", "/v1/changes", is_shared=True)
async def changes(services: Services, request: Request[requests.ChangesQuery]) -> wire_fleet.Changes:
    """Show which node has which change, across rollouts."""
    state, plan = services.state, request.input.plan
    found: dict[tuple[str, str], _Change] = {}

    def change_of(name: str, change: str) -> _Change:
        return found.setdefault((name, change), _Change(name, change))

    index = state.index.fork()
    for rollout in reversed([*index.rollouts.values()]):
        if plan in (None, rollout.plan.name):
            change = change_of(rollout.plan.name, rollout.digest.change)
            # In threads, on a fork: ten thousand targets take longer than the loop may pause.
            await compute(change.add, rollout.id, index.targets(rollout.id), closed=rollout.closed)
    for each in await state.store.list_closed_rollouts(MAX_CLOSED):
        if plan in (None, each.name) and each.id not in index.rollouts:
            targets = await state.store.load_targets(each.id)
            change = change_of(each.name, each.digest.change)
            await compute(change.add, each.id, targets, closed=True)
    return {"changes": await compute(_change_lines, index, found.values())}


def _change_lines(index: Index, found: Iterable[_Change]) -> list[wire_fleet.Change]:
    groups = {node.name: tuple(_groups(index, node)) for node in index.nodes.values()}
    return [_change_line(change, groups) for change in found]


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


def _change_line(change: _Change, groups: Mapping[str, Sequence[str]]) -> wire_fleet.Change:
    nodes = {node: change.states[node][1] if node in change.states else NEVER for node in groups}
    counted: dict[str, list[wire_fleet.ChangeState]] = {}
    for node, state in nodes.items():
        for group in groups[node]:
            counted.setdefault(group, []).append(state)
    in_order = sorted(nodes, key=natural_sort_key)
    return {
        "plan": change.plan,
        "change": change.change,
        "rollouts": change.rollouts,
        "percent": _percent(nodes.values()),
        "nodes": [{"node": node, "state": nodes[node]} for node in in_order],
        "groups": [
            {
                "group": group,
                "total": len(states),
                "done": states.count("done"),
                "percent": _percent(states),
            }
            for group, states in sorted(counted.items())
        ],
        "never": [node for node in in_order if nodes[node] == NEVER],
    }


def _percent(states: Iterable[wire_fleet.ChangeState]) -> float:
    """Return the percentage of nodes that have the change, of all known nodes that were not skipped."""
    to_change = [state for state in states if state != "skipped"]
    return round(100.0 * to_change.count("done") / len(to_change), 2) if to_change else 0.0
