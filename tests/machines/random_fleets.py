"""Random small fleets, settings and plans."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from zoneinfo import ZoneInfo

from machines.model.limits import Budget, Limits, PoolRule
from machines.model.node import Node
from machines.model.plan import EnrolPolicy, GateName, Plan, StepDef, VoteRequirement, WaveDef
from machines.model.windows import Window
from tests.machines.builders import plan_of

TEAMS = ("a", "b", "c")


def random_node(rng: random.Random, name: str) -> Node:
    """Return a node with a random team and rack."""
    labels = {}
    if rng.random() < 0.95:
        labels["team"] = rng.choice(TEAMS)
    if rng.random() < 0.8:
        labels["rack"] = rng.choice(("r1", "r2", "r3"))
    return Node(name, labels=labels)


def random_limits(rng: random.Random) -> Limits:
    """Return random settings."""
    pools = {"team": PoolRule(_random_budget(rng))}
    if rng.random() < 0.5:
        pools["rack"] = PoolRule(_random_budget(rng), {"r1": Budget(rng.choice((0, 1, 2)))})
    return Limits(pools=pools, max_parallel=rng.randint(1, 6))


def _random_budget(rng: random.Random) -> Budget:
    return rng.choice((Budget(1), Budget(1), Budget(2), Budget(percent=50)))


def oracle_pools(limits: Limits) -> dict[str, dict[str, Any]]:
    """Return the pools of the settings in the words of the oracle."""

    def plain(budget: Budget) -> Any:
        return budget.count if budget.percent is None else f"{budget.percent}%"

    return {
        key: {"": plain(rule.default)} | {value: plain(budget) for value, budget in rule.values.items()}
        for key, rule in limits.pools.items()
    }


def random_plan(rng: random.Random) -> Plan:
    """Return a random plan."""

    def need() -> VoteRequirement:
        return VoteRequirement(
            owner=rng.choice((0, 1, 1, 2)),
            each_team=rng.choice((0, 0, 1)),
            four_eyes=rng.random() < 0.3,
            per_team=rng.random() < 0.3,
        )

    canary = WaveDef("canary", None, rng.choice((None, 1)), rng.choice((0.0, 100.0)), GateName.CONTINUE)
    fleet = WaveDef("fleet", max_parallel=rng.choice((None, 2)))
    window = Window(frozenset(range(7)), 60, 1380, ZoneInfo("UTC"))
    return plan_of(
        waves=rng.choice(((canary, fleet), (canary, fleet), (fleet,))),
        gates={
            GateName.START: need(),
            GateName.CONTINUE: need(),
            GateName.PROCEED: replace(need(), owner=1, per_team=False, each_team=0),
        },
        max_parallel=rng.choice((None, 1, 2, 5)),
        pool_keys=rng.choice(((), (), ("rack",))),
        windows=rng.choice(((), (), (window,))),
        enrol=rng.choice(tuple(EnrolPolicy)),
        vote_ttl_s=rng.choice((None, None, 500.0)),
        expected_s=30.0,
        traffic=rng.choice(((), (), (StepDef("traffic.0.kubernetes", "kubernetes"),))),
    )
