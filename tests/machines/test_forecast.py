"""The forecast: what it says of waits, gates, bottlenecks, and of what never happens."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from machines.facts.projection import Projection
from machines.forecast.contention import Contention
from machines.forecast.forecast import forecast, typical
from machines.forecast.model import (
    AssumptionCode,
    Assumptions,
    Bottleneck,
    BottleneckKind,
    Deviation,
    RolloutForecast,
    Spread,
)
from machines.forecast.walk import HORIZON_S, Walk
from machines.model.events import FreezeStarted, HoldTaken, RolloutPaused, TeamRulesChanged
from machines.model.limits import Limits, PoolRule, RunnerRule, TeamRules
from machines.model.node import Node, NodeHealth, NodeKind, Observation
from machines.model.plan import GateName, MaintainStage, StepDef, VoteRequirement, WaveDef
from machines.model.reasons import ReasonCode
from machines.model.rollout import Hold
from machines.model.step_record import StepAction
from machines.model.windows import Freeze, Window
from machines.scheduler.admission import MAX_STARTS
from machines.scheduler.decide import decide
from tests.machines.builders import (
    ALICE,
    CANARY_THEN_FLEET,
    T0,
    admit,
    fail,
    index_of,
    nodes_of,
    submit,
)

STEP_S = 100.0
"""Each step of these tests takes as long; an attempt has one run and one check."""


def known(rollout: str, node: str, step: str, action: StepAction) -> Sequence[float]:
    return (STEP_S,)


def forecast_of(
    index: Projection, *, at: float = T0, draws: int = 1, seed: int = 1, explain: str = "", **assumed: Any
) -> RolloutForecast:
    """Return the forecast of the rollout R."""
    durations = assumed.pop("durations", known)
    made = forecast(
        index,
        at,
        durations,
        Assumptions(**assumed),
        draws=draws,
        random=random.Random(seed),
        explain=explain,
    )
    return made["R"]


def starts(made: RolloutForecast) -> dict[str, float | None]:
    """Return how long after the test's begin each node starts."""
    return {each.node: None if each.starts_at.p50 is None else each.starts_at.p50 - T0 for each in made.nodes}


def test_nodes_of_one_pool_follow_each_other() -> None:
    index = index_of(nodes_of({"a": ["n1", "n2", "n3"], "b": ["n4"]}))
    submit(index)
    made = forecast_of(index)
    assert starts(made) == {"n1": 0.0, "n4": 0.0, "n2": 200.0, "n3": 400.0}
    assert made.ends_at == Spread(T0 + 600.0, T0 + 600.0)
    assert made.work_s == Spread(600.0, 600.0)
    waits = {each.node: dict(each.waits) for each in made.nodes}
    assert waits["n3"] == {ReasonCode.POOL_FULL: 400.0}
    assert made.waits == {ReasonCode.POOL_FULL: 600.0}


def test_nodes_beyond_one_decision_start_at_once() -> None:
    nodes = nodes_of({f"t{team}": [f"n{team}"] for team in range(2 * MAX_STARTS + 6)})
    index = index_of(nodes, Limits(pools={"team": PoolRule()}, max_parallel=2 * MAX_STARTS + 3))
    submit(index)
    made = forecast_of(index)
    assert Counter(starts(made).values()) == {0.0: 2 * MAX_STARTS + 3, 200.0: 3}


def test_forecast_changes_no_fact() -> None:
    index = index_of(nodes_of({"a": ["n1", "n2"]}))
    submit(index)
    before, decision = index.snapshot(), decide(index, T0)
    forecast_of(index)
    assert (index.snapshot(), decide(index, T0)) == (before, decision)


