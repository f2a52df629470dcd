"""packages.yml where a reboot is asked for: real Ansible, a real sshd that goes away and comes back.

Two things are not the real ones, because no machine that runs tests may be
rebooted: the command that reboots, and the file that says which boot this is.
The command ends the sshd with everything that it had started, as a reboot does,
and the boot's name differs once it is up again.  The package manager is a script
that notes what it is asked for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.daemon_environment import DaemonEnvironment, daemon_environment, fleet_labels, plan
from tests.support.playbook_node import playbook_files
from tests.support.sshd import Sshd

pytestmark = pytest.mark.servers

INSTALLER = """#!/bin/sh
# apt-get, dpkg and dpkg-query of a machine without packages.
case "${{0##*/}} $*" in
"apt-get "*" install "*) for last; do :; done; echo "$last" >> {log}; touch {marker} ;;
dpkg-query*) for last; do echo "dpkg-query: no packages found matching $last" >&2; done; exit 1 ;;
esac
"""
"""A package manager whose packages ask for a reboot."""

PROGRAMS = ("apt-get", "dpkg", "dpkg-query")

REBOOT = """#!/bin/sh
# The power goes for whoever listens at the other end.
echo now > {wish}
exec sleep 600
"""


@dataclass(slots=True)
class RebootableNode:
    """What a reboot changes on a node, and what it is told by."""

    directory: Path
    sshd: Sshd
    is_honest: bool = True
    boots: int = 1

    def __post_init__(self) -> None:
        os.mkfifo(self.wish)
        self.boot_id.write_text("boot 1\n")
        self.command.write_text(REBOOT.format(wish=self.wish))
        self.command.chmod(0o755)
        for name in PROGRAMS:
            (self.directory / name).write_text(INSTALLER.format(log=self.installed, marker=self.marker))
            (self.directory / name).chmod(0o755)

    @property
    def wish(self) -> Path:
        """Where the command that reboots says so."""
        return self.directory / "wish"

    @property
    def command(self) -> Path:
        """The command that reboots."""
        return self.directory / "reboot"

    @property
    def boot_id(self) -> Path:
        """Which boot this is."""
        return self.directory / "boot-id"

    @property
    def marker(self) -> Path:
        """The file that asks for a reboot; a reboot clears it."""
        return self.directory / "reboot-required"

    @property
    def installed(self) -> Path:
        """What the package manager was asked for, line by line."""
        return self.directory / "installed"

    def variables(self, **more: object) -> dict[str, object]:
        """Return the variables of packages.yml on this machine."""
        return {
            "packages": ["kernel-of-ours"],
            "packages_state_dir": str(self.directory / "prior"),
            "packages_reboot_marker": str(self.marker),
            "packages_reboot_command": str(self.command),
            "packages_boot_id_file": str(self.boot_id),
            "packages_reboot_timeout_s": 120,
            "packages_manager": "apt",
            "packages_commands": {name: str(self.directory / name) for name in PROGRAMS},
            "ansible_become": False,
            **more,
        }

    def reboot(self) -> None:
        """Wait for the wish, go down, and come up as another boot."""
        while self.wish.read_text():  # blocks until somebody writes
            self.sshd.stop()
            self.boots += 1
            if self.is_honest:
                self.marker.unlink(missing_ok=True)
                self.boot_id.write_text(f"boot {self.boots}\n")
            self.sshd.start(self.sshd.directory)


@contextmanager
def machine(made: DaemonEnvironment, *, is_honest: bool = True) -> Iterator[RebootableNode]:
    """Let n1 be a machine that can be rebooted."""
    directory = made.directory / "machine"
    directory.mkdir()
    there = RebootableNode(directory, made.sshds["n1"], is_honest)
    power = threading.Thread(target=there.reboot)
    power.start()
    try:
        yield there
    finally:
        there.wish.open("w").close()
        power.join()


def begin(made: DaemonEnvironment, there: RebootableNode, **more: object) -> str:
    """Start the rollout of the packages on the one node."""
    spec = plan(
        "packages",
        soak="1s",
        maintain={"playbook": "packages.yml", "vars": there.variables(**more)},
        verify=[{"reachable": {"within": "60s"}}],
    )
    rollout = made.submit(spec, playbook_files())
    made.vote(rollout, "start")
    return rollout


def test_required_reboot_happens_once_and_is_verified(tmp_path: Path) -> None:
    with (
        daemon_environment(tmp_path, fleet_labels(1, 1, 1), observe_within="1s") as made,
        machine(made) as there,
    ):
        rollout = begin(made, there)
        made.wait_for_gate(rollout, "continue")
        assert made.nodes(rollout)["n1"]["outcome"] == "changed"
        assert (there.boots, there.boot_id.read_text()) == (2, "boot 2\n")
        assert not there.marker.exists()
        assert there.installed.read_text() == "kernel-of-ours\n"
        assert made.run_processes() == []


@pytest.mark.long
def test_unchanged_boot_id_fails_node(tmp_path: Path) -> None:
    with (
        daemon_environment(tmp_path, fleet_labels(1, 1, 1), observe_within="1s") as made,
        machine(made, is_honest=False) as there,
    ):
        rollout = begin(made, there, packages_reboot_timeout_s=5)
        made.wait_until(lambda: made.status(rollout)["state"] == "paused", "the rollout pauses")
        failure = made.client.get(f"/v1/rollouts/{rollout}/nodes/n1")["failure"]
        assert failure["step"] == "run.configure"
        assert "Reboot" in failure["message"]
        assert there.boots == 2


@pytest.mark.long
def test_never_is_never(tmp_path: Path) -> None:
    with (
        daemon_environment(tmp_path, fleet_labels(1, 1, 1), observe_within="1s") as made,
        machine(made) as there,
    ):
        rollout = begin(made, there, packages_reboot="never")
        made.wait_for_gate(rollout, "continue")
        assert there.boots == 1
        assert there.marker.exists()
