"""Whether the runner of a node can begin its runs; asked before the node takes a slot of a pool."""

from __future__ import annotations

from collections.abc import Mapping

from machines.facts.index import Index
from machines.model.limits import RunnerProblem, RunnerQueue, RunnerRule, part_of_runner, runner_of
from machines.model.plan import PLAYBOOK_RUN
from machines.model.reasons import Param, Reason, ReasonCode, Remedy, RemedyKind
from machines.model.rollout import Target
from machines.rules.pools import Capacity


def runner_blocker(index: Index, target: Target, capacity: Capacity | None = None) -> Reason | None:
    """Return why no runner begins the node's runs; `capacity` has what this decision starts besides."""
    kinds = index.rollout(target.rollout).plan.run_kinds
    for kind in sorted(kinds):
        if (reason := unavailable_reason(index, target.node, target.since, kind)) is not None:
            return reason
    node = index.nodes.get(target.node)
    for rule in () if node is None else index.bounds_of(node, kinds):
        assert rule.parallel is not None, "a rule without a limit bounds nothing"
        nodes = index.in_flight_of_runner(rule.name)
        starts = 0 if capacity is None else capacity.starts_by_runner[rule.name]
        in_flight = len(nodes) - (target.node in nodes) + starts
        if in_flight >= rule.parallel:
            params: dict[str, Param] = {**_described(rule), "active": in_flight, "parallel": rule.parallel}
            remedy = Remedy(RemedyKind.WAIT_FOR_CAPACITY)
            return Reason(ReasonCode.RUNNER_FULL, target.node, params, remedy=remedy)
    return None


def unavailable_reason(index: Index, node: str, since: float, kind: str = PLAYBOOK_RUN) -> Reason | None:
    """Return why no run of this kind on a node could begin now; `since` is when it began to need one."""
    if node not in index.nodes:
        return None  # it left the inventory, which other rules say
    at = index.nodes[node]
    rule = runner_of(index.limits.runners, at) if kind == PLAYBOOK_RUN else RunnerRule(kind)
    if rule is None:
        return _no_runner_reason(node, since)
    parts = () if kind == PLAYBOOK_RUN else (*at.sources, node)
    for each in (rule, *(RunnerRule(part_of_runner(kind, part)) for part in parts)):
        if (problem := index.runner_problems.get(each.name)) is not None:
            return _problem_reason(each, node, problem)
    return None


def queued_run_reason(index: Index, node: str, runners: Mapping[str, RunnerQueue]) -> Reason | None:
    """Return why the run of a node in flight waits for its runner; None if it does not."""
    name = next((name for name, each in runners.items() if node in each.waiting), None)
    if name is None:
        return None
    queue = runners[name]
    at = index.nodes.get(node)
    if at is not None and runner_of(index.limits.runners, at) is None:
        return _no_runner_reason(node, queue.waiting[node])
    rules = {rule.name: rule for rule in index.limits.runners}
    if name not in rules and (reason := unavailable_reason(index, node, queue.waiting[node], name)):
        return reason
    if queue.problem is not None:
        return _problem_reason(rules.get(name, RunnerRule(name)), node, queue.problem)
    params: dict[str, Param] = {"runner": name, "active": queue.active, "parallel": queue.parallel}
    end_of_run = Remedy(RemedyKind.WAIT_FOR_RUN)
    return Reason(ReasonCode.RUNNER_FULL, node, params, queue.waiting[node], end_of_run)


def _no_runner_reason(node: str, since: float) -> Reason:
    return Reason(ReasonCode.NO_RUNNER, node, since=since, remedy=Remedy(RemedyKind.CHANGE_SETTINGS))


def _problem_reason(rule: RunnerRule, node: str, problem: RunnerProblem) -> Reason:
    code = ReasonCode.RUNNER_FULL if problem.is_full else ReasonCode.RUNNER_DOWN
    params = {**_described(rule), "detail": problem.detail}
    return Reason(
        code, node, params, problem.since, Remedy(RemedyKind.WAIT_FOR_RUNNER, {"runner": rule.name})
    )


def _described(rule: RunnerRule) -> dict[str, Param]:
    return {"runner": rule.name, "match": rule.match.text}
