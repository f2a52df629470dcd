"""Kernel parameters of several rollouts on one node, and what their undos leave."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from tests.support.playbook_node import Node


@pytest.mark.long
async def test_sysctl_sets_verifies_and_restores(node: Node) -> None:
    parameter = node.kernel / "net.core.somaxconn"
    parameter.write_text("4096\n")
    file = node.directory / "sysctl.d" / "90-rolloutd.conf"
    where = {"sysctl_file": str(file), "sysctl_command": str(node.directory / "sysctl")}

    reason = await node.fail("sysctl-verify.yml", somaxconn=65535, **where)
    assert "net.core.somaxconn is 4096, not 65535" in reason
    await node.play("sysctl.yml", somaxconn=65535, **where)
    assert parameter.read_text() == "65535\n"
    assert "net.core.somaxconn = 65535" in file.read_text().splitlines()
    await node.play("sysctl-verify.yml", somaxconn=65535, **where)
    assert await node.play("sysctl.yml", somaxconn=65535, **where) == 0

    await node.play("sysctl.yml", somaxconn=1024, **where)
    await node.play("sysctl-undo.yml", **where)
    assert parameter.read_text() == "4096\n"
    assert not file.exists()
    assert await node.play("sysctl-undo.yml", **where) == 0


@pytest.mark.long
async def test_sysctl_undo_restores_a_file_that_was_there(node: Node) -> None:
    (node.kernel / "vm.swappiness").write_text("60\n")
    file = node.directory / "90-rolloutd.conf"
    file.write_text("vm.swappiness = 60\n")
    where = {"sysctl_file": str(file), "sysctl_command": str(node.directory / "sysctl")}
    await node.play("sysctl.yml", sysctl_settings={"vm.swappiness": 10}, **where)
    await node.play("sysctl-undo.yml", **where)
    assert file.read_text() == "vm.swappiness = 60\n"
    assert (node.kernel / "vm.swappiness").read_text() == "60\n"


@pytest.mark.long
async def test_file_behind_link_keeps_its_mode(node: Node) -> None:
    """Debian and Red Hat have /etc/sysctl.d/99-sysctl.conf, a link to /etc/sysctl.conf."""
    (node.kernel / "vm.swappiness").write_text("60\n")
    target, link = node.directory / "sysctl.conf", node.directory / "99-sysctl.conf"
    target.write_text("vm.swappiness = 60\n")
    target.chmod(0o640)
    link.symlink_to(target)
    where = {"sysctl_file": str(link), "sysctl_command": str(node.directory / "sysctl")}
    await node.play("sysctl.yml", sysctl_settings={"vm.swappiness": 10}, **where)
    assert "vm.swappiness = 10" in target.read_text()
    assert target.stat().st_mode & 0o777 == 0o640
    await node.play("sysctl-undo.yml", **where)
    assert target.read_text() == "vm.swappiness = 60\n"
    assert (target.stat().st_mode & 0o777, link.is_symlink()) == (0o640, True)


async def test_parameter_whose_module_is_gone_is_undone(node: Node) -> None:
    """Its undo is complete: a parameter that is not there has no value to restore."""
    kept, gone = node.kernel / "vm.swappiness", node.kernel / "net.netfilter.nf_conntrack_max"
    kept.write_text("60\n")
    gone.write_text("1024\n")
    file = node.directory / "90-rolloutd.conf"
    where = {"sysctl_file": str(file), "sysctl_command": str(node.directory / "sysctl")}
    await node.play("sysctl.yml", sysctl_settings={kept.name: 10, gone.name: 2048}, **where)
    gone.unlink()
    await node.play("sysctl-undo.yml", **where)
    assert kept.read_text() == "60\n"
    assert (gone.exists(), file.exists(), (node.directory / "rolloutd-sysctl.json").exists()) == (False,) * 3


@pytest.mark.long
async def test_bytes_of_a_comment_stay(node: Node) -> None:
    """Ansible refuses output that is not UTF-8, and a file of another program may be older than that."""
    (node.kernel / "vm.swappiness").write_text("60\n")
    file, before = node.directory / "90-rolloutd.conf", b"# M\xfcller {{ x }}\nvm.swappiness = 60\n"
    file.write_bytes(before)
    where = {"sysctl_file": str(file), "sysctl_command": str(node.directory / "sysctl")}
    await node.play("sysctl.yml", sysctl_settings={"vm.swappiness": 10}, **where)
    assert file.read_bytes().startswith(before)
    await node.play("sysctl-undo.yml", **where)
    assert file.read_bytes() == before


async def test_sysctl_names_what_is_missing(node: Node) -> None:
    assert "name the parameters to set" in await node.fail("sysctl.yml")


async def test_sysctl_takes_no_pattern_and_no_option(node: Node) -> None:
    """A pattern has several values, which no undo could restore."""
    for name in ("net.ipv4.conf.*.rp_filter", "-a"):
        reason = await node.fail(
            "sysctl.yml",
            sysctl_settings={"vm.swappiness": 1, name: 1},
            sysctl_file=str(node.directory / "x.conf"),
        )
        assert "name the parameters to set" in reason


class Parameters:
    """Two plans on one node, of which one parameter is of both."""

    PLANS: ClassVar[dict[str, dict[str, Any]]] = {
        "r1": {"vm.swappiness": 10, "net.ipv4.tcp_rmem": "4096 87380 100"},
        "r2": {"vm/swappiness": 20, "kernel.pid_max": 99999},
    }
    BEFORE: ClassVar[dict[str, str]] = {
        "vm.swappiness": "60\n",
        "net.ipv4.tcp_rmem": "1\t2\t3\n",
        "kernel.pid_max": "32768\n",
    }

    def __init__(self, node: Node, text: str | None) -> None:
        self.node, self.directory = node, node.directory / "sysctl.d"
        self.directory.mkdir()
        self.file = self.directory / "90-rolloutd.conf"
        if text is not None:
            self.file.write_text(text)
        for name, value in self.BEFORE.items():
            (node.kernel / name).write_text(value)
        self.before = self.state()

    def variables(self, rollout: str) -> dict[str, Any]:
        command = str(self.node.directory / "sysctl")
        return {
            "rollout": rollout,
            "sysctl_settings": self.PLANS[rollout],
            "sysctl_file": str(self.file),
            "sysctl_command": command,
        }

    async def play(self, playbook: str, rollout: str) -> int:
        return await self.node.play(playbook, **self.variables(rollout))

    def state(self) -> dict[str, str]:
        """Return all that a playbook may change; white space between values is the kernel's."""
        kernel = {path.name: " ".join(path.read_text().split()) for path in self.node.kernel.iterdir()}
        return kernel | {str(path): path.read_text() for path in self.directory.iterdir()}

    def values(self) -> dict[str, str]:
        return {name: (self.node.kernel / name).read_text().strip() for name in self.BEFORE}


