"""Answers as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from functools import partial
from typing import Any

import pytest

from rolloutd.control.nodes.reports import result_lines
from rolloutd.control.responses import MAX_PAUSE_S, SLICE, SharedAnswers, encode_in_slices, encode_json
from rolloutd.engine import tasks
from rolloutd.errors import NotFound, StoreFailed


@pytest.mark.parametrize(
    "body",
    [
        {"nodes": [{"node": f"n{number}"} for number in range(2 * SLICE + 1)], "seq": 1, "é": []},
        {"nodes": list(range(SLICE + 1))},
        {"changes": [{"plan": "p", "nodes": list(range(SLICE + 1))}, {"nodes": []}], "few": [{}]},
        {"few": [1]},
        [1],
        None,
    ],
)
async def test_slices_make_the_same_json(body: Any) -> None:
    assert await encode_in_slices(body) == encode_json(body)


async def test_long_list_of_long_lists_leaves_turns_to_others() -> None:
    changes = [{"nodes": [0] * (2 * SLICE)} for _ in range(2 * SLICE)]
    encoding, turns = asyncio.ensure_future(encode_in_slices({"changes": changes})), 0
    while not encoding.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > len(changes)
    assert await encoding == encode_json({"changes": changes})


async def test_requests_that_wait_at_once_share_an_answer() -> None:
    answers, begun, released = SharedAnswers(), [0], asyncio.Event()

    async def compute() -> bytes:
        begun[0] += 1
        number = begun[0]
        await released.wait()
        return b"%d" % number

    def ask(question: str = "") -> asyncio.Task[bytes]:
        return asyncio.create_task(answers.get("/v1/status", question, compute))

    first, gone, other = ask(), ask(), ask("all")
    await asyncio.sleep(0)
    gone.cancel()
    while begun[0] < 2:
        await asyncio.sleep(0)
    late = ask()  # it may know of facts that came after the start of the first computation
    released.set()
    assert (await first, await other, await late) == (b"1", b"2", b"3")


async def test_error_of_abandoned_answer_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    answers, released = SharedAnswers(), asyncio.Event()

    async def compute() -> bytes:
        await released.wait()
        raise NotFound("r: no such rollout")

    asked = asyncio.create_task(answers.get("/v1/rollouts/{r}", "r", compute))
    await asyncio.sleep(0.01)
    asked.cancel()
    await asyncio.wait({asked})
    released.set()
    await asyncio.sleep(0.01)
    gc.collect()
    assert not caplog.records


async def test_costly_answers_leave_most_of_the_loop_to_others() -> None:
    answers, loop = SharedAnswers(), asyncio.get_running_loop()

    began = loop.time()
    for _ in range(3):
        await answers.get("/v1/status", "", partial(_answer_after, 0.005))
    assert loop.time() - began >= 3 * 0.005 + 2 * 0.045


async def test_cost_in_a_thread_counts_as_on_the_loop() -> None:
    answers, loop = SharedAnswers(), asyncio.get_running_loop()

    async def compute_in_thread() -> bytes:
        await tasks.compute(_use_cpu, 0.01)
        return b""

    await answers.get("/v1/locks", "", compute_in_thread)
    pause_s = answers._not_before["/v1/locks"] - loop.time()
    assert pause_s > MAX_PAUSE_S / 2


async def test_answer_that_waits_delays_no_later_one() -> None:
    answers, loop = SharedAnswers(), asyncio.get_running_loop()

    async def compute() -> bytes:
        time.sleep(0.05)  # as on a machine whose cores others use
        return b""

    await answers.get("/v1/status", "", compute)
    assert answers._not_before["/v1/status"] - loop.time() < MAX_PAUSE_S / 4


async def test_one_costly_answer_delays_the_next_little() -> None:
    answers, loop = SharedAnswers(), asyncio.get_running_loop()
    for cpu_s in (0.0, 0.0, 0.008):
        await answers.get("/v1/status", "", partial(_answer_after, cpu_s))
    pause_s = answers._not_before["/v1/status"] - loop.time()
    assert 0.008 < pause_s < MAX_PAUSE_S / 2


async def _answer_after(cpu_s: float) -> bytes:
    _use_cpu(cpu_s)
    return b""


def _use_cpu(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize("error", [ConnectionResetError("the client has gone"), StoreFailed("disk full")])
async def test_end_of_stream_is_its_cause_and_ends_other_jobs(error: Exception) -> None:
    ended = []

    async def job(number: int) -> int:
        if number == 0:
            if isinstance(error, StoreFailed):
                raise error
            return number
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)
        return number

    async def read() -> None:
        async with contextlib.aclosing(result_lines(map(job, range(3)), str)) as lines:
            async for _ in lines:
                raise error

    with pytest.raises(type(error)):
        await read()
    assert sorted(ended) == [1, 2]
