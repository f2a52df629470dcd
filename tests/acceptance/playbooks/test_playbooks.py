"""The reference playbooks by real Ansible: they do it, do it once, prove it, and take it back.

The runner starts them as in the daemon.  Connections are local; the playbooks run over ssh in the demo and in
test_reboot.py.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.playbook_node import PLAYBOOKS, Node

MODPROBE = """#!/bin/sh
# A kernel that loads the installed version of one driver.
cd {gpu} || exit 1
case $1 in
-r) [ ! -s users ] && rm -f loaded.$2 ;;
*) cp root/usr/lib/gpu/version loaded.$1 ;;
esac
"""

NVIDIA_SMI = """#!/bin/sh
cd {gpu} || exit 1
case $1 in
version) cat loaded.nvidia ;;
users) cat users ;;
esac
"""

CONTROL = """\
Package: gpu-driver
Version: {version}
Architecture: all
Maintainer: tests <tests@example.org>
Description: a driver
"""


@pytest.mark.long
async def test_packages_verify_says_what_is_not_installed(node: Node) -> None:
    where = {"packages_reboot_marker": str(node.directory / "reboot-required")}
    reason = await node.fail("packages-verify.yml", packages=["no-such-package-of-ours"], **where)
    assert "no-such-package-of-ours is not installed" in reason


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


class Gpu:
    """A GPU of a node whose driver is a real package, in a root directory of its own."""

    def __init__(self, node: Node) -> None:
        self.directory = node.directory / "gpu"
        self.root = self.directory / "root"
        for name in ("updates", "info"):
            (self.root / "var" / "lib" / "dpkg" / name).mkdir(parents=True)
        (self.root / "var" / "lib" / "dpkg" / "status").touch()
        for name, text in (("modprobe", MODPROBE), ("nvidia-smi", NVIDIA_SMI)):
            command = self.directory / name
            command.write_text(text.format(gpu=self.directory))
            command.chmod(0o755)
        self.users = self.directory / "users"
        self.users.touch()
        self.variables = {
            "gpu_driver_services": ["dcgm"],
            "gpu_driver_drain_s": 0,
            "gpu_driver_record": str(self.directory / "record.json"),
            "gpu_driver_install": f"dpkg --root={self.root} --force-not-root --force-bad-path -i",
            "gpu_driver_modprobe": str(self.directory / "modprobe"),
            "gpu_driver_query": f"{self.directory}/nvidia-smi version",
            "gpu_driver_users": f"{self.directory}/nvidia-smi users",
            "systemctl_command": str(node.directory / "systemctl"),
        }

    def stage(self, version: str) -> dict[str, str]:
        """Build the driver's package; return the variables that name it."""
        tree, package = self.directory / version, self.directory / f"driver-{version}.deb"
        for path, text in (
            ("usr/lib/gpu/version", f"{version}\n"),
            ("DEBIAN/control", CONTROL.format(version=version)),
        ):
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            (tree / path).write_text(text)
        subprocess.run(["dpkg-deb", "--build", tree, package], check=True, capture_output=True)
        return {"gpu_driver_package": str(package), "gpu_driver_version": version}

    @property
    def loaded(self) -> str:
        return (self.directory / "loaded.nvidia").read_text().strip()


@pytest.mark.long
@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="needs dpkg")
async def test_gpu_driver_is_installed_and_node_returned(node: Node) -> None:
    gpu = Gpu(node)
    old, new = (gpu.variables | gpu.stage(version) for version in ("550.54.15", "570.86.10"))
    services = node.services / "log"

    await node.play("gpu-driver.yml", **old)
    assert gpu.loaded == "550.54.15"
    assert (node.services / "dcgm").exists()

    gpu.users.write_text("4711, train.py\n")
    assert "processes still use the GPU: 4711, train.py" in await node.fail("gpu-driver.yml", **new)
    assert gpu.loaded == "550.54.15"
    gpu.users.write_text("")
    services.unlink()

    await node.play("gpu-driver.yml", **new)
    assert gpu.loaded == "570.86.10"
    assert services.read_text().splitlines() == ["stop dcgm", "start dcgm"]
    assert await node.check("gpu-driver.yml", **new) == []
    assert await node.play("gpu-driver-verify.yml", **new) == 0
    services.unlink()

    await node.play("gpu-driver-undo.yml", **new)
    assert await node.play("gpu-driver-undo.yml", **new) == 0
    assert "in effect is 550.54.15, not 570.86.10" in await node.fail("gpu-driver-verify.yml", **new)
    assert gpu.loaded == "550.54.15"
    assert services.read_text().splitlines() == ["stop dcgm", "start dcgm"], "the second undo does nothing"
