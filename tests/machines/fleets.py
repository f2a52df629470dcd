"""Random fleets, settings and plans, small enough that everything meets everything."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from zoneinfo import ZoneInfo

from machines.limits import Budget, Limits, PoolRule
from machines.node import Node
from machines.plan import Enrol, GateName, Need, Plan, StepSpec, WaveSpec
from machines.windows import Window
from tests.machines.worlds import plan_of

TEAMS = ("a", "b", "c")


def node_of(chance: random.Random, name: str) -> Node:
    """Return a node with a random team and rack."""
    labels = {}
    if chance.random() < 0.95:
        labels["team"] = chance.choice(TEAMS)
    if chance.random() < 0.8:
        labels["rack"] = chance.choice(("r1", "r2", "r3"))
    return Node(name, labels=labels)


def limits_of(chance: random.Random) -> Limits:
    """Return random settings."""
    pools = {"team": PoolRule(_budget(chance))}
    if chance.random() < 0.5:
        pools["rack"] = PoolRule(_budget(chance), {"r1": Budget(chance.choice((0, 1, 2)))})
    return Limits(pools=pools, max_parallel=chance.randint(1, 6))


def _budget(chance: random.Random) -> Budget:
    return chance.choice((Budget(1), Budget(1), Budget(2), Budget(percent=50)))


def plain_pools(limits: Limits) -> dict[str, dict[str, Any]]:
    """Return the pools of the settings in the words of the oracle."""

    def plain(budget: Budget) -> Any:
        return budget.count if budget.percent is None else f"{budget.percent}%"

    return {
        key: {"": plain(rule.default)} | {value: plain(budget) for value, budget in rule.values.items()}
        for key, rule in limits.pools.items()
    }


def some_plan(chance: random.Random) -> Plan:
    """Return a random plan."""

    def need() -> Need:
        return Need(
            owner=chance.choice((0, 1, 1, 2)),
            each_team=chance.choice((0, 0, 1)),
            four_eyes=chance.random() < 0.3,
            per_team=chance.random() < 0.3,
        )

    canary = WaveSpec(
        "canary", None, chance.choice((None, 1)), chance.choice((0.0, 100.0)), GateName.CONTINUE
    )
    fleet = WaveSpec("fleet", max_parallel=chance.choice((None, 2)))
    window = Window(frozenset(range(7)), 60, 1380, ZoneInfo("UTC"))
    return plan_of(
        waves=chance.choice(((canary, fleet), (canary, fleet), (fleet,))),
        gates={
            GateName.START: need(),
            GateName.CONTINUE: need(),
            GateName.PROCEED: replace(need(), owner=1, per_team=False, each_team=0),
        },
        max_parallel=chance.choice((None, 1, 2, 5)),
        pool_keys=chance.choice(((), (), ("rack",))),
        windows=chance.choice(((), (), (window,))),
        enrol=chance.choice(tuple(Enrol)),
        vote_ttl_s=chance.choice((None, None, 500.0)),
        expected_s=30.0,
        traffic=chance.choice(((), (), (StepSpec("traffic.0.kubernetes", "kubernetes"),))),
    )
