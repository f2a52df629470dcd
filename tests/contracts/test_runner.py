"""The contract of the Runner port: the twin and AnsibleRunner against a real sshd pass it alike."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rolloutd.errors import NotFound
from rolloutd.ports import Failed, Ok, Runner, RunState, Unknown
from tests.contracts.runner_worlds import Fake, Real, World, until


@pytest.fixture(params=[Fake, pytest.param(Real, marks=pytest.mark.servers)])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """One world per test."""
    made = request.param(tmp_path)
    yield made
    await made.close()


async def ended(runner: Runner, handle: str) -> RunState:
    """Wait for the run's outcome."""
    while (state := await runner.wait(handle)).result is None:
        pass
    return state


async def test_a_run_that_did_its_work_is_ok(world: World) -> None:
    runner = world.runner()
    state = await ended(runner, await runner.start(world.request("ok.yml")))
    assert isinstance(state.result, Ok)
    assert state.percent == 100.0
    assert world.starts() == ["r1"]


@pytest.mark.parametrize(
    ("playbook", "says"),
    [
        ("fail.yml", 'task "install package" failed on n0: no such package'),
        ("unreachable.yml", "n0 was unreachable: "),
        ("nobody.yml", "no play of this playbook runs on n0"),
        ("missing.yml", "there is no playbook missing.yml"),
        ("broken.yml", "ansible-playbook could not run broken.yml"),
    ],
)
async def test_a_run_that_did_not_is_failed_and_says_why(world: World, playbook: str, says: str) -> None:
    runner = world.runner()
    state = await ended(runner, await runner.start(world.request(playbook)))
    assert isinstance(state.result, Failed)
    assert state.result.text.startswith(says)
    assert state.percent < 100.0


async def test_the_node_itself_refuses_a_run_older_than_one_that_was_there(world: World) -> None:
    runner = world.runner()
    for run, fence, passes in (("r1", "3.10", True), ("r2", "3.9", False), ("r3", "2.99", False)):
        state = await ended(runner, await runner.start(world.request("ok.yml", run, fence=fence)))
        assert isinstance(state.result, Ok if passes else Failed), (run, state.result)
        if not passes:
            assert "a newer run" in state.result.text
    state = await ended(runner, await runner.start(world.request("ok.yml", "r4", fence="4.1")))
    assert isinstance(state.result, Ok)
    assert world.starts() == ["r1", "r4"]


async def test_a_daemon_that_lost_its_state_is_not_fenced_out_for_ever(world: World) -> None:
    """Numbers of two databases say nothing of each other; there a run is refused that began long before."""
    runner = world.runner()
    for run, fence, passes in (
        ("r1", "3.10 aaaa 1000", True),
        ("r2", "1.2 bbbb 1001", True),
        ("r3", "3.11 aaaa 900", False),
        ("r4", "1.1 bbbb 1002", False),
        ("r5", "3.12 aaaa 1002", True),
    ):
        state = await ended(runner, await runner.start(world.request("ok.yml", run, fence=fence)))
        assert isinstance(state.result, Ok if passes else Failed), (run, state.result)
    assert world.starts() == ["r1", "r2", "r5"]


async def test_the_time_limit_is_kept_and_named(world: World) -> None:
    runner = world.runner()
    state = await ended(runner, await runner.start(world.request("long.yml", timeout_s=4.0)))
    assert isinstance(state.result, Failed)
    assert state.result.text.startswith("time limit ")
    assert isinstance(await runner.clear(world.host(), keep=None, timeout_s=2.0), Ok)
    assert not world.busy()


async def test_a_cancelled_run_is_gone_here_and_on_the_node(world: World) -> None:
    runner = world.runner()
    handle = await runner.start(world.request("long.yml"))
    await until(world.busy)
    await runner.cancel(handle)
    assert not world.busy()
    state = await runner.observe(handle)
    assert isinstance(state.result, Failed)
    assert "cancelled" in state.result.text
    await runner.cancel(handle)
    assert await runner.observe(handle) == state


async def test_a_killed_run_is_unknown_and_nothing_of_it_stays_on_the_node(world: World) -> None:
    runner = world.runner()
    handle = await runner.start(world.request("long.yml"))
    await until(world.busy)
    world.kill(handle)
    state = await ended(runner, handle)
    assert isinstance(state.result, Unknown)
    assert isinstance(await runner.clear(world.host(), keep="r2", timeout_s=2.0), Ok)
    assert not world.busy()
    again = await ended(runner, await runner.start(world.request("ok.yml", "r2")))
    assert isinstance(again.result, Ok)


async def test_clear_spares_the_run_that_is_kept(world: World) -> None:
    runner = world.runner()
    handle = await runner.start(world.request("long.yml"))
    await until(world.busy)
    assert isinstance(await runner.clear(world.host(), keep=handle, timeout_s=2.0), Ok)
    assert world.busy()
    assert (await runner.observe(handle)).result is None
    await runner.cancel(handle)


async def test_a_run_is_not_started_twice(world: World) -> None:
    runner = world.runner()
    first = await runner.start(world.request("ok.yml"))
    assert await runner.start(world.request("ok.yml")) == first
    await ended(runner, first)
    assert await runner.start(world.request("ok.yml")) == first
    assert await world.runner().start(world.request("ok.yml")) == first
    await ended(runner, first)
    assert world.starts() == ["r1"]


async def test_a_restarted_daemon_finds_the_run_and_reads_on(world: World) -> None:
    runner = world.runner()
    handle = await runner.start(world.request("long.yml"))
    await until(world.busy)
    seen = [event async for event in runner.events(handle)]
    assert "long" in [event.text for event in seen]
    second = world.runner()
    assert (await second.observe(handle)).result is None
    assert [event async for event in second.events(handle, seen[-1].offset)] == []
    assert [event async for event in second.events(handle)] == seen
    await second.cancel(handle)
    assert isinstance((await ended(second, handle)).result, Failed)
    assert not world.busy()


async def test_an_outcome_is_found_by_a_daemon_that_was_not_there(world: World) -> None:
    runner = world.runner()
    handle = await runner.start(world.request("ok.yml"))
    first = await ended(runner, handle)
    assert (await world.runner().observe(handle)).result == first.result


async def test_an_unknown_handle_is_not_found(world: World) -> None:
    with pytest.raises(NotFound):
        await world.runner().observe("never-was")
