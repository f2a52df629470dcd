"""Serializers of runners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from machines.facts.index import Index
from machines.model.limits import RunnerRule, runner_of
from machines.model.node import Node
from machines.model.plan import PLAYBOOK_RUN, Capability
from machines.model.rollout import Target
from machines.model.timefmt import format_rfc3339
from rolloutd.control.daemons import wire_daemons
from rolloutd.engine.state import State
from rolloutd.plugin import LOCAL_RUNNER
from rolloutd.ports import RunnerStatus, TunedRunnerStatus
from rolloutd.service.memory import memory_bytes
from rolloutd.texts.runner_text import describe_runner


def runs(runners: Mapping[str, RunnerStatus], rules: Sequence[RunnerRule]) -> wire_daemons.Runs:
    local = runners.get(LOCAL_RUNNER, RunnerStatus())
    tuned = local if isinstance(local, TunedRunnerStatus) else TunedRunnerStatus()
    return {
        "parallel": local.parallel,
        "active": local.active,
        "waiting": len(local.waiting),
        "forks": tuned.started["fork"],
        "new_processes": tuned.started["new process"],
        "fork_servers": len(tuned.servers),
        "fork_servers_bytes": memory_bytes(tuned.servers),
        "plain_because": tuned.plain_because or None,
        "runners": [_runner(rule, runners[rule.name]) for rule in rules if rule.name in runners],
    }


def _runner(rule: RunnerRule, status: RunnerStatus) -> wire_daemons.Runner:
    problem, parallel, waiting = status.problem, rule.parallel or status.parallel, len(status.waiting)
    detail = None if problem is None else problem.detail
    return {
        "name": rule.name,
        "match": rule.match.text or None,
        "parallel": parallel,
        "active": status.active,
        "waiting": waiting,
        "problem": detail,
        "since": None if problem is None else format_rfc3339(problem.since, "milliseconds"),
        "text": describe_runner(rule.match.text, status.active, parallel, waiting, detail),
    }


def chosen_runner(index: Index, node: Node | None) -> wire_daemons.ChosenRunner | None:
    """Return which runner has a node, and the selector that chose it; None without one."""
    rule = None if node is None else runner_of(index.limits.runners, node)
    return None if rule is None else {"name": rule.name, "match": rule.match.text or None}


def current_runner(state: State, target: Target, step: str) -> str | None:
    """Return the runner, or the kind of change, that executes a node's run now.

    None without a run, and where one runner executes all of them.
    """
    if not step or target.rollout not in state.index.rollouts:
        return None
    plan = state.index.rollouts[target.rollout].plan
    stage = next((each for each in (*plan.stages, *plan.rollback) if each.step == step), None)
    if stage is not None and stage.kind != PLAYBOOK_RUN:
        return stage.kind
    steps = (*plan.isolate, *plan.verify, *plan.rollback_verify)
    is_run = stage is not None or any(
        each.name == step and Capability.STARTS_RUN in each.capabilities for each in steps
    )
    chosen = chosen_runner(state.index, state.index.nodes.get(target.node))
    return chosen["name"] if is_run and chosen is not None and len(state.runners) > 1 else None
