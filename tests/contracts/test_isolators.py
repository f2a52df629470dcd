"""The contract of ports.Isolator, for its twin, `command` against a real sshd, and `playbook`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from rolloutd.adapters.kit import InventorySnapshot
from rolloutd.adapters.playbook_isolator import PlaybookIsolator, run_name
from rolloutd.adapters.ssh.command import CommandIsolator
from rolloutd.adapters.ssh.pool import SshShell
from rolloutd.ports import Busy, Failed, Host, Isolator, Ok, Shell, ShellResult, StepContext, Unknown
from tests.contracts.twins.clock import FakeClock
from tests.contracts.twins.isolator import FakeIsolator
from tests.contracts.twins.runner import FakeRunner, FakeWorld, Script
from tests.contracts.twins.shell import FakeShell
from tests.contracts.worlds import context, host_of, real_sshd
from tests.support.sshd import Sshd


class World(Protocol):
    """An isolator that can tell, its parameters, and a node whose state the test sees."""

    isolator: Isolator
    host: Host
    params: Mapping[str, Any]

    def is_isolated(self) -> bool: ...

    def isolate_from_outside(self) -> None: ...


class TwinWorld:
    """The twin."""

    def __init__(self) -> None:
        self.host, self.params = Host("n1"), {}
        self._isolator = FakeIsolator()
        self.isolator: Isolator = self._isolator

    def is_isolated(self) -> bool:
        return "n1" in self._isolator.isolated

    def isolate_from_outside(self) -> None:
        self._isolator.isolated.add("n1")


class CommandWorld:
    """The isolator `command`: a file on the node takes it out of service."""

    def __init__(self, shell: Shell, sshd: Sshd) -> None:
        self.host = host_of(sshd)
        self._file = sshd.directory / "drained"
        file = self._file
        self.params = {"look": f"test -e {file}", "do": f"touch {file}", "undo": f"rm -f {file}"}
        self.isolator: Isolator = CommandIsolator(shell, FakeClock())

    def is_isolated(self) -> bool:
        return self._file.exists()

    def isolate_from_outside(self) -> None:
        self._file.touch()


@pytest.fixture(params=["twin", pytest.param("command", marks=pytest.mark.servers)])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """Each world in turn."""
    if request.param == "twin":
        yield TwinWorld()
        return
    shell = SshShell()
    with real_sshd(tmp_path / "sshd") as sshd:
        yield CommandWorld(shell, sshd)
        await shell.close()


async def looked(world: World, ctx: StepContext) -> StepContext:
    """Return the context with what a look records, as the driver does."""
    return replace(ctx, prior=(await world.isolator.look(ctx)).prior)


async def test_isolates_and_puts_back(world: World) -> None:
    ctx = await looked(world, context(world.host, world.params))
    assert not (await world.isolator.look(ctx)).done
    assert isinstance(await world.isolator.do(ctx), Ok)
    assert world.is_isolated()
    assert (await world.isolator.look(ctx)).done
    assert isinstance(await world.isolator.undo(ctx), Ok)
    assert not world.is_isolated()
    assert not (await world.isolator.look(ctx)).done


async def test_repeats_do_no_harm(world: World) -> None:
    ctx = await looked(world, context(world.host, world.params))
    for _ in range(2):
        assert isinstance(await world.isolator.do(ctx), Ok)
        assert world.is_isolated()
    for _ in range(2):
        assert isinstance(await world.isolator.undo(ctx), Ok)
        assert not world.is_isolated()


async def test_what_we_did_not_isolate_stays_isolated(world: World) -> None:
    world.isolate_from_outside()
    ctx = await looked(world, context(world.host, world.params))
    assert (await world.isolator.look(ctx)).done
    assert isinstance(await world.isolator.do(ctx), Ok)
    assert isinstance(await world.isolator.undo(ctx), Ok)
    assert world.is_isolated()


async def test_a_look_after_a_crash_keeps_the_first_prior(world: World) -> None:
    ctx = await looked(world, context(world.host, world.params))
    await world.isolator.do(ctx)
    again = await world.isolator.look(ctx)
    assert again.done
    assert again.prior == ctx.prior


# -- `command` alone ----------------------------------------------------------


async def test_a_command_without_look_is_always_run() -> None:
    shell = FakeShell({"drain": ShellResult(0, "drained\n", ""), "undrain": ShellResult(0, "", "")})
    isolator = CommandIsolator(shell, FakeClock())
    ctx = context(Host("n1"), {"do": "drain", "undo": "undrain"})
    found = await isolator.look(ctx)
    ctx = replace(ctx, prior=found.prior)
    assert not found.done
    assert await isolator.do(ctx) == Ok("`drain` ended with 0", output="drained\n")
    assert not (await isolator.look(ctx)).done
    assert isinstance(await isolator.undo(ctx), Ok)
    assert [command for _, command, _ in shell.calls] == ["drain", "undrain"]


async def test_undo_gets_what_look_said_before() -> None:
    shell = FakeShell({"weight": ShellResult(1, "weight 40\n", ""), "restore": ShellResult(0, "", "")})
    isolator = CommandIsolator(shell, FakeClock())
    ctx = context(Host("n1"), {"look": "weight", "do": "x", "undo": "restore"})
    ctx = replace(ctx, prior=(await isolator.look(ctx)).prior)
    await isolator.undo(ctx)
    assert shell.calls[-1] == ("n1", "restore", "weight 40\n")


@pytest.mark.parametrize("status", [126, 127, 137, 255])
async def test_a_look_that_gave_no_answer_is_no_word_on_the_node(status: int) -> None:
    shell = FakeShell({"look": ShellResult(status, "", "no such tool\n")})
    looked = await CommandIsolator(shell, FakeClock()).look(context(Host("n1"), {"look": "look", "do": "x"}))
    assert isinstance(looked, Busy)
    assert "`look` did not say whether n1 is isolated" in looked.text
    assert f"(exit status {status}) (no such tool)" in looked.text


async def test_a_command_that_fails_is_failed_and_one_nobody_heard_of_unknown() -> None:
    shell = FakeShell({"drain": ShellResult(5, "", "no such service\n")})
    isolator = CommandIsolator(shell, FakeClock())
    ctx = context(Host("n1"), {"do": "drain", "undo": "undrain"})
    failed = await isolator.do(ctx)
    assert isinstance(failed, Failed)
    assert (failed.text, failed.output) == ("`drain` on n1 ended with 5", "no such service\n")
    shell.down.add("n1")
    assert isinstance(await isolator.do(ctx), Unknown)


# -- `playbook` alone ---------------------------------------------------------


def playbook_isolator(world: FakeWorld) -> PlaybookIsolator:
    """Return the isolator as a daemon that has just started makes it."""
    return PlaybookIsolator(FakeRunner(world), lambda: InventorySnapshot({"n1": {}}), FakeClock())


PLAYBOOKS = {"file": "isolate.yml", "undo": "deisolate.yml"}


async def test_playbooks_isolate_and_put_back_once_per_key(tmp_path: Path) -> None:
    world = FakeWorld({"isolate.yml": Script.OK, "deisolate.yml": Script.OK})
    ctx = replace(context(Host("n1"), PLAYBOOKS), tree=tmp_path)
    assert not (await playbook_isolator(world).look(ctx)).done
    for _ in range(2):
        assert isinstance(await playbook_isolator(world).do(ctx), Ok)
    assert isinstance(await playbook_isolator(world).undo(ctx), Ok)
    assert world.starts == [run_name(ctx.key, "do"), run_name(ctx.key, "undo")]


async def test_a_playbook_that_fails_fails_the_step(tmp_path: Path) -> None:
    world = FakeWorld({"isolate.yml": Script.FAIL})
    ctx = replace(context(Host("n1"), PLAYBOOKS), tree=tmp_path)
    assert isinstance(await playbook_isolator(world).do(ctx), Failed)
    assert isinstance(await playbook_isolator(world).undo(ctx), Failed)


def test_run_names_are_safe_and_tell_keys_apart() -> None:
    names = {
        run_name(key, "do")
        for key in ("r1/n1/1/isolate.0", "r1/n1/2/isolate.0", "r1-n1-1-isolate.0", "..//x")
    }
    assert len(names) == 4
    assert all(name[0].isalnum() and "/" not in name and len(name) < 100 for name in names)
