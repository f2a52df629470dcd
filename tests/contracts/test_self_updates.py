"""The check `self_updates` on a real sshd whose node has commands of our own for systemd and apt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rolloutd.adapters.ssh.self_updates import COMMAND, NO_ANSWER, SelfUpdatesCheck, find_active_updaters
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.contracts import CheckBackend, CheckContract
from rolloutd.ports import Check, Failed, Host, Shell, ShellResult, Unknown
from tests.contracts.fakes.clock import FakeClock
from tests.contracts.fakes.shell import FakeShell
from tests.contracts.ssh_fixtures import host_of, real_sshd, step_context
from tests.support.sshd import Sshd

ON, OFF = 'APT::Periodic::Unattended-Upgrade "1";\n', 'APT::Periodic::Unattended-Upgrade "0";\n'


def units(*active: str) -> str:
    known = (
        "apt-daily-upgrade.timer",
        "dnf-automatic-install.timer",
        "dnf-automatic.timer",
        "zincati.service",
    )
    states = {unit: "active" if unit in active else "inactive" for unit in known}
    return "\n".join(f"Id={unit}\nActiveState={state}\n" for unit, state in states.items())


class Backend:
    """A node whose `systemctl` and `apt-config` print what a file has."""

    def __init__(self, shell: Shell, sshd: Sshd) -> None:
        self.host, self.clock, self.params = host_of(sshd), FakeClock(), {"allow": []}
        commands = sshd.directory / "bin"
        commands.mkdir()
        self._units = sshd.directory / "units"
        for name, file in (("systemctl", self._units), ("apt-config", sshd.directory / "apt")):
            (commands / name).write_text(f"#!/bin/sh\ncat {file}\n")
            (commands / name).chmod(0o755)
        (sshd.directory / "apt").write_text(ON)
        keys = sshd.directory / "authorized_keys"
        keys.write_text(
            f'command="PATH={commands}:$PATH; eval \\"$SSH_ORIGINAL_COMMAND\\"" {keys.read_text()}'
        )
        self._units.write_text(units())
        self.check: Check = SelfUpdatesCheck(shell, self.clock)

    async def break_node(self) -> None:
        self._units.write_text(units("apt-daily-upgrade.timer", "zincati.service"))

    async def repair_node(self) -> None:
        self._units.write_text(units())

    async def state(self) -> object:
        return self._units.stat().st_mtime_ns


@pytest.mark.servers
class TestSelfUpdatesCheck(CheckContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[CheckBackend]:
        shell = SshShell()
        with real_sshd(directory / "sshd") as sshd:
            try:
                yield Backend(shell, sshd)
            finally:
                await shell.close()


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (units(), []),
        (units("zincati.service"), ["zincati"]),
        (units("apt-daily-upgrade.timer") + ON, ["unattended-upgrades"]),
        (units("apt-daily-upgrade.timer") + OFF, []),
        (units("apt-daily-upgrade.timer"), []),
        (units("dnf-automatic-install.timer"), ["dnf-automatic"]),
        (units("dnf-automatic.timer") + "apply_updates = yes\n", ["dnf-automatic"]),
        (units("dnf-automatic.timer") + "apply_updates = no\n", []),
        (ON + "apply_updates = yes\n", []),
        ("", []),
    ],
)
def test_updater_is_active_if_timer_and_configuration_say_so(output: str, found: list[str]) -> None:
    assert list(find_active_updaters(output)) == found


def test_allowed_updater_is_not_reported() -> None:
    assert not find_active_updaters(units("zincati.service"), ["zincati"])


async def test_failure_names_unmanaged_change_and_units() -> None:
    check = SelfUpdatesCheck(FakeShell({COMMAND: ShellResult(0, units("zincati.service"), "")}), FakeClock())
    result = await check.check(step_context(Host("n1"), {"allow": []}))
    assert isinstance(result, Failed)
    assert result.text == (
        "n1: unmanaged change: zincati updates it outside the plan; disable zincati.service,"
        " or add it to `allow`"
    )


async def test_systemd_that_does_not_answer_is_unknown() -> None:
    check = SelfUpdatesCheck(FakeShell({COMMAND: ShellResult(NO_ANSWER, "", "no bus")}), FakeClock())
    result = await check.check(step_context(Host("n1"), {"allow": []}))
    assert isinstance(result, Unknown)
    assert result.text.startswith("n1: its services cannot be listed (exit status 75);")
