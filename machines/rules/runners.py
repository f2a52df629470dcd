"""Whether the runner of a node can begin its runs; asked before the node takes a slot of a pool."""

from __future__ import annotations

from machines.facts.index import Index
from machines.model.reasons import Param, Reason, ReasonCode, Remedy, RemedyKind
from machines.model.rollout import Target
from machines.model.runners import RunnerProblem, RunnerRule, runner_of
from machines.rules.pools import Capacity
from machines.states import IN_FLIGHT_PHASES


def runner_blocker(index: Index, target: Target, capacity: Capacity | None = None) -> Reason | None:
    """Return why no runner begins the node's runs; `capacity` has what this decision starts besides."""
    if (reason := unavailable_reason(index, target.node, target.since)) is not None:
        return reason
    rule = runner_of(index.limits.runners, index.nodes[target.node])
    if rule is None or rule.parallel is None:
        return None
    in_flight = len(_nodes_of(index, rule, Capacity() if capacity is None else capacity) - {target.node})
    if in_flight < rule.parallel:
        return None
    params: dict[str, Param] = {**_described(rule), "active": in_flight, "parallel": rule.parallel}
    return Reason(ReasonCode.RUNNER_FULL, target.node, params, remedy=Remedy(RemedyKind.WAIT_FOR_CAPACITY))


def unavailable_reason(index: Index, node: str, since: float) -> Reason | None:
    """Return why no run of a node could begin now; `since` is when the node began to need one."""
    rule = runner_of(index.limits.runners, index.nodes[node])
    if rule is None:
        return Reason(ReasonCode.NO_RUNNER, node, since=since, remedy=Remedy(RemedyKind.CHANGE_SETTINGS))
    problem = index.runner_problems.get(rule.name)
    return None if problem is None else problem_reason(rule, node, problem)


def problem_reason(rule: RunnerRule, node: str, problem: RunnerProblem) -> Reason:
    """Return the reason of a node whose runner has a problem."""
    code = ReasonCode.RUNNER_FULL if problem.is_full else ReasonCode.RUNNER_DOWN
    params = {**_described(rule), "detail": problem.detail}
    return Reason(
        code, node, params, problem.since, Remedy(RemedyKind.WAIT_FOR_RUNNER, {"runner": rule.name})
    )


def _described(rule: RunnerRule) -> dict[str, Param]:
    return {"runner": rule.name, "match": rule.match.text}


def _nodes_of(index: Index, rule: RunnerRule, capacity: Capacity) -> set[str]:
    """Return the nodes of a runner that are in flight, or that this decision starts."""
    in_flight = {each.node for each in index.needing_driver() if each.phase in IN_FLIGHT_PHASES}
    nodes = (index.nodes.get(name) for name in in_flight | capacity.nodes)
    return {node.name for node in nodes if node and runner_of(index.limits.runners, node) == rule}
