"""Serializers of nodes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from itertools import islice
from operator import attrgetter

from machines.facts.index import Index
from machines.model.reasons import Reason
from machines.model.rollout import Failure, Target
from machines.model.selector import parse_selector
from machines.scheduler.progress import slot_s
from machines.scheduler.why import why, why_nodes
from rolloutd.commands.resolve import ResolvedRollout
from rolloutd.control.daemons.runner_serializers import chosen_runner, current_runner
from rolloutd.control.formats import fill, format_optional_timestamp, page
from rolloutd.control.nodes import wire_nodes
from rolloutd.control.requests import NodesQuery
from rolloutd.control.rollouts.serializers import NO_PROGRESS, minutes, reason
from rolloutd.engine.state import State


def node(state: State, resolved: ResolvedRollout, target: Target) -> wire_nodes.Node:
    return _node(state, resolved, target, why(resolved.index, target, state.now(), state.live))


def _node(state: State, resolved: ResolvedRollout, target: Target, waits: Reason | None) -> wire_nodes.Node:
    live = state.step_progress.get((target.rollout, target.node), NO_PROGRESS)
    now, known = state.now(), resolved.index.preparations(target.rollout)
    return {
        "node": target.node,
        "team": target.team,
        "pools": list(target.pools),
        "phase": target.phase.value,
        "wave": target.wave,
        "outcome": target.outcome.value if target.outcome is not None else None,
        "attempt": target.attempt,
        "isolated": target.isolated,
        "since": format_optional_timestamp(target.since),
        "step": live.step or None,
        "percent": round(live.run.percent, 1) if live.step else None,
        "runner": current_runner(state, target, live.step),
        "reason": reason(waits),
        "admitted_at": format_optional_timestamp(target.admitted_at),
        "minutes": minutes(
            slot_s(target, now), 0.0 if known is None else known.node_spent_s(target.node, now)
        ),
    }


def nodes(
    state: State,
    resolved: ResolvedRollout,
    query: NodesQuery,
    seq: int,
    among: Collection[str] | None = None,
) -> wire_nodes.Nodes:
    index, rollout, now = resolved.index, resolved.rollout.id, state.now()
    # Almost in order already, so that sorting 100,000 targets takes some milliseconds.
    in_order = sorted(index.targets(rollout), key=attrgetter("position"))
    begin = 0
    if query.after is not None:
        after = resolved.target(query.after)
        # Two targets may have one position.
        first = bisect_left(in_order, after.position, key=attrgetter("position"))
        begin = in_order.index(after, first) + 1
    selected = (
        each
        for each in islice(in_order, begin, None)
        if (among is None or each.node in among) and _is_selected(index, query, each)
    )
    # One more than the page has: it says whether another page follows.
    some = list(islice(selected, None if query.limit is None else query.limit + 1))
    targets, next_after = page(some, query, lambda target: target.node)
    reasons = why_nodes(index, rollout, now, [each.node for each in targets], state.live)
    return {
        "nodes": [_node(state, resolved, each, reasons[each.node]) for each in targets],
        "seq": seq,
        "next": next_after,
    }


def _is_selected(index: Index, query: NodesQuery, target: Target) -> bool:
    """Return whether the query asks for the node; a node that left the inventory has no labels."""
    if query.phase is not None and target.phase.value not in query.phase.split(","):
        return False
    if query.pool is not None and query.pool not in target.pools:
        return False
    if query.selector is None:
        return True
    node = index.nodes.get(target.node)
    return parse_selector(query.selector).matches({} if node is None else node.labels)


def node_reason(state: State, resolved: ResolvedRollout, target: Target) -> wire_nodes.NodeReason:
    node = state.index.nodes.get(target.node)
    return {
        "node": target.node,
        "phase": target.phase.value,
        "outcome": None if target.outcome is None else target.outcome.value,
        "isolated": target.isolated,
        "reason": reason(why(resolved.index, target, state.now(), state.live)),
        "runner": chosen_runner(state.index, node),
        "is_selected": node is None or resolved.rollout.plan.selector.matches(node.labels),
        "trouble": "; ".join(state.problems()) or None,
    }


def failure(found: Failure) -> wire_nodes.Failure:
    return fill(wire_nodes.Failure, found)