def test_gate_and_soak_delay_second_wave() -> None:
    index = index_of(nodes_of({"a": ["n1", "n2"]}))
    gates = {GateName.START: VoteRequirement(), GateName.CONTINUE: VoteRequirement(owner=1, each_team=1)}
    submit(index, waves=CANARY_THEN_FLEET, gates=gates)
    made = forecast_of(index, approve_after_s=900.0)
    # The canary's 200 s, its soak of 600 s, and the votes 900 s after it is over.
    assert starts(made) == {"n1": 0.0, "n2": 1100.0}
    assert [(each.gate, each.wave, each.asked_at.p50) for each in made.gates] == [
        (GateName.CONTINUE, "canary", T0 + 200.0)
    ]
    assert made.nodes[1].waits == {
        ReasonCode.EARLIER_WAVE: 200.0,
        ReasonCode.SOAKING: 600.0,
        ReasonCode.GATE_CONTINUE: 300.0,
    }


def test_gate_without_votes_never_opens() -> None:
    index = index_of(nodes_of({"a": ["n1", "n2"]}))
    gates = {GateName.START: VoteRequirement(), GateName.CONTINUE: VoteRequirement(owner=1)}
    submit(index, waves=CANARY_THEN_FLEET, gates=gates)
    made = forecast_of(index, approve_after_s=None)
    assert starts(made) == {"n1": 0.0, "n2": None}
    assert made.ends_at == made.work_s == Spread(None, None)
    assert made.gates[0].asked_at.p50 == T0 + 200.0


def test_paused_rollout_never_starts() -> None:
    index = index_of(nodes_of({"a": ["n1"]}))
    submit(index)
    index.apply(RolloutPaused("R", ALICE, "wait", T0))
    made = forecast_of(index)
    assert starts(made) == {"n1": None}
    assert made.ends_at == Spread(None, None)
    assert made.nodes[0].waits == {ReasonCode.PAUSED: HORIZON_S}


def test_rollout_that_never_ends_has_no_bottleneck() -> None:
    index = index_of(nodes_of({"a": ["n1", "n2"]}))
    submit(index)
    admit(index, "n1")
    index.apply(RolloutPaused("R", ALICE, "wait", T0))
    assert forecast_of(index, explain="R").bottleneck is None


def test_reason_is_given_where_nothing_ever_starts() -> None:
    index = index_of(nodes_of({"a": ["n1", "n2"], "b": ["n3"]}))
    submit(index)
    index.apply(FreezeStarted(Freeze("f", "team/a", "fair", "sam", T0, math.inf)))
    index.apply(HoldTaken(Hold("n3", "cli", "h", ALICE, "repair", T0, None)))
    made = forecast_of(index)
    assert {each.node: (each.starts_at.p50, each.waits) for each in made.nodes} == {
        "n1": (None, {ReasonCode.FREEZE: HORIZON_S}),
        "n2": (None, {ReasonCode.FREEZE: HORIZON_S}),
        "n3": (None, {ReasonCode.HELD: HORIZON_S}),
    }


def test_failure_without_votes_is_waited_for() -> None:
    index = index_of(nodes_of({"a": ["n1", "n2"]}))
    submit(index, isolate=(StepDef("isolate.0.command", "command"),))
    admit(index, "n1")
    fail(index, "n1", at=T0)
    made = forecast_of(index, approve_after_s=None)
    assert [each.waits for each in made.nodes] == [{ReasonCode.NODE_FAILED: HORIZON_S}] * 2


@pytest.mark.parametrize("weekday", [5, 6])
def test_windows_that_never_open_together_are_never(weekday: int) -> None:
    def window(day: int, zone: str) -> Window:
        return Window(frozenset({day}), 120, 240, ZoneInfo(zone))

    index = index_of(nodes_of({f"t{team}": [f"n{team}-{n}" for n in range(20)] for team in range(20)}))
    submit(index, windows=(window(weekday, "Australia/Lord_Howe"),))
    for team in range(20):
        rules = TeamRules(f"t{team}", (window((weekday + 2) % 7, "America/New_York"),))
        index.apply(TeamRulesChanged(rules, ALICE, "because", T0))
    made = forecast_of(index, draws=200, durations=lambda *step: (90.0, 110.0))
    assert made.ends_at == Spread(None, None)
    assert dict(made.waits) == {ReasonCode.OUTSIDE_WINDOW: 400 * HORIZON_S}


