"""How much longer runs take that share the cores of a machine."""

from __future__ import annotations

import heapq
import random

import pytest

from machines.forecast.contention import Contention, share_alone


def simulated_s(runs: int, computes_s: float, waits_s: float, cores: int, seed: int = 1) -> float:
    """Return how long a cycle of waiting and computing takes on average, of runs that repeat it."""
    drawn = random.Random(seed)
    waiting = [drawn.expovariate(1.0 / waits_s) for _ in range(runs)]
    heapq.heapify(waiting)
    computing: list[float] = []
    now, cycles = 0.0, 0
    while cycles < 20_000:
        speed = min(1.0, cores / len(computing)) if computing else 1.0
        ends_at = now + min(computing) / speed if computing else float("inf")
        until = min(ends_at, waiting[0] if waiting else float("inf"))
        computing = [left - (until - now) * speed for left in computing]
        now = until
        if ends_at == until:
            computing.remove(min(computing))
            heapq.heappush(waiting, now + drawn.expovariate(1.0 / waits_s))
            cycles += 1
        else:
            heapq.heappop(waiting)
            computing.append(drawn.expovariate(1.0 / computes_s))
    return now * runs / cycles


@pytest.mark.parametrize(("runs", "share", "cores"), [(4, 0.7, 2), (3, 0.5, 1), (12, 0.4, 4)])
def test_stretch_is_that_of_simulated_cores(runs: int, share: float, cores: int) -> None:
    simulated = simulated_s(runs, share, 1.0 - share, cores)
    assert Contention(share, cores).stretch(runs) == pytest.approx(simulated, rel=0.03)


def test_runs_that_mostly_wait_delay_none() -> None:
    assert Contention(0.02, 8).stretch(32) < 1.001
    assert Contention(0.0, 1).stretch(1000) == 1.0


def test_many_runs_take_what_cores_take() -> None:
    assert Contention(0.5, 2).stretch(1000) == pytest.approx(250.0)
    assert Contention(1.0, 4).stretch(10) == pytest.approx(2.5)


def test_run_alone_takes_no_longer() -> None:
    assert Contention(0.9, 1, 0.5).stretch(1) == 1.0


def test_stretch_grows_with_each_part_of_a_run() -> None:
    stretches = [Contention(0.6, 2, 0.01).stretch(1.0 + number / 4) for number in range(40)]
    assert stretches == sorted(stretches)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.95])
@pytest.mark.parametrize("runs", [1.0, 2.5, 6.0])
def test_share_alone_is_that_before_the_delay(share: float, runs: float) -> None:
    measured = share / Contention(share, 2).stretch(runs)
    assert share_alone(measured, runs, 2) == pytest.approx(share, abs=0.02)
