"""Contract of ports.Runner, as a pytest class: it knows neither processes of this machine nor ssh."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from enum import Enum
from pathlib import Path
from typing import Protocol

import pytest

from machines.model.rollout import FailureCode
from rolloutd.contracts.harness import scenario
from rolloutd.errors import NotFound, RunnerUnavailable
from rolloutd.ports import Failed, Host, Ok, RunEvent, Runner, RunRequest, RunState, Unknown, wait_for_end

WAIT_LIMIT_S = 120.0
"""For anything that must happen on a loaded machine."""

SHORT_LIMIT_S = 4.0
"""Time limit of the run that passes it."""

FENCE = "3.10 aaaa 1000"


class Work(Enum):
    """What the playbook of a run does on the node."""

    SUCCEEDS = "succeeds"
    FAILS = "fails"
    NEVER_ENDS = "never-ends"


class RunnerBackend(Protocol):
    """A system that runs playbooks, and one node."""

    def open_runner(self) -> Runner:
        """Return a new runner over the system, as a daemon has it that has just started."""

    def request(
        self, work: Work, run_id: str, *, timeout_s: float = 300.0, fencing_token: str = ""
    ) -> RunRequest:
        """Return the request of a run on the node."""

    async def begun(self) -> Sequence[str]:
        """Return the ids of runs that succeed and have begun, in order, by what they left on the node."""

    async def has_work(self) -> bool:
        """Return whether a process of a run that never ends is on the node."""

    async def lose(self, handle: str) -> None:
        """End the run in its system without a result; what it started on the node may continue."""

    async def set_reachable(self, reachable: bool) -> None:
        """Cut the system off from its runners, or connect it; a system of this machine cannot be cut off."""


class RunnerContract:
    can_be_cut_off = True
    """False for a runner whose runs are on this machine."""

    def open_backend(self, directory: Path) -> AbstractAsyncContextManager[RunnerBackend]:
        """Open the system under test, with an empty directory for its files."""
        raise NotImplementedError

    @scenario
    async def test_run_does_its_work(self, backend: RunnerBackend) -> None:
        runner = backend.open_runner()
        await runner.check_available()
        state = await _run(runner, backend.request(Work.SUCCEEDS, "r1"))
        assert isinstance(state.result, Ok), state.result
        assert state.percent == 100.0
        assert await backend.begun() == ["r1"]

    @scenario
    async def test_failed_run_says_why(self, backend: RunnerBackend) -> None:
        state = await _run(backend.open_runner(), backend.request(Work.FAILS, "r1"))
        assert isinstance(state.result, Failed), state.result
        assert state.result.text
        assert state.percent < 100.0

    @scenario
    async def test_run_is_claimed_once(self, backend: RunnerBackend) -> None:
        first, second = backend.open_runner(), backend.open_runner()
        request = backend.request(Work.SUCCEEDS, "r1", fencing_token=FENCE)
        handles = await asyncio.gather(first.start(request), first.start(request))
        assert len(set(handles)) == 1
        # Before its claim another daemon may give the run up, and start it under another handle.
        assert isinstance((await _ended(first, handles[0])).result, Ok)
        assert await first.start(request) == handles[0]
        assert await second.start(request) == handles[0]
        assert await backend.open_runner().start(request) == handles[0]
        assert await backend.begun() == ["r1"]

    @scenario
    async def test_new_runner_finds_run_and_reads_on(self, backend: RunnerBackend) -> None:
        runner = backend.open_runner()
        handle = await runner.start(backend.request(Work.NEVER_ENDS, "r1"))
        await _wait_for_work(backend)
        seen = await _wait_for_events(runner, handle)
        second = backend.open_runner()
        assert (await second.get_state(handle)).result is None
        assert (await second.get_state(handle)).has_begun
        assert (await _events(second, handle))[: len(seen)] == seen
        for number, event in enumerate(seen):
            assert (await _events(second, handle, event.offset))[: len(seen) - number - 1] == seen[
                number + 1 :
            ]
        await second.cancel(handle)

    @scenario
    async def test_new_runner_reads_result(self, backend: RunnerBackend) -> None:
        runner = backend.open_runner()
        handle = await runner.start(backend.request(Work.SUCCEEDS, "r1"))
        result = (await _ended(runner, handle)).result
        state = await backend.open_runner().get_state(handle)
        assert (state.result, state.percent) == (result, 100.0)

    @scenario
    async def test_lost_run_stays_unknown(self, backend: RunnerBackend) -> None:
        runner, request = backend.open_runner(), backend.request(Work.NEVER_ENDS, "r1")
        handle = await runner.start(request)
        await _wait_for_work(backend)
        await backend.lose(handle)
        for each in (runner, backend.open_runner()):
            state = await _ended(each, handle)
            assert isinstance(state.result, Unknown), state.result
            assert state.has_begun
            assert await each.start(request) == handle
        await _clear(backend, runner)
        again = await _run(runner, backend.request(Work.SUCCEEDS, "r2"))
        assert isinstance(again.result, Ok), again.result

    @scenario
    async def test_cancelled_run_has_ended_on_node(self, backend: RunnerBackend) -> None:
        runner = backend.open_runner()
        handle = await runner.start(backend.request(Work.NEVER_ENDS, "r1"))
        await _wait_for_work(backend)
        await runner.cancel(handle)
        assert not await backend.has_work()
        state = await _ended(runner, handle)
        assert isinstance(state.result, Failed), state.result
        assert state.result.code is FailureCode.INTERFERENCE
        await runner.cancel(handle)
        assert await runner.get_state(handle) == state
        assert (await backend.open_runner().get_state(handle)).result == state.result

    @scenario
    async def test_time_limit_is_enforced(self, backend: RunnerBackend) -> None:
        runner = backend.open_runner()
        state = await _run(runner, backend.request(Work.NEVER_ENDS, "r1", timeout_s=SHORT_LIMIT_S))
        assert isinstance(state.result, Failed), state.result
        assert state.result.text.startswith("time limit ")
        await _clear(backend, runner)

    @scenario
    async def test_older_token_is_refused(self, backend: RunnerBackend) -> None:
        runner = backend.open_runner()
        passing = {"r1": ("3.10", True), "r2": ("3.9", False), "r3": ("3.10", False), "r4": ("4.1", True)}
        for run, (number, passes) in passing.items():
            request = backend.request(Work.SUCCEEDS, run, fencing_token=f"{number} aaaa 1000")
            state = await _run(runner, request)
            assert isinstance(state.result, Ok if passes else Failed), (run, state.result)
        assert await backend.begun() == ["r1", "r4"]

    @scenario
    async def test_unknown_handle_is_not_found(self, backend: RunnerBackend) -> None:
        with pytest.raises(NotFound):
            await backend.open_runner().get_state("never-was")

    @scenario
    async def test_discarded_run_is_not_found(self, backend: RunnerBackend) -> None:
        runner = backend.open_runner()
        handle = await runner.start(backend.request(Work.SUCCEEDS, "r1"))
        await _ended(runner, handle)
        await runner.discard(handle)
        await runner.discard(handle)
        for each in (runner, backend.open_runner()):
            with pytest.raises(NotFound):
                await each.get_state(handle)

    @scenario
    async def test_run_continues_while_system_is_cut_off(self, backend: RunnerBackend) -> None:
        if not self.can_be_cut_off:
            return
        runner = backend.open_runner()
        handle = await runner.start(backend.request(Work.NEVER_ENDS, "r1"))
        await _wait_for_work(backend)
        await backend.set_reachable(False)
        with pytest.raises(RunnerUnavailable):
            await runner.check_available()
        with pytest.raises(RunnerUnavailable):
            await runner.start(backend.request(Work.SUCCEEDS, "r2"))
        with pytest.raises(RunnerUnavailable):
            await backend.open_runner().get_state(handle)
        await backend.set_reachable(True)
        assert (await runner.get_state(handle)).result is None
        await runner.cancel(handle)
        assert await backend.begun() == []


async def _run(runner: Runner, request: RunRequest) -> RunState:
    return await _ended(runner, await runner.start(request))


async def _ended(runner: Runner, handle: str) -> RunState:
    async with asyncio.timeout(WAIT_LIMIT_S):
        return await wait_for_end(runner, handle)


async def _events(runner: Runner, handle: str, offset: int = 0) -> list[RunEvent]:
    return [event async for event in runner.read_events(handle, offset)]


async def _wait_for_events(runner: Runner, handle: str) -> list[RunEvent]:
    """Return the events of a run that has begun, at least one."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not (events := await _events(runner, handle)):
            await runner.wait_for_change(handle)
    return events


async def _wait_for_work(backend: RunnerBackend) -> None:
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            if await backend.has_work():
                return
            await asyncio.sleep(0.02)


async def _clear(backend: RunnerBackend, runner: Runner) -> None:
    """End what a run left on the node, with as many tries as a slow node needs."""
    host: Host = backend.request(Work.SUCCEEDS, "none").host
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            if isinstance(await runner.clean_up_stale_runs(host, timeout_s=2.0), Ok):
                break
    assert not await backend.has_work()
