"""Serializers of nodes, and why a node does not move."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import islice
from operator import attrgetter

from machines.facts.availability import observed_unavailability
from machines.facts.index import Index
from machines.model.node import NodeHealth, Observation
from machines.model.reasons import Param, Reason, ReasonCode, Remedy, RemedyKind
from machines.model.rollout import Failure, Target
from machines.model.selector import parse_selector
from machines.rules import trains
from machines.scheduler import decide
from machines.scheduler.progress import slot_s
from machines.states import IN_FLIGHT_PHASES, Outcome, Phase
from rolloutd.commands.resolve import ResolvedRollout
from rolloutd.control.daemons.runner_serializers import chosen_runner, current_runner, waiting_reason
from rolloutd.control.formats import fill, format_optional_timestamp, page
from rolloutd.control.nodes import wire_nodes
from rolloutd.control.requests import NodesQuery
from rolloutd.control.rollouts.serializers import NO_PROGRESS, minutes, reason
from rolloutd.engine.state import State, StepProgress
from rolloutd.ports import RunnerStatus


def node(state: State, resolved: ResolvedRollout, target: Target) -> wire_nodes.Node:
    return _node(state, resolved, target, blocking_reason(state, resolved, target))


def _node(state: State, resolved: ResolvedRollout, target: Target, blocker: Reason | None) -> wire_nodes.Node:
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
        "reason": reason(blocker),
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
    blockers = decide.explain_rollout_nodes(index, rollout, now, [each.node for each in targets])
    live = {each.node: state.step_progress.get((each.rollout, each.node), NO_PROGRESS) for each in targets}
    reasons = (
        node_reason(index, each, blockers.get(each.node), live[each.node], state.runners, now)
        for each in targets
    )
    return {
        "nodes": [_node(state, resolved, each, why) for each, why in zip(targets, reasons, strict=True)],
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


def why(state: State, resolved: ResolvedRollout, target: Target) -> wire_nodes.NodeReason:
    node = state.index.nodes.get(target.node)
    return {
        "node": target.node,
        "phase": target.phase.value,
        "outcome": None if target.outcome is None else target.outcome.value,
        "isolated": target.isolated,
        "reason": reason(blocking_reason(state, resolved, target)),
        "runner": chosen_runner(state.index, node),
        "is_selected": node is None or resolved.rollout.plan.selector.matches(node.labels),
        "trouble": "; ".join(state.problems()) or None,
    }


def blocking_reason(state: State, resolved: ResolvedRollout, target: Target) -> Reason | None:
    """Return why a node does not move; None if it moves or is done."""
    now = state.now()
    blocker = decide.explain_node(resolved.index, resolved.rollout.id, target.node, now)
    live = state.step_progress.get((target.rollout, target.node), NO_PROGRESS)
    return node_reason(resolved.index, target, blocker, live, state.runners, now)


_OUTCOME_CODES = frozenset(ReasonCode(outcome.value) for outcome in Outcome)
"""Reasons of done nodes that wait for nothing."""


def node_reason(
    index: Index,
    target: Target,
    blocker: Reason | None,
    live: StepProgress,
    runners: Mapping[str, RunnerStatus],
    now: float,
) -> Reason | None:
    """Return why the node waits; None for a node that moves or is done.

    The core knows why nodes do not start (`blocker`).  A node in flight waits for its
    isolators, its checks, its next observation, or for another run on this machine.
    """
    awaits_rollback = (
        target.phase is Phase.DONE and blocker is not None and blocker.code not in _OUTCOME_CODES
    )
    if target.phase in (Phase.PENDING, Phase.FAILED) or target.drift is not None or awaits_rollback:
        found = blocker
    else:
        is_in_flight = target.phase in IN_FLIGHT_PHASES
        found = _in_flight_reason(index, target, live, runners, now) if is_in_flight else None
    if found is None or found.remedy is None or found.remedy.until is None or found.remedy.until > now:
        return found
    # The instant has passed, and what was due then is under way.
    return replace(found, remedy=replace(found.remedy, until=None))


def _in_flight_reason(
    index: Index, target: Target, live: StepProgress, runners: Mapping[str, RunnerStatus], now: float
) -> Reason | None:
    if live.awaited_sources:
        awaited, answer = {"sources": live.awaited_sources}, Remedy(RemedyKind.WAIT_FOR_INVENTORY)
        return Reason(ReasonCode.INVENTORY_AWAITED, target.node, awaited, live.since, answer)
    if (for_runner := waiting_reason(index, target.node, runners)) is not None:
        return for_runner
    if (shared := trains.outage_reason(index, target, now)) is not None:
        return shared
    params: dict[str, Param]
    isolation = Remedy(RemedyKind.WAIT_FOR_ISOLATION, until=live.isolation_deadline)
    if live.awaited_slot is not None:
        return replace(live.awaited_slot, remedy=isolation)
    if live.api_problem:
        params = {"detail": live.api_problem}
        remedy = isolation if target.phase is Phase.ISOLATING else Remedy(RemedyKind.WAIT_FOR_API)
        return Reason(ReasonCode.AWAITING_API, target.node, params, live.api_problem_since, remedy)
    if (waits := live.repeated_try) is not None:
        params = {"detail": waits.text, "tries": waits.tries}
        code = ReasonCode.NOT_RETURNED_YET if waits.is_return else ReasonCode.NOT_ISOLATED_YET
        deadline = isolation if target.phase is Phase.ISOLATING and not waits.is_return else None
        return Reason(code, target.node, params, waits.since, deadline)
    if live.failing_check:
        checks = {"step": live.step, "detail": live.failing_check}
        remedy = Remedy(RemedyKind.WAIT_FOR_CHECK, until=live.failing_check_until)
        return Reason(ReasonCode.NOT_PASSED_YET, target.node, checks, live.since, remedy)
    seen = observed_unavailability(index, target.node)
    if seen is None or not isinstance(seen.cause, Observation) or seen.cause.sight is not NodeHealth.UNKNOWN:
        return None
    return Reason(ReasonCode.NODE_UNKNOWN, seen.node, seen.params, seen.since, seen.remedy)


def failure(found: Failure) -> wire_nodes.Failure:
    return fill(wire_nodes.Failure, found)
