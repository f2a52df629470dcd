"""Network configuration: applied until it is in force, and taken back by rollout."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.playbook_node import Node

APPLY = """\
#!/bin/sh
cat {etc}/* > {force}
echo x >> {applied}
"""


class Network:
    """A node whose configuration in force is a file: the files of `etc` at the latest apply."""

    def __init__(self, node: Node) -> None:
        self.node, directory = node, node.directory
        self.etc, self.in_force, self.applied = (
            directory / "etc",
            directory / "in_force",
            directory / "applied",
        )
        self.etc.mkdir()
        self.old, self.new = self.etc / "old", self.etc / "new"
        self.old.write_text("network: {version: 2}\n")
        self.old.chmod(0o640)
        self.command = directory / "apply"
        self.command.write_text(APPLY.format(etc=self.etc, force=self.in_force, applied=self.applied))
        self.command.chmod(0o755)
        self.applied.touch()
        self.before = self.state()

    def variables(self, files: dict[Path, str], rollout: str = "r1") -> dict[str, Any]:
        return {
            "rollout": rollout,
            "network_files": {str(path): text for path, text in files.items()},
            "network_backend": "netplan",
            "network_command": str(self.command),
            "network_prior_file": str(self.node.directory / "record" / "network.json"),
        }

    def state(self) -> dict[str, tuple[str, int]]:
        return {
            path.name: (path.read_text(), path.stat().st_mode & 0o777) for path in sorted(self.etc.iterdir())
        }

    def is_in_force(self) -> bool:
        written = "".join(path.read_text() for path in sorted(self.etc.iterdir()))
        return self.in_force.read_text() == written

    def applies(self) -> int:
        return len(self.applied.read_text().splitlines())


@pytest.mark.long
async def test_network_is_configured_verified_and_restored(node: Node) -> None:
    world = Network(node)
    variables = world.variables({world.old: "network: {renderer: networkd}\n", world.new: "network: {}\n"})
    assert await node.check("network.yml", **variables) == [
        "Write the files",
        "Say that the configuration is not in force",
    ]
    assert world.state() == world.before
    await node.play("network.yml", **variables)
    assert world.is_in_force()
    assert {mode for _, mode in world.state().values()} == {0o600}, "netplan refuses others"
    await node.play("network-verify.yml", **variables)
    assert await node.play("network.yml", **variables) == 0
    assert await node.check("network.yml", **variables) == []
    assert world.applies() == 1
    assert "Say that the configuration is not in force" in await node.check("network-undo.yml", **variables)
    await node.play("network-undo.yml", **variables)
    assert world.state() == world.before
    assert (world.is_in_force(), world.applies()) == (True, 2)
    assert await node.play("network-undo.yml", **variables) == 0
    await node.fail("network-verify.yml", **variables)


@pytest.mark.long
@pytest.mark.parametrize("order", [["r2", "r1"], ["r1", "r2"]])
async def test_two_networks_are_undone_alone(node: Node, order: list[str]) -> None:
    world = Network(node)
    plans = {
        "r1": world.variables({world.old: "one\n", world.new: "one\n"}, "r1"),
        "r2": world.variables({world.old: "two\n"}, "r2"),
    }
    for variables in plans.values():
        await node.play("network.yml", **variables)
    assert await node.play("network-undo.yml", **plans[order[0]]) > 0
    left = {"r1": "one\none\n", "r2": "two\n"}[order[1]]
    assert world.in_force.read_text() == left
    await node.play("network-undo.yml", **plans[order[1]])
    assert world.state() == world.before
    assert world.is_in_force()


async def test_apply_that_was_cut_off_is_made_up_for(node: Node) -> None:
    """The files are as the plan says; nothing shows that they are not in force, but the marker."""
    world = Network(node)
    variables = world.variables({world.old: "one\n"})
    fails = variables | {"network_command": "false"}
    await node.fail("network.yml", **fails)
    assert world.old.read_text() == "one\n"
    assert "not applied" in await node.fail("network-verify.yml", **variables)
    assert await node.check("network.yml", **variables) == ["Say that the configuration is not in force"]
    await node.play("network.yml", **variables)
    assert world.is_in_force()
    await node.play("network-verify.yml", **variables)


@pytest.mark.long
async def test_file_behind_link_gets_its_mode_back(node: Node) -> None:
    world = Network(node)
    target = node.directory / "elsewhere"
    world.old.rename(target)
    world.old.symlink_to(target)
    variables = world.variables({world.old: "one\n"})
    await node.play("network.yml", **variables)
    assert (target.read_text(), target.stat().st_mode & 0o777) == ("one\n", 0o600)
    await node.play("network-verify.yml", **variables)
    assert await node.play("network.yml", **variables) == 0
    await node.play("network-undo.yml", **variables)
    assert world.old.is_symlink()
    assert world.state() == world.before


@pytest.mark.long
async def test_missing_route_is_applied_again(node: Node) -> None:
    world = Network(node)
    variables = world.variables({world.old: "one\n"})
    await node.play("network.yml", **variables)
    routes = {"network_routes": ["192.0.2.0/24 dev nowhere"]}
    await node.play("network.yml", **variables, **routes)
    assert world.applies() == 2
    reason = await node.fail("network-verify.yml", **variables, **routes)
    assert "the route 192.0.2.0/24 dev nowhere is not in force" in reason


@pytest.mark.long
async def test_network_killed_after_each_task_is_in_force(node: Node) -> None:
    world = Network(node)
    variables = world.variables({world.old: "one\n", world.new: "one\n"})
    assert await node.play_killed("network.yml", **variables) >= 6
    assert world.is_in_force()
    await node.play("network-verify.yml", **variables)
    assert await node.play_killed("network-undo.yml", **variables) >= 6
    assert world.state() == world.before
    assert world.is_in_force()


@pytest.mark.long
async def test_files_are_on_disk_before_they_are_applied(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty file after a loss of power would leave a node that cannot be reached."""
    world = Network(node)
    program, log = node.directory / "bin" / "sync", node.directory / "log"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$(wc -l < {world.applied}) $*" >> {log}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    variables = world.variables({world.old: "one\n", world.new: "one\n"})
    await node.play("network.yml", **variables)
    await node.play("network-undo.yml", **variables)
    assert f"0 {world.old} {world.new}" in log.read_text().splitlines()
    assert f"1 {world.old}" in log.read_text().splitlines()


async def test_failure_prints_no_content(node: Node) -> None:
    world = Network(node)
    variables = world.variables(
        {world.old: "password: hunter2\n", node.directory / "no" / "dir": "hunter2\n"}
    )
    for playbook in ("network.yml", "network-verify.yml"):
        printed = await node.fail(playbook, **variables)
        assert "hunter2" not in printed
        assert base64.b64encode(b"hunter2\n").decode() not in printed
