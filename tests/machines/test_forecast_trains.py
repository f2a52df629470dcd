"""The forecast of a train: the outages that it shares, and what it saves."""

from __future__ import annotations

import math
import random
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from machines.facts.projection import Projection
from machines.forecast.forecast import typical
from machines.forecast.model import Assumptions, TrainForecast
from machines.forecast.replay_builder import replay_of
from machines.forecast.walk import Walk
from machines.model.plan import StepDef
from machines.model.train import Train, TrainStored
from machines.model.windows import Window
from tests.machines.builders import ALICE, T0, index_of, nodes_of, submit
from tests.machines.test_forecast import STEP_S, forecast_of

CORDON = StepDef("isolate.0.kubernetes", "kubernetes")


def train_of_two(**second: Any) -> Projection:
    """Return two rollouts in a train over the same six nodes of two pools."""
    index = index_of(nodes_of({"a": ["a1", "a2", "a3"], "b": ["b1", "b2", "b3"]}))
    check = StepDef("verify.0.reachable", "reachable")
    for name, more in (("R", {}), ("S", second)):
        submit(index, name, isolate=(CORDON,), verify=(check,), **more)
    train = Train("t", ("R", "S"), 3600.0, ALICE, T0, {"R": "alice", "S": "alice"})
    index.apply(TrainStored(train, ALICE, "one outage", T0))
    return index


def test_train_saves_isolation_and_return_of_each_node() -> None:
    made = forecast_of(train_of_two(), explain="R")
    # Alone, each node has two isolations and returns of 100 s; together, one check more.
    assert made.train == TrainForecast("t", 6, 6 * (2 * STEP_S - STEP_S))
    assert forecast_of(train_of_two()).train is None


def test_train_that_waits_for_window_costs_downtime() -> None:
    now = datetime.fromtimestamp(T0, UTC)
    opens = now.hour * 60 + now.minute + 30
    window = Window(frozenset(range(7)), opens % 1440, (opens + 600) % 1440, ZoneInfo("UTC"))
    made = forecast_of(train_of_two(windows=(window,)), explain="R")
    assert made.train is not None
    assert made.train.outages_saved > 0
    assert made.train.downtime_saved_s < 0


@pytest.mark.parametrize("parallel_runs", [math.inf, 2])
def test_draws_keep_outages_of_train(parallel_runs: float) -> None:
    drawn, index = random.Random(7), train_of_two()
    runs = tuple(drawn.lognormvariate(5.0, 0.8) for _ in range(40))
    index.advance(T0)
    assumptions = Assumptions(parallel_runs=parallel_runs)
    walk = Walk(index.fork(), T0, lambda *step: runs, typical, assumptions)
    walk.run()
    replay = replay_of(walk, index)
    for _ in range(20):
        starts_at, ends_at = replay.draw(drawn)
        outages = dict[str, list[tuple[float, float]]]()
        for (_, node), (first, last) in sorted(replay.parts.items()):
            outages.setdefault(node, []).append((starts_at[first], ends_at[last]))
        for (begins, returns), (joins, leaves) in outages.values():
            assert begins < joins < leaves <= returns + 1e-6
        for pool in ("a", "b"):
            whole = sorted(each[0] for node, each in outages.items() if node.startswith(pool))
            assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(whole))
