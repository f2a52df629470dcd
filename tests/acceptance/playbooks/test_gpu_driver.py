"""GPU drivers: real packages in a root directory, and commands that stand for the kernel and the GPU."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.support.playbook_node import Node

MODPROBE = """#!/bin/sh
# A kernel that loads the installed version of one driver.
cd {gpu} || exit 1
case $1 in
-r) [ ! -s users ] && rm -f loaded.$2 ;;
*) cp root/usr/lib/gpu/version loaded.$1 ;;
esac || exit 1
for file in loaded.*; do [ -e "$file" ] && echo "${{file#loaded.}} 4096 0 - Live 0x0"; done > modules
exit 0
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
        (self.directory / "modules").touch()
        self.variables = {
            "gpu_driver_services": ["dcgm"],
            "gpu_driver_drain_s": 0,
            "gpu_driver_record": str(self.directory / "record.json"),
            "gpu_driver_install": f"dpkg --root={self.root} --log={self.directory}/dpkg.log "
            "--force-not-root --force-bad-path -i",
            "gpu_driver_modprobe": str(self.directory / "modprobe"),
            "gpu_driver_loaded": str(self.directory / "modules"),
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

    def load(self, module: str) -> None:
        """Load a module, as its users do."""
        subprocess.run([self.directory / "modprobe", module], check=True)

    def modules(self) -> dict[str, str]:
        """Return the loaded modules with their versions."""
        loaded = self.directory.glob("loaded.*")
        return {path.name.removeprefix("loaded."): path.read_text().strip() for path in loaded}

    @property
    def loaded(self) -> str:
        return self.modules()["nvidia"]


@pytest.fixture
def gpu(node: Node) -> Gpu:
    if shutil.which("dpkg-deb") is None:
        pytest.skip("needs dpkg")
    return Gpu(node)


@pytest.mark.long
async def test_gpu_driver_is_installed_and_node_returned(node: Node, gpu: Gpu) -> None:
    old, new = (gpu.variables | gpu.stage(version) for version in ("550.54.15", "570.86.10"))
    services = node.services / "log"

    assert "Say that another driver is in effect" in await node.check("gpu-driver.yml", **old)
    await node.play("gpu-driver.yml", **old)
    assert gpu.modules() == {"nvidia": "550.54.15"}
    assert (node.services / "dcgm").exists()
    gpu.load("nvidia_uvm")
    services.unlink()

    await node.play("gpu-driver.yml", rollout="r2", **new)
    assert gpu.modules() == {"nvidia": "570.86.10", "nvidia_uvm": "570.86.10"}
    assert services.read_text().splitlines() == ["stop dcgm", "start dcgm"]
    assert await node.play("gpu-driver.yml", rollout="r2", **new) == 0
    assert await node.check("gpu-driver.yml", rollout="r2", **new) == []
    assert await node.play("gpu-driver-verify.yml", **new) == 0
    services.unlink()

    await node.play("gpu-driver-undo.yml", rollout="r2", **new)
    assert await node.play("gpu-driver-undo.yml", rollout="r2", **new) == 0
    assert "in effect is 550.54.15, not 570.86.10" in await node.fail("gpu-driver-verify.yml", **new)
    assert gpu.modules() == {"nvidia": "550.54.15", "nvidia_uvm": "550.54.15"}
    assert services.read_text().splitlines() == ["stop dcgm", "start dcgm"], "the second undo does nothing"


@pytest.mark.long
async def test_drivers_undone_oldest_first_keep_the_newer(node: Node, gpu: Gpu) -> None:
    first, second = (gpu.variables | gpu.stage(version) for version in ("550.54.15", "570.86.10"))
    previous = {"version": "535.1", "package": gpu.stage("535.1")["gpu_driver_package"]}
    await node.play("gpu-driver.yml", gpu_driver_previous=previous, **first)
    await node.play("gpu-driver.yml", rollout="r2", **second)
    await node.play("gpu-driver-undo.yml", **first)
    assert gpu.loaded == "570.86.10"
    changes = await node.check("gpu-driver-undo.yml", rollout="r2", **second)
    assert "Say that another driver is in effect" in changes
    await node.play("gpu-driver-undo.yml", rollout="r2", **second)
    assert gpu.loaded == "535.1"


@pytest.mark.parametrize("cause", ["busy", pytest.param("broken package", marks=pytest.mark.long)])
async def test_failure_leaves_modules_and_services_as_before(node: Node, gpu: Gpu, cause: str) -> None:
    variables = gpu.variables | gpu.stage("570.86.10")
    (gpu.root / "usr/lib/gpu").mkdir(parents=True)
    (gpu.root / "usr/lib/gpu/version").write_text("550.54.15\n")
    for module in ("nvidia", "nvidia_uvm"):
        gpu.load(module)
    (node.services / "dcgm").touch()
    if cause == "busy":
        gpu.users.write_text("4711, train.py\n")
        reason = "processes still use the GPU: 4711, train.py"
    else:
        (gpu.directory / "driver-570.86.10.deb").write_text("not a package")
        reason = "Install the package: "
    assert reason in await node.fail("gpu-driver.yml", **variables)
    assert (node.services / "dcgm").exists()
    assert gpu.modules() == {"nvidia": "550.54.15", "nvidia_uvm": "550.54.15"}


@pytest.mark.long
async def test_gpu_driver_killed_after_each_task_is_complete(node: Node, gpu: Gpu) -> None:
    variables = gpu.variables | gpu.stage("570.86")
    variables["gpu_driver_previous"] = {
        "version": 550.54,
        "package": gpu.stage("550.54")["gpu_driver_package"],
    }
    (gpu.root / "usr/lib/gpu").mkdir(parents=True)
    (gpu.root / "usr/lib/gpu/version").write_text("550.54\n")
    for module in ("nvidia", "nvidia_uvm"):
        gpu.load(module)
    unquoted = variables | {"gpu_driver_version": 570.86}
    assert await node.play_killed("gpu-driver.yml", **unquoted) >= 8
    assert gpu.modules() == {"nvidia": "570.86", "nvidia_uvm": "570.86"}
    assert (node.services / "dcgm").exists()
    await node.play("gpu-driver-verify.yml", **unquoted)
    assert await node.play_killed("gpu-driver-undo.yml", **unquoted) >= 8
    assert gpu.modules() == {"nvidia": "550.54", "nvidia_uvm": "550.54"}
    assert (node.services / "dcgm").exists()
