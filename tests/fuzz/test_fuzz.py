"""Every border takes or refuses any input: no traceback, no 5xx, bounded time and memory."""

from __future__ import annotations

import gc
import os
import random
import resource
import time
from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS, Consumer

INPUTS = int(os.environ.get("ROLLOUTD_TEST_FUZZ_INPUTS", "10000"))
"""Inputs of each target in `make test-long`."""

QUICK_INPUTS = 150
"""Inputs of each target in `make test`."""

MAX_CPU_S = 3.0
"""CPU time of one input; the largest takes a tenth of it here."""

MAX_MEMORY_KIB = 512 * 1024
"""Growth of the process over all inputs of one target."""

CORPUS = Path(__file__).parent / "corpus"


async def check_input(consume: Consumer, data: bytes, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """Give a border one input; a find says how to keep it."""
    began = time.process_time()
    try:
        await consume(data)
    except BaseException as error:
        error.add_note(f"{name}: keep this input in tests/fuzz/corpus: {data[:2000]!r}")
        raise
    spent_s = time.process_time() - began
    assert spent_s < MAX_CPU_S, (name, spent_s, data[:2000])
    tracebacks = [each.getMessage() for each in caplog.records if each.exc_info]
    assert not tracebacks, (name, tracebacks, data[:2000])


async def fuzz(target: str, count: int, directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    chosen = TARGETS[target]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with chosen.open(directory) as consume:
        for number in range(count):
            name = f"{target}-{number}"
            await check_input(consume, chosen.mutate(random.Random(name), chosen.seeds), caplog, name)
            if number % 500 == 0:
                caplog.clear()
    gc.collect()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_MEMORY_KIB


@pytest.mark.parametrize("target", TARGETS)
async def test_past_finds_and_seeds_are_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    files = sorted((CORPUS / target).glob("*"))
    async with TARGETS[target].open(tmp_path) as consume:
        for name, data in [(each.name, each.read_bytes()) for each in files]:
            await check_input(consume, data, caplog, name)
        for number, data in enumerate(TARGETS[target].seeds):
            await check_input(consume, data, caplog, f"seed {number}")


@pytest.mark.parametrize("target", TARGETS)
async def test_some_random_input_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    await fuzz(target, QUICK_INPUTS, tmp_path, caplog)


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
async def test_random_input_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture, target: str) -> None:
    await fuzz(target, INPUTS, tmp_path, caplog)
