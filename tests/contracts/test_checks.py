"""The contract of ports.Check, for its twin, `ssh` and `reachable` against a real sshd."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest

from rolloutd.adapters.ssh.check import SshCheck, judge
from rolloutd.adapters.ssh.pool import SshShell
from rolloutd.adapters.ssh.reachable import ReachableCheck
from rolloutd.ports import Check, Failed, Host, Ok, Shell, ShellResult, Unknown
from tests.contracts.twins.check import FakeCheck
from tests.contracts.twins.clock import FakeClock
from tests.contracts.twins.shell import HANG, FakeShell
from tests.contracts.worlds import context, host_of, real_sshd
from tests.support.sshd import Sshd


class World(Protocol):
    """A check with its parameters, and a node that can be made well or not."""

    check: Check
    host: Host
    params: Mapping[str, Any]

    def break_node(self) -> None: ...

    def mend_node(self) -> None: ...

    def changes(self) -> Any: ...


class TwinWorld:
    """The twin."""

    def __init__(self) -> None:
        self.host, self.params = Host("n1"), {}
        self._check = FakeCheck()
        self.check: Check = self._check

    def break_node(self) -> None:
        self._check.answers["n1"] = [Failed("n1: the service answers 503")]

    def mend_node(self) -> None:
        self._check.answers.clear()

    def changes(self) -> Any:
        return None


class SshWorld:
    """The check `ssh`: a file on the node says whether it is well."""

    def __init__(self, shell: Shell, sshd: Sshd) -> None:
        self.host = host_of(sshd)
        self._file = sshd.directory / "state"
        self.params = {"run": f"cat {self._file}", "equals": "well"}
        self.check: Check = SshCheck(shell, FakeClock())
        self.mend_node()

    def break_node(self) -> None:
        self._file.write_text("ill\n")

    def mend_node(self) -> None:
        self._file.write_text("well\n")

    def changes(self) -> Any:
        return self._file.stat().st_mtime_ns


class ReachableWorld:
    """The check `reachable`: the node's sshd runs or does not."""

    def __init__(self, shell: Shell, sshd: Sshd) -> None:
        self.host, self.params = host_of(sshd), {"within": "5m"}
        self._sshd = sshd
        self.check: Check = ReachableCheck(shell)

    def break_node(self) -> None:
        self._sshd.stop()

    def mend_node(self) -> None:
        self._sshd.start(self._sshd.directory)

    def changes(self) -> Any:
        return None


REAL = {"ssh": SshWorld, "reachable": ReachableWorld}


@pytest.fixture(params=["twin", *(pytest.param(kind, marks=pytest.mark.servers) for kind in REAL)])
async def world(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[World]:
    """Each world in turn."""
    if request.param == "twin":
        yield TwinWorld()
        return
    shell = SshShell()
    with real_sshd(tmp_path / "sshd") as sshd:
        yield REAL[request.param](shell, sshd)
        await shell.close()


async def test_a_well_node_passes_as_often_as_it_is_asked(world: World) -> None:
    before = world.changes()
    for _ in range(2):
        assert isinstance(await world.check.check(context(world.host, world.params)), Ok)
    assert world.changes() == before


async def test_an_ill_node_fails_with_a_sentence_that_names_it(world: World) -> None:
    world.break_node()
    result = await world.check.check(context(world.host, world.params))
    assert isinstance(result, Failed)
    assert "n1" in result.text


async def test_a_mended_node_passes_again(world: World) -> None:
    world.break_node()
    await world.check.check(context(world.host, world.params))
    world.mend_node()
    assert isinstance(await world.check.check(context(world.host, world.params)), Ok)


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
    found = judge(ShellResult(status, stdout, "first\nboom\n"), params)
    assert found == wrong if wrong is None else found is not None and found.startswith(wrong)


async def test_a_node_that_cannot_be_asked_is_unknown_and_a_changed_key_fails() -> None:
    shell = FakeShell({"stuck": HANG})
    check = SshCheck(shell, FakeClock())
    shell.down.add("n1")
    assert isinstance(await check.check(context(Host("n1"), {"run": "true"})), Unknown)
    shell.changed.add("n1")
    assert isinstance(await check.check(context(Host("n1"), {"run": "true"})), Failed)


async def test_a_long_answer_is_cut_in_the_sentence_and_kept_in_the_output() -> None:
    check = SshCheck(FakeShell({"long": ShellResult(0, "x" * 5000, "")}), FakeClock())
    result = await check.check(context(Host("n1"), {"run": "long", "equals": "y"}))
    assert isinstance(result, Failed)
    assert len(result.text) < 400
    assert len(result.output) == 5000


async def test_reachable_does_not_trust_a_pooled_connection() -> None:
    shell = FakeShell()
    await shell.run(Host("n1"), "true", timeout_s=1)
    shell.down.add("n1")
    result = await ReachableCheck(shell).check(context(Host("n1"), {}))
    assert isinstance(result, Failed)
    assert result.text.startswith("not reachable: n1")
    assert not shell.connections