def test_rollout_without_nodes_ends_at_once() -> None:
    index = index_of(nodes_of({"a": []}))
    submit(index)
    made = forecast_of(index, explain="R", durations=lambda *step: (90.0, 110.0))
    assert (made.nodes, made.ends_at, made.bottleneck) == ((), Spread(T0, T0), None)


def test_freeze_waited_for_until_it_ends() -> None:
    index = index_of(nodes_of({"a": ["n1"], "b": ["n2"]}))
    submit(index)
    index.apply(FreezeStarted(Freeze("f", "team/b", "fair", "sam", T0, T0 + 5000.0)))
    made = forecast_of(index)
    assert starts(made) == {"n1": 0.0, "n2": 5000.0}
    assert made.nodes[1].waits == {ReasonCode.FREEZE: 5000.0}


def test_failed_node_tried_again_after_votes() -> None:
    index = index_of(nodes_of({"a": ["n1", "n2"]}))
    submit(index, isolate=(StepDef("isolate.0.command", "command"),))
    admit(index, "n1")
    fail(index, "n1", at=T0 + 50.0)
    made = forecast_of(index, at=T0 + 50.0, approve_after_s=1000.0)
    assert starts(made) == {"n1": 1050.0, "n2": 1450.0}


def test_node_not_known_to_be_up_named() -> None:
    index = index_of(nodes_of({"a": ["n1", "n2"]}))
    submit(index)
    index.record_observations([Observation("n2", NodeHealth.DOWN, T0 + 1.0)], T0 + 1.0)
    made = forecast_of(index, at=T0 + 1.0)
    assumed = {each.code: each.params for each in made.assumptions}
    assert assumed[AssumptionCode.NODES_HEALTHY] == {"nodes": 1}
    assert starts(made) == {"n1": 1.0, "n2": 201.0}


def test_busy_node_starts_when_it_is_idle() -> None:
    index = index_of(nodes_of({"a": ["n1"]}))
    submit(index, traffic=(StepDef("traffic.0.ssh", "ssh"),))
    made = forecast_of(index, busy_s=lambda rollout, node: 40.0, busy_nodes=3)
    start = starts(made)["n1"]
    assert start is not None
    assert 40.0 <= start < 60.0
    assumed = {each.code: each.params for each in made.assumptions}
    assert assumed[AssumptionCode.TRAFFIC_HISTORY] == {"nodes": 3}
    assert AssumptionCode.TRAFFIC_IDLE not in assumed
    unknown = forecast_of(index, busy_s=lambda rollout, node: None)
    assert starts(unknown) == {"n1": 0.0}
    assert AssumptionCode.TRAFFIC_IDLE in {each.code for each in unknown.assumptions}


def test_rollout_that_checks_drift_stays_open() -> None:
    index = index_of(nodes_of({"a": ["n1"]}))
    submit(index, keep=True, drift_every_s=3600.0)
    made = forecast_of(index)
    assert made.stays_open
    assert made.ends_at.p50 == T0 + 200.0


def test_bottleneck_names_pool_and_its_savings() -> None:
    index = index_of(nodes_of({"a": ["n1", "n2", "n3", "n4"], "b": ["n5"]}))
    submit(index)
    made = forecast_of(index, explain="R")
    assert made.bottleneck == Bottleneck(BottleneckKind.POOL, "team/a", 400.0)


