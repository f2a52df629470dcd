"""The contract of ports.Runner, and what the fake and AnsibleRunner do besides: texts, fences, check mode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from machines.model.rollout import FailureCode
from rolloutd.contracts import RunnerContract, Work
from rolloutd.ports import Failed, Host, Ok, Runner, RunRequest, RunState
from tests.contracts.fakes.sources import SOURCE
from tests.contracts.runner_backends import (
    AnsibleBackend,
    FakeBackend,
    NewProcessBackend,
    RunnerBackend,
)
from tests.support.directory_runner import DirectoryRunner


@pytest.fixture(
    params=[
        FakeBackend,
        pytest.param(AnsibleBackend, marks=pytest.mark.servers),
        pytest.param(NewProcessBackend, marks=[pytest.mark.servers, pytest.mark.long]),
    ]
)
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RunnerBackend]:
    """One backend per test."""
    made = request.param(tmp_path)
    yield made
    await made.close()


class _Backend:
    """A world as the contract needs it."""

    playbooks: ClassVar = {Work.SUCCEEDS: "ok.yml", Work.FAILS: "fail.yml", Work.NEVER_ENDS: "long.yml"}

    def __init__(self, world: RunnerBackend) -> None:
        self._world = world

    def open_runner(self) -> Runner:
        return self._world.runner()

    def request(
        self, work: Work, run_id: str, *, timeout_s: float = 300.0, fencing_token: str = ""
    ) -> RunRequest:
        return self._world.request(self.playbooks[work], run_id, timeout_s=timeout_s, fence=fencing_token)

    async def begun(self) -> Sequence[str]:
        return self._world.started_runs()

    async def has_work(self) -> bool:
        return self._world.has_work()

    async def lose(self, handle: str) -> None:
        self._world.kill(handle)

    async def set_reachable(self, reachable: bool) -> None:
        raise NotImplementedError


class TestFakeRunner(RunnerContract):
    can_be_cut_off = False
    world: Callable[[Path], FakeBackend | AnsibleBackend] = FakeBackend

    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[_Backend]:
        world = type(self).world(directory)
        try:
            yield _Backend(world)
        finally:
            await world.close()


@pytest.mark.servers
class TestAnsibleRunner(TestFakeRunner):
    world = AnsibleBackend


@pytest.mark.servers
@pytest.mark.long
class TestNewProcessRunner(TestFakeRunner):
    world = NewProcessBackend


class _DirectoryBackend:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.runner = DirectoryRunner(directory)

    def open_runner(self) -> Runner:
        return DirectoryRunner(self._directory)

    def request(
        self, work: Work, run_id: str, *, timeout_s: float = 300.0, fencing_token: str = ""
    ) -> RunRequest:
        return RunRequest(
            run_id, Host("n0"), SOURCE, work.value, timeout_s=timeout_s, fencing_token=fencing_token
        )

    async def begun(self) -> Sequence[str]:
        return self.runner.begun("n0")

    async def has_work(self) -> bool:
        return self.runner.has_work("n0")

    async def lose(self, handle: str) -> None:
        self.runner.lose(handle)

    async def set_reachable(self, reachable: bool) -> None:
        self.runner.set_reachable(reachable)


class TestDirectoryRunner(RunnerContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[_DirectoryBackend]:
        backend = _DirectoryBackend(directory)
        try:
            yield backend
        finally:
            backend.runner.end_all()


async def ended(runner: Runner, handle: str) -> RunState:
    """Wait for the run's outcome."""
    while (state := await runner.wait_for_change(handle)).result is None:
        pass
    return state


@pytest.mark.parametrize(
    ("playbook", "says", "code"),
    [
        ("fail.yml", 'task "install package" failed on n0: no such package', FailureCode.FAILED),
        ("unreachable.yml", "n0 was unreachable: ", FailureCode.UNREACHABLE),
        ("nobody.yml", "no play of this playbook runs on n0", FailureCode.NEVER_STARTED),
        ("missing.yml", "playbook missing.yml: the source does not have it", FailureCode.NEVER_STARTED),
        ("broken.yml", "ansible-playbook could not run broken.yml", FailureCode.NEVER_STARTED),
    ],
)
async def test_a_run_that_did_not_is_failed_and_says_why(
    backend: RunnerBackend, playbook: str, says: str, code: FailureCode
) -> None:
    runner = backend.runner()
    state = await ended(runner, await runner.start(backend.request(playbook)))
    assert isinstance(state.result, Failed)
    assert state.result.text.startswith(says)
    assert state.result.code is code
    assert state.percent < 100.0


async def test_daemon_without_state_passes_fence_later(backend: RunnerBackend) -> None:
    """Numbers of two databases say nothing of each other; there a run is refused that began long before."""
    runner = backend.runner()
    for run, fence, passes in (
        ("r1", "3.10 aaaa 1000", True),
        ("r2", "1.2 bbbb 1001", True),
        ("r3", "3.11 aaaa 900", False),
        ("r4", "1.1 bbbb 1002", False),
        ("r5", "3.12 aaaa 1002", True),
    ):
        state = await ended(runner, await runner.start(backend.request("ok.yml", run, fence=fence)))
        assert isinstance(state.result, Ok if passes else Failed), (run, state.result)
    assert backend.started_runs() == ["r1", "r2", "r5"]


async def test_check_run_reports_and_changes_nothing(backend: RunnerBackend) -> None:
    runner = backend.runner()
    for run, check_only, kind in (("c1", True, "changed"), ("r1", False, "changed"), ("c2", True, "ok")):
        kinds = await kinds_of(runner, backend.request("change.yml", run, check_only=check_only))
        assert kinds["write the file"] == kind, run


async def test_task_without_check_mode_is_unchecked(backend: RunnerBackend) -> None:
    found = await kinds_of(backend.runner(), backend.request("unchecked.yml", check_only=True))
    assert found["of each"] == "unchecked"
    assert {found.get(task, "unchecked") for task in ("of raw", "of hidden raw")} == {"unchecked"}
    conditions = ("never here", "of a condition", "of a hidden condition")
    assert {found.get(task, "skipped") for task in conditions} == {"skipped"}


async def test_task_that_defies_check_mode_fails_run(backend: RunnerBackend) -> None:
    runner = backend.runner()
    state = await ended(runner, await runner.start(backend.request("defies.yml", check_only=True)))
    assert isinstance(state.result, Failed)
    assert state.result.text.startswith('check mode would execute task "act at once" on n0')
    assert backend.started_runs() == []


async def kinds_of(runner: Runner, request: RunRequest) -> dict[str, str]:
    """Run to the end; return the kind of each task's result."""
    handle = await runner.start(request)
    state = await ended(runner, handle)
    assert isinstance(state.result, Ok), state.result
    return {
        str(event.fields.get("task")): event.kind
        async for event in runner.read_events(handle)
        if event.kind not in {"task", "play", "playbook", "stats"}
    }