# With a file that was there before: tests/acceptance/test_two_rollouts.py.
async def test_two_rollouts_undone_newest_first(node: Node) -> None:
    world = Parameters(node, None)
    await world.play("sysctl.yml", "r1")
    after_first = world.state()
    await world.play("sysctl.yml", "r2")
    assert world.values() == {
        "vm.swappiness": "20",
        "net.ipv4.tcp_rmem": "4096 87380 100",
        "kernel.pid_max": "99999",
    }
    await world.play("sysctl-verify.yml", "r2")
    assert await node.check("sysctl-undo.yml", **world.variables("r2")) == [
        "Write the rest",
        "Say which values differ",
    ]
    await world.play("sysctl-undo.yml", "r2")
    assert world.state() == after_first
    await world.play("sysctl-verify.yml", "r1")
    await world.play("sysctl-undo.yml", "r1")
    assert world.state() == world.before
    assert await world.play("sysctl-undo.yml", "r1") == 0


async def test_two_rollouts_undone_oldest_first(node: Node) -> None:
    world = Parameters(node, None)
    await world.play("sysctl.yml", "r1")
    await world.play("sysctl.yml", "r2")
    await world.play("sysctl-undo.yml", "r1")
    assert world.values() == {"vm.swappiness": "20", "net.ipv4.tcp_rmem": "1 2 3", "kernel.pid_max": "99999"}
    await world.play("sysctl-verify.yml", "r2")
    assert "tcp_rmem" not in world.file.read_text()
    await world.play("sysctl-undo.yml", "r2")
    assert world.state() == world.before


@pytest.mark.long
async def test_rollout_that_runs_again_changes_nothing(node: Node) -> None:
    world = Parameters(node, None)
    await world.play("sysctl.yml", "r1")
    after_first = world.state()
    assert await world.play("sysctl.yml", "r1") == 0
    assert world.state() == after_first


@pytest.mark.long
async def test_check_mode_says_what_differs(node: Node) -> None:
    world = Parameters(node, "net.ipv4.tcp_rmem = 4096 87380 100\nvm.swappiness = 10\n")
    variables = world.variables("r1")
    assert await node.check("sysctl.yml", **variables) == ["Say which values differ"]
    assert world.state() == world.before
    await world.play("sysctl.yml", "r1")
    assert await node.check("sysctl.yml", **{**variables, "rollout": ""}) == [], "a preview sees the effect"
    (node.kernel / "vm.swappiness").write_text("60\n")
    assert await node.check("sysctl.yml", **variables) == ["Say which values differ"]


@pytest.mark.long
async def test_verification_reads_later_files(node: Node) -> None:
    world = Parameters(node, None)
    await world.play("sysctl.yml", "r1")
    await world.play("sysctl-verify.yml", "r1")
    (world.directory / "99-local.conf").write_text("vm.swappiness = 30\n")
    reason = await node.fail("sysctl-verify.yml", **world.variables("r1"))
    assert "vm.swappiness will not be 10 at the next boot" in reason
    assert "99-local.conf sets it to 30" in reason


@pytest.mark.long
async def test_sysctl_killed_after_each_task_is_complete(node: Node) -> None:
    world = Parameters(node, None)
    variables = world.variables("r1")
    assert await node.play_killed("sysctl.yml", **variables) >= 4
    assert await world.play("sysctl.yml", "r1") == 0
    assert await node.play_killed("sysctl-undo.yml", **variables) >= 4
    assert world.state() == world.before
