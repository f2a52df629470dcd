"""The reference playbooks by real Ansible: they do it, do it once, prove it, and take it back.

Connections are local; the playbooks run over ssh in the demo and in test_reboot.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.node_python import node_python

PLAYBOOKS = Path(__file__).parents[2] / "playbooks"

SYSCTL = """#!/bin/sh
# A kernel that is a directory.
cd {kernel} || exit 1
case $1 in
-n) cat "$2" ;;
-w) echo "${{2#*=}}" > "${{2%%=*}}" ;;
*) exit 1 ;;
esac
"""

SYSTEMCTL = """#!/bin/sh
# A service manager with one file per active service and one log of restarts.
cd {services} || exit 1
case $1 in
is-active) for last; do :; done; [ -e "$last" ] && echo active || {{ echo inactive; exit 3; }} ;;
restart | start) touch "$2"; echo "$1 $2" >> log ;;
*) exit 1 ;;
esac
"""


class Node:
    """This machine as a node, and the commands that stand for its kernel and its service manager."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.kernel, self.services = directory / "kernel", directory / "services"
        for folder, name, text in (
            (self.kernel, "sysctl", SYSCTL),
            (self.services, "systemctl", SYSTEMCTL),
        ):
            folder.mkdir()
            command = directory / name
            command.write_text(text.format(kernel=self.kernel, services=self.services))
            command.chmod(0o755)

    def play(self, playbook: str, **variables: Any) -> dict[str, int]:
        """Run a playbook and return the counts of its one node; `failures` holds what failed."""
        host = {
            "ansible_connection": "local",
            "ansible_python_interpreter": node_python(),
            "ansible_become": False,
        }
        inventory = self.directory / "inventory.json"
        inventory.write_text(json.dumps({"all": {"hosts": {"n0": host}}}))
        done = subprocess.run(
            [
                Path(sys.executable).with_name("ansible-playbook"),
                *("-i", inventory, "-e", json.dumps(variables), PLAYBOOKS / playbook),
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "ANSIBLE_PIPELINING": "1", "ANSIBLE_NOCOLOR": "1"},
        )
        recap = done.stdout.rpartition("n0 ")[2].split()
        counts = {name: int(number) for name, _, number in (word.partition("=") for word in recap) if number}
        assert counts.get("unreachable") == 0, done.stdout + done.stderr
        self.said = done.stdout
        return counts


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node of this test's own."""
    return Node(tmp_path)


def test_sysctl_sets_verifies_and_restores(node: Node) -> None:
    parameter = node.kernel / "net.core.somaxconn"
    parameter.write_text("4096\n")
    file = node.directory / "sysctl.d" / "90-rolloutd.conf"
    where = {"sysctl_file": str(file), "sysctl_command": str(node.directory / "sysctl")}

    assert node.play("sysctl-verify.yml", somaxconn=65535, **where)["failed"] == 1
    assert node.play("sysctl.yml", somaxconn=65535, **where)["failed"] == 0
    assert parameter.read_text() == "65535\n"
    assert "net.core.somaxconn = 65535" in file.read_text().splitlines()
    assert node.play("sysctl-verify.yml", somaxconn=65535, **where)["failed"] == 0
    assert node.play("sysctl.yml", somaxconn=65535, **where)["changed"] == 0

    assert node.play("sysctl.yml", somaxconn=1024, **where)["failed"] == 0
    assert node.play("sysctl-undo.yml", **where)["failed"] == 0
    assert parameter.read_text() == "4096\n"
    assert not file.exists()
    assert node.play("sysctl-undo.yml", **where)["changed"] == 0


def test_sysctl_undo_restores_a_file_that_was_there(node: Node) -> None:
    (node.kernel / "vm.swappiness").write_text("60\n")
    file = node.directory / "90-rolloutd.conf"
    file.write_text("vm.swappiness = 60\n")
    where = {"sysctl_file": str(file), "sysctl_command": str(node.directory / "sysctl")}
    assert node.play("sysctl.yml", sysctl_settings={"vm.swappiness": 10}, **where)["failed"] == 0
    assert node.play("sysctl-undo.yml", **where)["failed"] == 0
    assert file.read_text() == "vm.swappiness = 60\n"
    assert (node.kernel / "vm.swappiness").read_text() == "60\n"


def test_sysctl_names_what_is_missing(node: Node) -> None:
    assert node.play("sysctl.yml")["failed"] == 1
    assert "name the parameters to set" in node.said


def test_a_service_is_restarted_once_per_token(node: Node) -> None:
    (node.services / "nginx").touch()
    where = {
        "service": "nginx",
        "restart_state_dir": str(node.directory / "tokens"),
        "systemctl_command": str(node.directory / "systemctl"),
    }
    for token in ("CHG-1", "CHG-1", "CHG-2"):
        assert node.play("restart-service.yml", restart_token=token, **where)["failed"] == 0
    assert (node.services / "log").read_text().splitlines() == ["restart nginx"] * 2
    assert node.play("restart-service-verify.yml", restart_token="CHG-2", **where)["failed"] == 0
    (node.services / "nginx").unlink()
    assert node.play("restart-service-verify.yml", restart_token="CHG-2", **where)["failed"] == 1
    assert node.play("restart-service-undo.yml", **where)["failed"] == 0
    assert (node.services / "nginx").exists()


def test_packages_verify_says_what_is_not_installed(node: Node) -> None:
    where = {"packages_reboot_marker": str(node.directory / "reboot-required")}
    assert node.play("packages-verify.yml", packages=["no-such-package-of-ours"], **where)["failed"] == 1
    assert "no-such-package-of-ours is not installed" in node.said


def test_every_playbook_has_its_two_companions_and_parses() -> None:
    playbooks = sorted(PLAYBOOKS.glob("*.yml"))
    for path in playbooks:
        name = path.stem.removesuffix("-verify").removesuffix("-undo")
        assert all((PLAYBOOKS / f"{name}{end}.yml").exists() for end in ("", "-verify", "-undo"))
    binary = Path(sys.executable).with_name("ansible-playbook")
    parsed = subprocess.run(
        [binary, "-i", "n0,", "--syntax-check", *playbooks], capture_output=True, text=True
    )
    assert parsed.returncode == 0, parsed.stderr


@pytest.mark.long
def test_network_is_configured_verified_and_restored(node: Node) -> None:
    applied, etc = node.directory / "applied", node.directory / "etc"
    etc.mkdir()
    (etc / "old").write_text("auto eth0\n")
    (etc / "old").chmod(0o640)
    files = {str(etc / "old"): "auto eth1\n", str(etc / "new"): "auto eth2\n"}
    where = {
        "network_files": files,
        "network_backend": "ifupdown",
        "network_command": f"sh -c 'echo x >> {applied}'",
        "network_prior_file": str(node.directory / "prior.json"),
    }
    assert node.play("network.yml", **where)["failed"] == 0
    assert {path: Path(path).read_text() for path in files} == files
    assert node.play("network-verify.yml", **where)["failed"] == 0
    assert node.play("network.yml", **where)["changed"] == 0
    assert applied.read_text() == "x\n"
    assert node.play("network-undo.yml", **where)["failed"] == 0
    assert (etc / "old").read_text() == "auto eth0\n"
    assert (etc / "old").stat().st_mode & 0o777 == 0o640
    assert not (etc / "new").exists()
    assert applied.read_text() == "x\nx\n"
    assert node.play("network-verify.yml", **where)["failed"] == 1
