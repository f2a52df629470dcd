"""The contract of ports.Check, for its fake, `ssh` and `reachable` against a real sshd."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rolloutd.adapters.ssh.check import SshCheck, find_mismatch
from rolloutd.adapters.ssh.reachable import ReachableCheck
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.contracts import CheckBackend, CheckContract
from rolloutd.ports import Check, Failed, Host, Shell, ShellResult, Unknown
from tests.contracts.fakes.check import FakeCheck
from tests.contracts.fakes.clock import FakeClock
from tests.contracts.fakes.shell import HANG, FakeShell
from tests.contracts.ssh_fixtures import host_of, real_sshd, step_context
from tests.support.sshd import Sshd


class FakeBackend:
    """The fake."""

    def __init__(self) -> None:
        self.host, self.params, self.clock = Host("n1"), {}, FakeClock()
        self.check = FakeCheck()

    async def break_node(self) -> None:
        self.check.results["n1"] = [Failed("n1: the service answers 503")]

    async def repair_node(self) -> None:
        self.check.results.clear()

    async def state(self) -> object:
        return None


class SshBackend:
    """The check `ssh`: a file on the node says whether it is healthy."""

    def __init__(self, shell: Shell, sshd: Sshd) -> None:
        self.host, self.clock = host_of(sshd), FakeClock()
        self._file = sshd.directory / "state"
        self._file.write_text("well\n")
        self.params = {"run": f"cat {self._file}", "equals": "well"}
        self.check: Check = SshCheck(shell, self.clock)

    async def break_node(self) -> None:
        self._file.write_text("ill\n")

    async def repair_node(self) -> None:
        self._file.write_text("well\n")

    async def state(self) -> object:
        return self._file.stat().st_mtime_ns


class ReachableBackend:
    """The check `reachable`: the node's sshd runs or does not."""

    def __init__(self, shell: Shell, sshd: Sshd) -> None:
        self.host, self.params, self.clock = host_of(sshd), {"within": "5m"}, FakeClock()
        self._sshd = sshd
        self.check: Check = ReachableCheck(shell, FakeClock())

    async def break_node(self) -> None:
        self._sshd.stop()

    async def repair_node(self) -> None:
        self._sshd.start(self._sshd.directory)

    async def state(self) -> object:
        return None


class TestFakeCheck(CheckContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[CheckBackend]:
        yield FakeBackend()


@pytest.mark.servers
class TestSshCheck(CheckContract):
    backend: Callable[[Shell, Sshd], CheckBackend] = SshBackend

    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[CheckBackend]:
        shell = SshShell()
        with real_sshd(directory / "sshd") as sshd:
            try:
                yield type(self).backend(shell, sshd)
            finally:
                await shell.close()


class TestReachableCheck(TestSshCheck):
    backend = ReachableBackend


# -- the check `ssh` alone ----------------------------------------------------


@pytest.mark.parametrize(
    ("params", "status", "stdout", "wrong"),
    [
        ({}, 0, "", None),
        ({}, 4, "", "expected exit status 0, found 4 (boom)"),
        ({"equals": "65535"}, 0, " 65535\n", None),
        ({"equals": 65535}, 0, "65535\n", None),
        ({"equals": True}, 0, "true\n", None),
        ({"equals": "0"}, 1, "0\n", "expected exit status 0, found 1 (boom)"),
        ({"equals": "1"}, 2, "0\n", "expected '1', found '0', exit status 2 (boom)"),
        ({"equals": "65535"}, 0, "128\n", "expected '65535', found '128'"),
        ({"equals": ""}, 127, "", "the command could not be run, exit status 127 (boom)"),
        ({"matches": "^act"}, 0, "active\n", None),
        ({"matches": "^act"}, 3, "active\n", "expected exit status 0, found 3 (boom)"),
        ({"matches": "^act"}, 0, "inactive\n", "expected a match of '^act', found 'inactive'"),
        ({"matches": "("}, 0, "x", "the pattern '(' is not a regular expression"),
        ({"exit": 3}, 3, "", None),
        ({"exit": 0}, 1, "", "expected exit status 0, found 1 (boom)"),
        ({"exit": 127}, 127, "", None),
    ],
)
def test_judges_the_answer(params: Mapping[str, Any], status: int, stdout: str, wrong: str | None) -> None:
    found = find_mismatch(ShellResult(status, stdout, "first\nboom\n"), params)
    assert found == wrong if wrong is None else found is not None and found.startswith(wrong)


async def test_unreachable_node_unknown_and_changed_key_fails() -> None:
    shell = FakeShell({"stuck": HANG})
    check = SshCheck(shell, FakeClock())
    shell.down.add("n1")
    assert isinstance(await check.check(step_context(Host("n1"), {"run": "true"})), Unknown)
    shell.changed_host_keys.add("n1")
    assert isinstance(await check.check(step_context(Host("n1"), {"run": "true"})), Failed)


async def test_long_output_truncated_in_message_only() -> None:
    check = SshCheck(FakeShell({"long": ShellResult(0, "x" * 5000, "")}), FakeClock())
    result = await check.check(step_context(Host("n1"), {"run": "long", "equals": "y"}))
    assert isinstance(result, Failed)
    assert len(result.text) < 400
    assert len(result.output) == 5000


async def test_reachable_does_not_trust_a_pooled_connection() -> None:
    shell = FakeShell()
    await shell.run(Host("n1"), "true", timeout_s=1)
    shell.down.add("n1")
    result = await ReachableCheck(shell, FakeClock()).check(step_context(Host("n1"), {}))
    assert isinstance(result, Failed)
    assert result.text.startswith("not reachable: n1")
    assert not shell.connections
