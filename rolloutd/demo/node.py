"""One node: a directory with its disk, its kernel parameters and its fault.

    bin/          commands that hide the machine's own: sysctl, healthcheck, drain, sudo
    proc/sys/     the current kernel parameters; boot/sys/ those at boot
    etc/sysctl.d/ files that `sysctl --system` reads
    tmp/          what Ansible writes
    fault         the kind of the fault, if one is set

A fault is a file, so that another process can set and clear it.
"""

from __future__ import annotations

import os
from enum import StrEnum
from importlib.resources import files
from pathlib import Path


class Fault(StrEnum):
    SSHD_REFUSES = "sshd-refuses"
    TASK_FAILS = "task-fails"
    CHECK_WRONG = "check-wrong"
    DRAIN_FAILS = "drain-fails"


BOOT_PARAMETERS = {
    "fs.file-max": "1048576",
    "fs.inotify.max_user_watches": "65536",
    "kernel.panic": "0",
    "kernel.pid_max": "32768",
    "net.core.netdev_max_backlog": "1000",
    "net.core.rmem_max": "212992",
    "net.core.somaxconn": "4096",
    "net.core.wmem_max": "212992",
    "net.ipv4.ip_forward": "0",
    "net.ipv4.tcp_fin_timeout": "60",
    "net.ipv4.tcp_max_syn_backlog": "1024",
    "net.ipv4.tcp_tw_reuse": "2",
    "vm.max_map_count": "65530",
    "vm.overcommit_memory": "0",
    "vm.swappiness": "60",
}
"""A node's kernel parameters, with Linux's values at boot."""

_COMMANDS = ("sysctl", "healthcheck", "drain", "sudo")
"""Commands of the nodes, each a script in files/."""


class NodeDirectory:
    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def remote_tmp(self) -> Path:
        """Ansible's temporary directory on the node."""
        return self.root / "tmp" / "ansible"

    def create(self) -> None:
        """Write the missing files; an existing node keeps its parameters."""
        for name in ("bin", "etc/sysctl.d", "tmp/ansible"):
            (self.root / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        scripts = files("rolloutd") / "demo" / "files"
        for name in _COMMANDS:
            path = self.root / "bin" / name
            path.write_text((scripts / f"{name}.sh").read_text())
            path.chmod(0o755)
        for key, value in BOOT_PARAMETERS.items():
            for kernel in ("boot", "proc"):
                path = self.root / kernel / "sys" / key.replace(".", "/")
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.exists():
                    path.write_text(f"{value}\n")

    def environment(self) -> dict[str, str]:
        """Return the environment of the node's commands; they inherit nothing of this process."""
        return {
            "PATH": f"{self.root}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(self.root),
            "TMPDIR": str(self.root / "tmp"),
            "SHELL": "/bin/sh",
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def current_fault(self) -> Fault | None:
        try:
            return Fault((self.root / "fault").read_text().strip())
        except FileNotFoundError:
            return None

    def set_fault(self, fault: Fault) -> None:
        fresh = self.root / f".fault.{os.getpid()}"
        fresh.write_text(f"{fault}\n")
        fresh.rename(self.root / "fault")

    def clear_fault(self) -> None:
        (self.root / "fault").unlink(missing_ok=True)
