"""The bottleneck of a rollout: the pool, limit or windows with the longest serial time.

What one more slot there saves is found by another walk with it, not by an estimate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from machines.facts.projection import Projection
from machines.forecast.model import Bottleneck, BottleneckKind
from machines.forecast.walk import Walk
from machines.model import windows
from machines.model.limits import Budget, Limits, PoolRule
from machines.model.plan import Plan
from machines.rules.start_blockers import window_groups

Serial = tuple[float, BottleneckKind, str]
"""Serial time in seconds, and whose it is."""

_LOCAL_RUNNER = (BottleneckKind.RUNNER, "")
"""The daemon's own machine, without a name here: a runner elsewhere may be named `runner`."""


def bottleneck_of(before: Projection, walk: Walk, rollout: str) -> Bottleneck | None:
    """Return the bottleneck of a rollout, None when no node of it waits; `walk` has ended."""
    longest = max(_serial_times(before, walk, rollout), default=None)
    if longest is None or not longest[0]:
        return None
    _, kind, name = longest
    changed, assumptions = before.fork(), walk.assumptions
    limits, plan = _with_one_more(changed, rollout, kind, name)
    changed.update_limits(limits, {rollout: plan})
    if (kind, name) == _LOCAL_RUNNER:
        assumptions = replace(assumptions, parallel_runs=assumptions.parallel_runs + 1)
    saves_s = _ends_at(walk, rollout) - _ends_at(walk.again(changed, assumptions), rollout)
    return Bottleneck(kind, name or "runner", max(0.0, saves_s))


def _ends_at(walk: Walk, rollout: str) -> float:
    ended_at = walk.index.rollout(rollout).ended_at
    ends = (
        each.ends_at for each in walk.agenda.attempts if each.rollout == rollout and each.ends_at is not None
    )
    return max(ends, default=0.0) if ended_at is None else ended_at


def _serial_times(before: Projection, walk: Walk, rollout: str) -> list[Serial]:
    """Return how long each pool, limit and window would take alone."""
    plan = before.rollout(rollout).plan
    own = [
        each for each in walk.agenda.attempts if each.rollout == rollout and not each.stage and each.ends_at
    ]
    pools = {pool for each in own for pool in each.pools}
    work_s: dict[str, float] = defaultdict(float)
    fleet_s = rollout_s = runs_s = 0.0
    for each in walk.agenda.attempts:
        if each.ends_at is None:
            continue
        runs_s += sum(step.duration_s for step in each.steps if step.is_run)
        if each.stage:
            continue
        took_s = each.ends_at - max(each.starts_at, before.now) - each.runner_wait_s(before.now)
        rollout_s += took_s if each.rollout == rollout else 0.0
        # What joins an outage takes no slot of its own.
        if each.outage_of is None:
            fleet_s += took_s
            for name in (*each.pools, *each.bounds):
                work_s[name] += took_s
    budgets = {pool: before.budget(before.pool(pool)) for pool in pools}
    found: list[Serial] = [
        (work_s[pool] / budget, BottleneckKind.POOL, pool) for pool, budget in budgets.items() if budget
    ]
    bounds = {name: most for each in own for name, most in each.bounds.items()}
    found += [(work_s[name] / most, BottleneckKind.RUNNER, name) for name, most in bounds.items()]
    found.append((fleet_s / before.limits.max_parallel, BottleneckKind.MAX_PARALLEL, "fleet"))
    found.append((runs_s / walk.assumptions.parallel_runs, *_LOCAL_RUNNER))
    if plan.max_parallel:
        found.append((rollout_s / plan.max_parallel, BottleneckKind.MAX_PARALLEL, rollout))
    ends_at = max((each.ends_at for each in own if each.ends_at), default=before.now)
    teams = sorted({each.team or "" for each in own})
    for team in teams:
        groups = window_groups(before, before.rollout(rollout), team or None)
        for owner, group in groups:
            name = "plan" if owner == "plan" else f"team/{team}"
            if group:
                found.append((_closed_s(group, before.now, ends_at), BottleneckKind.WINDOW, name))
    return found


def _closed_s(group: Sequence[windows.Window], since: float, until: float) -> float:
    """Return how long these windows are closed within a time."""
    closed_s, at = 0.0, since
    while at < until:
        opens = windows.next_opening(group, at)
        if opens is None or opens >= until:
            return closed_s + until - at
        closed_s += opens - at
        closes = windows.open_until(group, opens)
        at = math.inf if closes is None else closes
    return closed_s


def _with_one_more(index: Projection, rollout: str, kind: BottleneckKind, name: str) -> tuple[Limits, Plan]:
    """Return the limits and the plan with one more slot there, or with these windows always open."""
    limits, plan = index.limits, index.rollout(rollout).plan
    match kind:
        case BottleneckKind.POOL:
            key, _, value = name.partition("/")
            rule = limits.pools.get(key, PoolRule())
            more = Budget(index.budget(index.pool(name)) + 1)
            rule = replace(rule, values={**rule.values, value: more})
            return replace(limits, pools={**limits.pools, key: rule}), plan
        case BottleneckKind.MAX_PARALLEL if name == "fleet":
            return replace(limits, max_parallel=limits.max_parallel + 1), plan
        case BottleneckKind.MAX_PARALLEL:
            return limits, replace(plan, max_parallel=(plan.max_parallel or 0) + 1)
        case BottleneckKind.WINDOW if name == "plan":
            return limits, replace(plan, windows=())
        case BottleneckKind.WINDOW:
            team = name.partition("/")[2]
            index.team_rules = {key: each for key, each in index.team_rules.items() if key != team}
            return replace(limits, team_windows={**limits.team_windows, team: ()}), plan
        case BottleneckKind.RUNNER:
            workers = {each: most + (each == name) for each, most in limits.workers.items()}
            runners = (
                rule if rule.parallel is None else replace(rule, parallel=rule.parallel + (rule.name == name))
                for rule in limits.runners
            )
            return replace(limits, workers=workers, runners=tuple(runners)), plan
        case _:
            assert_never(kind)
