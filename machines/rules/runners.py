"""Whether the runner of a node can begin its runs; asked before the node takes a slot of a pool."""

from __future__ import annotations

from machines.facts.index import Index
from machines.model.plan import PLAYBOOK_RUN
from machines.model.reasons import Param, Reason, ReasonCode, Remedy, RemedyKind
from machines.model.rollout import Target
from machines.model.runners import RunnerProblem, RunnerRule, runner_of
from machines.rules.pools import Capacity


def runner_blocker(index: Index, target: Target, capacity: Capacity | None = None) -> Reason | None:
    """Return why no runner begins the node's runs; `capacity` has what this decision starts besides."""
    kinds = index.rollout(target.rollout).plan.run_kinds
    for kind in sorted(kinds):
        if (reason := unavailable_reason(index, target.node, target.since, kind)) is not None:
            return reason
    if PLAYBOOK_RUN not in kinds:
        return None
    rule = _rule_of(index, target.node)
    if rule is None or rule.parallel is None:
        return None
    nodes = index.in_flight_of_runner(rule.name)
    in_flight = (
        len(nodes) - (target.node in nodes) + (0 if capacity is None else capacity.starts_of(rule.name))
    )
    if in_flight < rule.parallel:
        return None
    params: dict[str, Param] = {**_described(rule), "active": in_flight, "parallel": rule.parallel}
    return Reason(ReasonCode.RUNNER_FULL, target.node, params, remedy=Remedy(RemedyKind.WAIT_FOR_CAPACITY))


def unavailable_reason(index: Index, node: str, since: float, kind: str = PLAYBOOK_RUN) -> Reason | None:
    """Return why no run of this kind on a node could begin now; `since` is when it began to need one."""
    if node not in index.nodes:
        return None  # it left the inventory, which other rules say
    rule = _rule_of(index, node) if kind == PLAYBOOK_RUN else RunnerRule(kind)
    if rule is None:
        return no_runner_reason(node, since)
    problem = index.runner_problems.get(rule.name)
    return None if problem is None else problem_reason(rule, node, problem)


def _rule_of(index: Index, node: str) -> RunnerRule | None:
    at = index.nodes.get(node)
    return None if at is None else runner_of(index.limits.runners, at)


def no_runner_reason(node: str, since: float) -> Reason:
    return Reason(ReasonCode.NO_RUNNER, node, since=since, remedy=Remedy(RemedyKind.CHANGE_SETTINGS))


def problem_reason(rule: RunnerRule, node: str, problem: RunnerProblem) -> Reason:
    code = ReasonCode.RUNNER_FULL if problem.is_full else ReasonCode.RUNNER_DOWN
    params = {**_described(rule), "detail": problem.detail}
    return Reason(
        code, node, params, problem.since, Remedy(RemedyKind.WAIT_FOR_RUNNER, {"runner": rule.name})
    )


def _described(rule: RunnerRule) -> dict[str, Param]:
    return {"runner": rule.name, "match": rule.match.text}
