"""The contract of the Runner port: the fake passes it, and AnsibleRunner by forks and by new processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from machines.model.rollout import FailureCode
from rolloutd.errors import NotFound
from rolloutd.ports import Failed, Ok, Runner, RunRequest, RunState, Unknown
from tests.contracts.runner_backends import (
    AnsibleBackend,
    FakeBackend,
    NewProcessBackend,
    RunnerBackend,
    wait_until,
)


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


async def ended(runner: Runner, handle: str) -> RunState:
    """Wait for the run's outcome."""
    while (state := await runner.wait_for_change(handle)).result is None:
        pass
    return state


async def test_a_run_that_did_its_work_is_ok(backend: RunnerBackend) -> None:
    runner = backend.runner()
    state = await ended(runner, await runner.start(backend.request("ok.yml")))
    assert isinstance(state.result, Ok)
    assert state.percent == 100.0
    assert backend.started_runs() == ["r1"]


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


async def test_fence_rejects_older_run(backend: RunnerBackend) -> None:
    runner = backend.runner()
    for run, number, passes in (("r1", "3.10", True), ("r2", "3.9", False), ("r3", "2.99", False)):
        request = backend.request("ok.yml", run, fence=f"{number} aaaa 1000")
        state = await ended(runner, await runner.start(request))
        assert isinstance(state.result, Ok if passes else Failed), (run, state.result)
        if not passes:
            assert "a newer run" in state.result.text
    state = await ended(runner, await runner.start(backend.request("ok.yml", "r4", fence="4.1 aaaa 1000")))
    assert isinstance(state.result, Ok)
    assert backend.started_runs() == ["r1", "r4"]


async def test_equal_token_of_another_run_is_refused(backend: RunnerBackend) -> None:
    """Two daemons that believe in one term, as on two primaries of a database, may have equal tokens."""
    runner = backend.runner()
    for run, passes in (("r1", True), ("r2", False)):
        request = backend.request("ok.yml", run, fence="3.10 aaaa 1000")
        state = await ended(runner, await runner.start(request))
        assert isinstance(state.result, Ok if passes else Failed), (run, state.result)
    assert backend.started_runs() == ["r1"]


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


async def test_the_time_limit_is_kept_and_named(backend: RunnerBackend) -> None:
    runner = backend.runner()
    state = await ended(runner, await runner.start(backend.request("long.yml", timeout_s=4.0)))
    assert isinstance(state.result, Failed)
    assert state.result.text.startswith("time limit ")
    assert isinstance(await runner.clean_up_stale_runs(backend.host(), timeout_s=2.0), Ok)
    assert not backend.has_work()


async def test_a_cancelled_run_is_gone_here_and_on_the_node(backend: RunnerBackend) -> None:
    runner = backend.runner()
    handle = await runner.start(backend.request("long.yml"))
    await wait_until(backend.has_work)
    await runner.cancel(handle)
    assert not backend.has_work()
    state = await runner.get_state(handle)
    assert isinstance(state.result, Failed)
    assert "cancelled" in state.result.text
    assert state.result.code is FailureCode.DISTURBED
    await runner.cancel(handle)
    assert await runner.get_state(handle) == state


async def test_killed_run_unknown_and_processes_cleared(backend: RunnerBackend) -> None:
    runner = backend.runner()
    handle = await runner.start(backend.request("long.yml"))
    await wait_until(backend.has_work)
    backend.kill(handle)
    state = await ended(runner, handle)
    assert isinstance(state.result, Unknown)
    assert isinstance(await runner.clean_up_stale_runs(backend.host(), timeout_s=2.0), Ok)
    assert not backend.has_work()
    again = await ended(runner, await runner.start(backend.request("ok.yml", "r2")))
    assert isinstance(again.result, Ok)


async def test_a_run_is_not_started_twice(backend: RunnerBackend) -> None:
    runner = backend.runner()
    first = await runner.start(backend.request("ok.yml"))
    assert await runner.start(backend.request("ok.yml")) == first
    await ended(runner, first)
    assert await runner.start(backend.request("ok.yml")) == first
    assert await backend.runner().start(backend.request("ok.yml")) == first
    await ended(runner, first)
    assert backend.started_runs() == ["r1"]


async def test_a_restarted_daemon_finds_the_run_and_reads_on(backend: RunnerBackend) -> None:
    runner = backend.runner()
    handle = await runner.start(backend.request("long.yml"))
    await wait_until(backend.has_work)
    seen = [event async for event in runner.read_events(handle)]
    assert "long" in [event.text for event in seen]
    second = backend.runner()
    assert (await second.get_state(handle)).result is None
    assert [event async for event in second.read_events(handle, seen[-1].offset)] == []
    assert [event async for event in second.read_events(handle)] == seen
    await second.cancel(handle)
    assert isinstance((await ended(second, handle)).result, Failed)
    assert not backend.has_work()


async def test_new_daemon_reads_outcome(backend: RunnerBackend) -> None:
    runner = backend.runner()
    handle = await runner.start(backend.request("ok.yml"))
    first = await ended(runner, handle)
    assert (await backend.runner().get_state(handle)).result == first.result


async def test_an_unknown_handle_is_not_found(backend: RunnerBackend) -> None:
    with pytest.raises(NotFound):
        await backend.runner().get_state("never-was")


async def test_check_run_reports_and_changes_nothing(backend: RunnerBackend) -> None:
    runner = backend.runner()
    for run, check_only, kind in (("c1", True, "changed"), ("r1", False, "changed"), ("c2", True, "ok")):
        kinds = await kinds_of(runner, backend.request("change.yml", run, check_only=check_only))
        assert kinds["write the file"] == kind, run


async def test_task_without_check_mode_is_unchecked(backend: RunnerBackend) -> None:
    found = await kinds_of(backend.runner(), backend.request("unchecked.yml", check_only=True))
    assert found["of each"] == "unchecked"
    assert found.get("never here", "skipped") == "skipped"


async def test_task_that_defies_check_mode_fails_run(backend: RunnerBackend) -> None:
    runner = backend.runner()
    state = await ended(runner, await runner.start(backend.request("defies.yml", check_only=True)))
    assert isinstance(state.result, Failed)
    assert state.result.text.startswith('check mode would execute task "act at once" on n0')
    assert backend.started_runs() == []


async def test_discarded_run_is_not_found(backend: RunnerBackend) -> None:
    runner = backend.runner()
    handle = await runner.start(backend.request("ok.yml", check_only=True))
    await ended(runner, handle)
    await runner.discard(handle)
    await runner.discard(handle)
    for each in (runner, backend.runner()):
        with pytest.raises(NotFound):
            await each.get_state(handle)


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
