"""Nodes in namespaces, and a minimal Debian whose systemd runs the packaged daemon beside them.

What people do there is timed: `stopwatch` has each command.  It needs root, and knows no pytest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rolloutd.control.client import Client
from tests.support.private_nodes import SUBNET, PrivateNodes
from tests.support.systemd import DebianSystemd


class PackagedDaemon(PrivateNodes):
    """`boot(root)`, then `install(package)`, `run(...)`; the client speaks with the daemon's socket."""

    def __init__(self, directory: Path, labels: Mapping[str, Mapping[str, str]]) -> None:
        super().__init__(directory, labels)
        (directory / "systemd").mkdir(parents=True)
        self.systemd = DebianSystemd(directory / "systemd", self.daemon_prefix)
        self.stopwatch: list[tuple[str, float]] = []
        self._directory = "/root"

    @property
    def root(self) -> Path:
        """The Debian's file system."""
        return self.systemd.root

    @property
    def address(self) -> str:
        """The Debian's address in the nodes' network."""
        return f"{SUBNET}.254"

    @property
    def etc(self) -> Path:
        """The daemon's /etc/rolloutd."""
        return self.root / "etc/rolloutd"

    def boot(self, layers: Sequence[Path]) -> None:
        """Boot a root file system, the upper layer first; it stays as it is."""
        self.systemd.boot(layers)
        self.client = Client(self.root / "run/rolloutd/control.sock")

    def follow(self, command: str) -> str:
        """Run a command in the directory that the one before has left, as in one shell."""
        file = self.root / "run/directory"
        printed = self.run(command, script=f"cd {self._directory}\n{command}\npwd > /run/directory")
        self._directory = file.read_text().strip()
        return printed

    def run(self, command: str, *, code: int = 0, script: str = "") -> str:
        """Run a command in the Debian as root would; return all its output.

        apt reaches the machine's own network, everything else only the nodes.  `script` is what the shell
        runs where it is more than the command.
        """
        began = time.monotonic()
        network = ("-n",) if not command.startswith("apt-get") else ()
        enter = ("nsenter", "-t", str(self.systemd.pid), "-m", "-p", "-u", "-i", "-C", *network)
        environment = ("env", "-i", "HOME=/root", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8")
        done = subprocess.run(
            [
                *enter,
                "--",
                *environment,
                "DEBIAN_FRONTEND=noninteractive",
                "sh",
                "-ec",
                script or f"cd /root && {command}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=600,
        )
        self.stopwatch.append((command, time.monotonic() - began))
        assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{self.log_tail()}"
        return done.stdout

    def install(self, package: Path) -> str:
        """Install a package with apt; return what it printed."""
        shutil.copy(package, self.root / "root" / package.name)
        return self.run(f"apt-get install -y -q ./{package.name}")

    def copy_keys(self) -> None:
        """Put each node's key and the host keys where the settings expect them."""
        gid = int(self.run("id -g rolloutd"))
        (self.etc / "known_hosts").write_text((self.directory / "known_hosts").read_text())
        for name, sshd in self.sshds.items():
            key = self.etc / f"{name}.key"
            shutil.copy(sshd.key_file, key)
            os.chown(key, 0, gid)
            key.chmod(0o640)

    def inventory(self, *, with_keys: bool = False) -> str:
        """Return the Ansible inventory of the nodes, perhaps with each node's key in /etc/rolloutd."""
        hosts = {}
        for name, sshd in self.sshds.items():
            hosts[name] = {**sshd.connection(), **self.labels[name]}
            del hosts[name]["ansible_ssh_private_key_file"]
            if with_keys:
                hosts[name]["ansible_ssh_private_key_file"] = f"/etc/rolloutd/{name}.key"
        return yaml.safe_dump({"all": {"hosts": hosts}})

    def write_node_places(self) -> None:
        """Keep what the daemon leaves on nodes out of this machine's own places."""
        (self.etc / "config.d" / "test-nodes.yaml").write_text(yaml.safe_dump(self.node_places()))

    def node_places(self) -> dict[str, Any]:
        """Return the settings for that."""
        return {"ansible": {"fence_dir": str(self.directory / "fence")}}

    def is_ready(self) -> bool:
        """Return whether the daemon answers and has its nodes."""
        return len(self.client.get("/v1/inventory")["nodes"]) == len(self.labels)

    def log_tail(self) -> str:
        journal = "journalctl --no-pager -o cat -u rolloutd.service -u rolloutd.socket | tail -40"
        return self.systemd.inside("sh", "-c", journal, check=False) if self.systemd.pid else ""

    def stop(self) -> None:
        """End everything."""
        self.systemd.stop()
        super().stop()
