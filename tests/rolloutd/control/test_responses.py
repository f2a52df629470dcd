"""Answers as JSON."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from rolloutd.control.responses import SLICE, SharedAnswers, encode_in_slices, encode_json


@pytest.mark.parametrize(
    "body",
    [
        {"nodes": [{"node": f"n{number}"} for number in range(2 * SLICE + 1)], "seq": 1, "é": []},
        {"nodes": list(range(SLICE + 1))},
        {"few": [1]},
        [1],
        None,
    ],
)
async def test_slices_make_the_same_json(body: Any) -> None:
    assert await encode_in_slices(body) == encode_json(body)


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


async def test_costly_answers_leave_most_of_the_loop_to_others() -> None:
    answers, loop = SharedAnswers(), asyncio.get_running_loop()

    async def compute() -> bytes:
        time.sleep(0.005)  # the computation holds the loop
        return b""

    began = loop.time()
    for _ in range(3):
        await answers.get("/v1/status", "", compute)
    assert loop.time() - began >= 3 * 0.005 + 2 * 0.045
