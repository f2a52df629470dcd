"""The durations of steps by their history, as if each run had been alone."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from machines.model.step_record import StepAction, StepRecord, StepState
from rolloutd.forecast.history import (
    ASSUMED_DEVIATION,
    PastRun,
    StepHistory,
    begun_at,
    common_deviation,
    past_runs,
    slowdown,
)
from rolloutd.ports import BusyTime, StepDuration
from tests.machines.builders import index_of, nodes_of, submit


def run_of(node: str, asked_at: float, ended_at: float, step: str = "run.configure") -> StepDuration:
    return StepDuration("R", "plan", node, step, StepAction.RUN, ended_at - asked_at, ended_at, True)


def rounds(seconds: float, runs: int, parallel: int, slower: float = 0.0) -> list[StepDuration]:
    """Return runs, so many at once, of which each pair is slower."""
    found, at = [], 0.0
    for first in range(0, runs, parallel):
        active, began_at = min(parallel, runs - first), at
        at += seconds * (1.0 + slower * (active - 1))
        found += [run_of(f"n{number}", began_at, at) for number in range(first, first + active)]
    return found


def test_others_are_averaged_over_the_run() -> None:
    found = past_runs([run_of("n1", 0.0, 10.0), run_of("n2", 5.0, 10.0), run_of("n3", 10.0, 12.0)])
    assert found == {0: PastRun(10.0, 0.5), 1: PastRun(5.0, 1.0), 2: PastRun(2.0, 0.0)}


def test_step_that_is_not_a_run_delays_none() -> None:
    check = StepDuration("R", "plan", "n1", "verify.0.ssh", StepAction.CHECK, 4.0, 9.0, False)
    assert past_runs([run_of("n1", 0.0, 10.0), check]) == {0: PastRun(10.0, 0.0)}


def test_run_without_duration_delays_none() -> None:
    assert past_runs([run_of("n1", 5.0, 5.0), run_of("n2", 0.0, 9.0)]) == {1: PastRun(9.0, 0.0)}


@pytest.mark.parametrize("slower", [0.0, 0.02, 0.3])
def test_slowdown_is_what_other_runs_cost(slower: float) -> None:
    runs = [
        (parallel, run)
        for parallel in (1, 2, 4)
        for run in past_runs(rounds(10.0, 12, parallel, slower)).values()
    ]
    assert slowdown(("playbook", run) for _, run in runs) == pytest.approx(slower, abs=1e-6)


def test_slowdown_compares_runs_of_one_playbook() -> None:
    long_alone = [("long", PastRun(100.0, 0.0))] * 10
    short_together = [("short", PastRun(10.0, 5.0))] * 10
    assert slowdown([*long_alone, *short_together]) == 0.0


@pytest.mark.parametrize("seed", range(5))
def test_slowdown_by_chance_is_none(seed: int) -> None:
    drawn = random.Random(seed)
    runs = [PastRun(drawn.uniform(50.0, 150.0), float(drawn.randrange(6))) for _ in range(40)]
    assert slowdown(("playbook", run) for run in runs) < 0.05


def seconds_of(rollouts: int, deviation: float, seed: int = 1) -> dict[str, list[float]]:
    """Return durations of rollouts that are longer or shorter as a whole."""
    drawn, durations = random.Random(seed), {}
    for number in range(rollouts):
        mean_s = 100.0 * math.exp(drawn.gauss(0.0, deviation))
        durations[f"R{number}"] = [drawn.gauss(mean_s, 10.0) for _ in range(12)]
    return durations


def test_deviation_is_assumed_without_history() -> None:
    for history in ([], [{"R": [100.0, 90.0]}]):
        assert common_deviation(history, is_within=False).share == ASSUMED_DEVIATION
        assert common_deviation(history, is_within=True).share == ASSUMED_DEVIATION


def test_deviation_is_of_rollouts_that_follow_each_other() -> None:
    history = [seconds_of(200, 0.2)]
    assert common_deviation(history, is_within=False).share == pytest.approx(0.2, abs=0.03)
    assert common_deviation(history, is_within=True).share < 0.02


def test_deviation_by_chance_is_none() -> None:
    assert common_deviation([seconds_of(200, 0.0)], is_within=False).share < 0.02


def test_deviation_within_is_of_beginning_and_rest() -> None:
    slower = {f"R{number}": [100.0] * 4 + [120.0] * 8 for number in range(50)}
    assert common_deviation([slower], is_within=True).share == pytest.approx(math.log(1.2), abs=0.01)
    assert common_deviation([slower], is_within=False).share < 0.02


def test_one_sample_is_drawn() -> None:
    assert history([run_of("n1", 0.0, 10.0)]).durations("R", "n1", "run.configure", StepAction.RUN) == [
        10.0,
        10.0,
    ]


def history(samples: Sequence[StepDuration]) -> StepHistory:
    index = index_of(nodes_of({"a": ["n1", "n2"]}))
    submit(index)
    return StepHistory(index, samples, ())


def test_durations_are_those_of_runs_alone() -> None:
    samples = [*rounds(10.0, 6, 3, 0.1), *(run_of("n1", 100.0 * n, 100.0 * n + 10.0) for n in range(1, 7))]
    found = history(samples)
    assert found.contention.slowdown == pytest.approx(0.1)
    assert found.durations("R", "n1", "run.configure", StepAction.RUN) == pytest.approx([10.0] * 12)


def test_busy_time_is_one_of_those_before() -> None:
    index = index_of(nodes_of({"a": [f"n{number}" for number in range(20)]}))
    submit(index, name="plan")
    seconds = {"n1": 0.0, "n2": 90.0, "n3": 5.0}
    earlier = [BusyTime("R0", "plan", *each) for each in seconds.items()]
    found = StepHistory(index, [], (), earlier)
    assert {found.busy_s("R", f"n{number}") for number in range(20)} == {0.0, 90.0, 5.0}
    assert found.busy_nodes == 3
    assert StepHistory(index, [], (), earlier[:2]).busy_s("R", "n1") is None


def test_run_at_work_began_when_it_got_its_slot() -> None:
    def record(state: StepState) -> StepRecord:
        return StepRecord("R", "n1", 1, "run.configure", StepAction.RUN, 1, state, 5.0, 5.0)

    intended, ended = record(StepState.INTENDED), record(StepState.OK)
    assert [each.began_at for each in begun_at((ended, intended), 70.0)] == [5.0, 70.0]
    assert begun_at((ended, intended), None) == (ended, intended)
    assert begun_at((ended,), 70.0) == (ended,)
