"""The contract of ports.Isolator, for its fake and `command` against a real sshd."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rolloutd.adapters.ssh.command import CommandIsolator
from rolloutd.adapters.ssh.registration import COMMAND_ISOLATOR
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.contracts import IsolatorBackend, IsolatorContract
from rolloutd.ports import (
    Busy,
    Failed,
    Host,
    Ok,
    Shell,
    ShellResult,
    Unknown,
)
from tests.contracts.fakes.clock import FakeClock
from tests.contracts.fakes.isolator import FakeIsolator
from tests.contracts.fakes.shell import FakeShell
from tests.contracts.ssh_fixtures import host_of, real_sshd, step_context
from tests.support.sshd import Sshd


class FakeBackend:
    """The fake."""

    def __init__(self) -> None:
        self.host, self.params, self.clock = Host("n1"), {}, FakeClock()
        self.isolator = FakeIsolator()

    async def is_isolated(self) -> bool:
        return "n1" in self.isolator.isolated

    async def isolate_from_outside(self) -> None:
        self.isolator.isolated.add("n1")


class CommandBackend:
    """The isolator `command`: a file on the node takes it out of service."""

    def __init__(self, shell: Shell, sshd: Sshd) -> None:
        self.host, self.clock = host_of(sshd), FakeClock()
        self._file = file = sshd.directory / "drained"
        self.params = {"look": f"test -e {file}", "do": f"touch {file}", "undo": f"rm -f {file}"}
        self.isolator = CommandIsolator(shell, self.clock)

    async def is_isolated(self) -> bool:
        return self._file.exists()

    async def isolate_from_outside(self) -> None:
        self._file.touch()


class TestFakeIsolator(IsolatorContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[IsolatorBackend]:
        yield FakeBackend()


@pytest.mark.servers
class TestCommandIsolator(IsolatorContract):
    registration = COMMAND_ISOLATOR

    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[IsolatorBackend]:
        shell = SshShell()
        with real_sshd(directory / "sshd") as sshd:
            try:
                yield CommandBackend(shell, sshd)
            finally:
                await shell.close()


# -- `command` alone ----------------------------------------------------------


async def test_a_command_without_look_is_always_run() -> None:
    shell = FakeShell({"drain": ShellResult(0, "drained\n", ""), "undrain": ShellResult(0, "", "")})
    isolator = CommandIsolator(shell, FakeClock())
    ctx = step_context(Host("n1"), {"do": "drain", "undo": "undrain"})
    found = await isolator.inspect(ctx)
    ctx = replace(ctx, prior=found.prior)
    assert not found.is_isolated
    assert await isolator.isolate(ctx) == Ok("`drain` ended with 0", output="drained\n")
    assert not (await isolator.inspect(ctx)).is_isolated
    assert isinstance(await isolator.return_to_service(ctx), Ok)
    assert [command for _, command, _ in shell.calls] == ["drain", "undrain"]


async def test_undo_gets_what_look_said_before() -> None:
    shell = FakeShell({"weight": ShellResult(1, "weight 40\n", ""), "restore": ShellResult(0, "", "")})
    isolator = CommandIsolator(shell, FakeClock())
    ctx = step_context(Host("n1"), {"look": "weight", "do": "x", "undo": "restore"})
    ctx = replace(ctx, prior=(await isolator.inspect(ctx)).prior)
    await isolator.return_to_service(ctx)
    assert shell.calls[-1] == ("n1", "restore", "weight 40\n")


@pytest.mark.parametrize("status", [126, 127, 137, 255])
async def test_unanswered_inspect_says_nothing_about_node(status: int) -> None:
    shell = FakeShell({"look": ShellResult(status, "", "no such tool\n")})
    looked = await CommandIsolator(shell, FakeClock()).inspect(
        step_context(Host("n1"), {"look": "look", "do": "x"})
    )
    assert isinstance(looked, Busy)
    assert "`look` on n1 did not report whether the node is isolated" in looked.text
    assert f"(exit status {status}) (no such tool)" in looked.text


async def test_failed_command_fails_and_lost_command_unknown() -> None:
    shell = FakeShell({"drain": ShellResult(5, "", "no such service\n")})
    isolator = CommandIsolator(shell, FakeClock())
    ctx = step_context(Host("n1"), {"do": "drain", "undo": "undrain"})
    failed = await isolator.isolate(ctx)
    assert isinstance(failed, Failed)
    assert (failed.text, failed.output) == ("`drain` on n1 ended with 5", "no such service\n")
    shell.down.add("n1")
    assert isinstance(await isolator.isolate(ctx), Unknown)