@pytest.mark.parametrize(("fleet", "plan", "name"), [(1, None, "fleet"), (9, 1, "R")])
def test_bottleneck_names_limit(fleet: int, plan: int | None, name: str) -> None:
    limits = Limits(pools={"team": PoolRule()}, max_parallel=fleet)
    index = index_of(nodes_of({"a": ["n1"], "b": ["n2"], "c": ["n3"], "d": ["n4"]}), limits)
    submit(index, max_parallel=plan)
    made = forecast_of(index, explain="R")
    assert made.bottleneck == Bottleneck(BottleneckKind.MAX_PARALLEL, name, 400.0)
    assert set(made.waits) == {ReasonCode.MAX_PARALLEL}


def test_same_seed_gives_same_forecast() -> None:
    index = index_of(nodes_of({"a": ["n1", "n2", "n3"], "b": ["n4", "n5"]}))
    submit(index, waves=CANARY_THEN_FLEET)
    durations = lambda *step: (50.0, 100.0, 400.0)  # noqa: E731
    first, again, other = (
        forecast_of(index, draws=20, seed=seed, durations=durations, failure_rate=0.1) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def forecast_text() -> str:
    """Return a forecast of nodes with failures, traffic and runs that wait, as text."""
    index = small_fleet()
    submit(index, "S", waves=CANARY_THEN_FLEET, traffic=(StepDef("traffic.0.ssh", "ssh"),))
    durations = lambda rollout, node, step, action: (50.0, 100.0, 400.0 + len(step))  # noqa: E731
    assumed = Assumptions(
        600.0,
        0.1,
        lambda rollout, node: 40.0,
        parallel_runs=2,
        common_deviation=Deviation(0.1, 3),
        are_samples=True,
    )
    return repr(forecast(index, T0, durations, assumed, draws=20, random=random.Random(1), explain="S"))


@pytest.mark.long
def test_same_seed_gives_same_forecast_in_any_process() -> None:
    code = "from tests.machines.test_forecast import forecast_text; print(forecast_text())"
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1


def test_failures_delay_the_nodes_after_them() -> None:
    index = index_of(nodes_of({"a": [f"n{number}" for number in range(8)]}))
    submit(index)
    durations = lambda *step: (90.0, 110.0)  # noqa: E731
    sound = forecast_of(index, draws=50, durations=durations)
    failing = forecast_of(index, draws=50, durations=durations, failure_rate=0.5, approve_after_s=3600.0)
    assert sound.ends_at.p50 is not None
    assert failing.ends_at.p50 is not None
    assert failing.ends_at.p50 > sound.ends_at.p50 + 2 * 3600.0
    never = forecast_of(index, draws=50, durations=durations, failure_rate=0.5, approve_after_s=None)
    assert never.ends_at == Spread(None, None)


def test_bottleneck_names_runner() -> None:
    index = index_of(nodes_of({"a": ["n1"], "b": ["n2"], "c": ["n3"], "d": ["n4"]}))
    submit(index, verify=(StepDef("verify.0.reachable", "reachable"),))
    made = forecast_of(index, explain="R", parallel_runs=1)
    assert starts(made) == {"n1": 0.0, "n2": 0.0, "n3": 0.0, "n4": 0.0}
    # One after the other, and the last check.
    assert made.ends_at.p50 == T0 + 500.0
    assert made.bottleneck == Bottleneck(BottleneckKind.RUNNER, "runner", 200.0)
    assert made.waits == {ReasonCode.RUNNER_FULL: 600.0}


def test_runner_named_runner_is_not_the_local_one() -> None:
    limits = Limits(runners=(RunnerRule("runner", parallel=1),))
    index = index_of(nodes_of({"a": ["n1"], "b": ["n2"]}), limits)
    submit(index, verify=(StepDef("verify.0.reachable", "reachable"),))
    made = forecast_of(index, explain="R", parallel_runs=1)
    # One more node in flight there: this machine still executes one run after the other.
    assert made.bottleneck == Bottleneck(BottleneckKind.RUNNER, "runner", 100.0)


CHANGE = MaintainStage("apps", kind="flux", node_kinds=frozenset({NodeKind.CLUSTER}))


def clusters_of_hub() -> list[Node]:
    """Return five clusters of one inventory, each of another team."""
    return [Node(f"c{n}", NodeKind.CLUSTER, ("a/hub",), labels={"team": f"t{n}"}) for n in range(5)]


@pytest.mark.parametrize("most", [1, 2])
def test_draws_keep_workers_as_they_keep_max_parallel(most: int) -> None:
    nodes = clusters_of_hub()
    by_limit, by_workers = index_of(nodes), index_of(nodes, Limits(workers={"a/hub": most}))
    submit(by_limit, stages=(CHANGE,), max_parallel=most)
    submit(by_workers, stages=(CHANGE,))
    durations = lambda *step: (50.0, 100.0, 150.0)  # noqa: E731
    limited, bounded = (forecast_of(each, draws=50, durations=durations) for each in (by_limit, by_workers))
    assert bounded.ends_at == limited.ends_at
    spreads = [[(each.starts_at, each.ends_at) for each in made.nodes] for made in (bounded, limited)]
    assert spreads[0] == spreads[1]


def test_bottleneck_names_inventory_with_workers() -> None:
    index = index_of(clusters_of_hub(), Limits(workers={"a/hub": 2}))
    submit(index, stages=(CHANGE,))
    made = forecast_of(index, explain="R")
    assert starts(made) == {"c0": 0.0, "c1": 0.0, "c2": 200.0, "c3": 200.0, "c4": 400.0}
    assert made.bottleneck == Bottleneck(BottleneckKind.RUNNER, "a/hub", 200.0)


def test_run_is_slower_beside_others() -> None:
    index = index_of(nodes_of({"a": ["n1", "n2"], "b": ["n3"]}))
    submit(index, verify=(StepDef("verify.0.reachable", "reachable"),))
    made = forecast_of(index, contention=Contention(slowdown=0.5), parallel_runs=4)
    # n1 and n3 delay each other; n2 runs alone.
    assert starts(made) == {"n1": 0.0, "n2": 250.0, "n3": 0.0}
    assert {each.node: (each.ends_at.p50 or 0.0) - T0 for each in made.nodes} == {
        "n1": 250.0,
        "n3": 250.0,
        "n2": 450.0,
    }
    assumed = {each.code: each.params for each in made.assumptions}
    assert assumed[AssumptionCode.PARALLEL_RUNS] == {"runs": 4, "longer": 1.5}


def test_run_advances_faster_once_another_ends() -> None:
    index = index_of(nodes_of({"a": ["n1"], "b": ["n2"]}))
    submit(index, verify=(StepDef("verify.0.reachable", "reachable"),))
    durations = lambda rollout, node, step, action: (100.0 if node == "n1" else 300.0,)  # noqa: E731
    made = forecast_of(index, durations=durations, contention=Contention(1.0, 1), parallel_runs=4)
    # One core: n1 has computed for 100 s after 200 s, n2 needs 200 s more, alone.
    ends = {each.node: (each.ends_at.p50 or 0.0) - T0 for each in made.nodes}
    assert ends == {"n1": 200.0 + 100.0, "n2": 400.0 + 300.0}


@pytest.mark.parametrize(
    ("teams", "max_parallel", "runs"), [(25, 64, math.inf), (25, 8, math.inf), (25, 64, 8)]
)
def test_most_nodes_come_within_p90(teams: int, max_parallel: int, runs: float) -> None:
    """The walks that are judged draw their own durations and ask the scheduler anew."""
    nodes = nodes_of({f"t{team}": [f"n{team}-{n}" for n in range(6)] for team in range(teams)})
    index = index_of(nodes, Limits(pools={"team": PoolRule()}, max_parallel=max_parallel))
    submit(index, waves=(WaveDef("fleet"),))
    sampled = random.Random(7)
    times = tuple(sampled.lognormvariate(5.7, 0.5) for _ in range(40))
    durations = lambda *step: times  # noqa: E731
    made = forecast_of(index, draws=200, durations=durations, parallel_runs=runs)
    within, walks = 0, 30
    for seed in range(walks):
        drawn = random.Random(f"walk {seed}")
        walk = Walk(index.fork(), T0, durations, drawn.choice, Assumptions(parallel_runs=runs))
        walk.run()
        ends = {each.node: each.ends_at for each in walk.agenda.attempts}
        within += sum((ends[each.node] or math.inf) <= (each.ends_at.p90 or 0.0) for each in made.nodes)
    assert 0.85 <= within / (walks * len(made.nodes)) <= 0.95


def small_fleet() -> Projection:
    nodes = nodes_of({f"t{team}": [f"n{team}-{n}" for n in range(4)] for team in range(3)})
    index = index_of(nodes, Limits(pools={"team": PoolRule()}, max_parallel=8))
    submit(index, waves=(WaveDef("fleet"),))
    return index


def share_within_p90(made: RolloutForecast, index: Projection, seconds: Callable[[], float]) -> float:
    """Return the share of nodes that come by their p90, where each step takes so long."""
    walk = Walk(index.fork(), T0, lambda *step: (seconds(),), lambda drawn: drawn[0])
    walk.run()
    ends = {each.node: each.ends_at or math.inf for each in walk.agenda.attempts}
    return sum(ends[each.node] <= (each.ends_at.p90 or 0.0) for each in made.nodes) / len(made.nodes)


def test_most_nodes_within_p90_by_common_deviation() -> None:
    index, times = small_fleet(), (90.0, 100.0, 110.0)
    durations = lambda *step: times  # noqa: E731
    deviation = Deviation(0.2, 50)
    made = forecast_of(index, draws=200, durations=durations, common_deviation=deviation)
    assert {each.code: each.params for each in made.assumptions}[AssumptionCode.COMMON_DEVIATION] == {
        "share": 0.2
    }
    within = []
    for seed in range(100):
        drawn = random.Random(f"world {seed}")
        factor = math.exp(drawn.gauss(0.0, 0.2))
        within.append(share_within_p90(made, index, lambda: drawn.choice(times) * factor))  # noqa: B023
    assert 0.85 <= sum(within) / len(within) <= 0.95


def test_most_nodes_within_p90_by_few_samples() -> None:
    index, within = small_fleet(), []
    for seed in range(100):
        drawn = random.Random(f"world {seed}")
        seconds = partial(drawn.lognormvariate, 5.0, 0.15)
        samples = tuple(seconds() for _ in range(4))
        durations = lambda *step: samples  # noqa: B023, E731
        made = forecast_of(index, draws=50, durations=durations, are_samples=True)
        within.append(share_within_p90(made, index, seconds))
    assert 0.85 <= sum(within) / len(within) <= 0.95


def test_known_durations_have_no_deviation() -> None:
    index = small_fleet()
    made = forecast_of(index, draws=50, common_deviation=Deviation(0.2), are_samples=True)
    assert made == replace(forecast_of(index), draws=50)


def test_typical_duration_is_one_that_was_seen() -> None:
    assert [typical((5.0,)), typical((9.0, 1.0, 4.0, 7.0))] == [5.0, 4.0]


def test_what_if_is_a_fork_that_was_changed() -> None:
    index = index_of(nodes_of({"a": ["n1", "n2", "n3"]}))
    plan = submit(index, max_parallel=3)
    changed = index.fork()
    rule = PoolRule(values={})
    changed.update_limits(
        replace(index.limits, pools={"team": replace(rule, default=replace(rule.default, count=2))}),
        {"R": plan},
    )
    assert starts(forecast_of(changed)) == {"n1": 0.0, "n2": 0.0, "n3": 200.0}
    assert starts(forecast_of(index)) == {"n1": 0.0, "n2": 200.0, "n3": 400.0}
