"""The rate limit of transfers, in virtual time."""

from __future__ import annotations

import asyncio
import heapq

import pytest

from machines.model.events import RolloutCancelled
from machines.model.preparation import PrepareKind, PrepareStage
from rolloutd.engine.preparation.rate_limit import BURST_S, ByteBudget, RateLimit, RateLimits
from tests.machines.builders import ALICE, T0, index_of, nodes_of, submit

RATE = 1_000_000.0
CHUNK = 10_000


def transferred(late_s: float, transfers: int, seconds: float) -> list[int]:
    """Return the bytes that each transfer sent; each of its chunks comes `late_s` after it may."""
    budget, sent = ByteBudget(RATE, 0.0), [0] * transfers
    turns = [(0.0, number) for number in range(transfers)]
    while turns[0][0] < seconds:
        now, number = heapq.heappop(turns)
        start = now + budget.reserve(CHUNK, now)
        if start < seconds:
            sent[number] += CHUNK
        heapq.heappush(turns, (start + late_s, number))
    return sent


def test_transfers_share_the_rate_evenly() -> None:
    sent = transferred(late_s=0.0, transfers=7, seconds=10.0)
    assert abs(sum(sent) - RATE * 10.0) <= RATE * BURST_S + 7 * CHUNK
    assert max(sent) - min(sent) <= RATE * BURST_S + CHUNK


def test_late_transfer_catches_up() -> None:
    for late_s in (0.001, 0.005, 0.02):
        sent = transferred(late_s, transfers=3, seconds=10.0)
        assert 0.0 <= sum(sent) - RATE * 10.0 <= RATE * BURST_S + 3 * CHUNK


def test_daemon_that_stalls_keeps_the_rate() -> None:
    budget, sent = ByteBudget(RATE, 0.0), 0
    for turn in range(50):  # of an event loop that runs five times a second
        while budget.reserve(CHUNK, turn * 0.2) == 0.0:
            sent += CHUNK
        sent += CHUNK  # it is sent in the next turn
    assert 0.97 * RATE * 10.0 <= sent <= RATE * (10.0 + BURST_S)


def test_idle_limit_saves_no_burst() -> None:
    budget = ByteBudget(RATE, 0.0)
    budget.reserve(CHUNK, 0.0)
    waits = [budget.reserve(CHUNK, 1000.0) for _ in range(20)]
    assert waits[5] <= 0.001
    assert waits[-1] >= 19 * CHUNK / RATE - BURST_S - 0.001


async def test_each_label_value_has_the_rate() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    limit = RateLimit(RATE, now=lambda: 0.0, sleep=sleep)
    for share in ("r1", "r2", "r1"):
        await limit.take(int(RATE), share)
    assert waits == [0.0, 0.0, 1.0]
    await RateLimit(None).take(CHUNK)


def test_limit_is_kept_until_its_rollout_is_closed() -> None:
    index = index_of(nodes_of({"a": ("n1",)}))
    for name in "RS":
        submit(index, name)
    limits, app, other = RateLimits(), *(PrepareStage(name, PrepareKind.COPY) for name in ("app", "other"))
    limit = limits.limit("R", app, index.rollouts)
    limits.limit("S", app, index.rollouts)
    assert limits.limit("R", app, index.rollouts) is limit
    index.apply(RolloutCancelled("R", ALICE, "wrong", T0))
    limits.limit("S", other, index.rollouts)
    assert limits.limit("R", app, index.rollouts) is not limit


async def test_cancelled_wait_gives_its_bytes_back() -> None:
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            raise asyncio.CancelledError

    limit = RateLimit(RATE, now=lambda: 0.0, sleep=sleep)
    await limit.take(int(RATE))
    with pytest.raises(asyncio.CancelledError):
        await limit.take(int(RATE))
    await limit.take(int(RATE))
    assert waits == [0.0, 1.0, 1.0]
