"""The embedded fleet: nodes in a directory, each with its own sshd.

    DIR/inventory.yml  DIR/known_hosts  DIR/id_ed25519   a client's files
    DIR/nodes/n1/ ...                                    the nodes' directories
    DIR/fleet.json                                       written last: the fleet is ready

`python -m rolloutd.demo.fleet --dir DIR --nodes N` runs a fleet until a signal or
the end of its parent.  It writes only in DIR, and kills the nodes' commands at its
end.  It does not know rolloutd's daemon.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import getpass
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import asyncssh
import yaml

from rolloutd.demo.cleanup import processes_with
from rolloutd.demo.node import Fault, NodeDirectory
from rolloutd.demo.ssh_server import NodeSshServer

TEAMS = ("payments", "search", "media", "platform")
RACKS = ("r1", "r2")
MARK_VARIABLE = "ROLLOUTD_FLEET"

MAX_NODES = 500
"""Each node has a listening socket in one process, whose limit is commonly 1024 files."""

PARENT_POLL_S = 0.5
"""How late the fleet notices the end of its parent."""

KILL_ROUNDS = 250
KILL_PAUSE_S = 0.02
"""Scans for processes that a killed one has just started, and the pause between them (seconds)."""


def node_labels(number: int) -> dict[str, str]:
    """Return the labels of the node with that number, counted from 1.

    Every team has a canary, its first node, and nodes on both racks.
    """
    index = number - 1
    labels = {
        "role": "worker",
        "team": TEAMS[index % len(TEAMS)],
        "rack": RACKS[(index + index // len(TEAMS)) % len(RACKS)],
    }
    return {**labels, "canary": "true"} if index < len(TEAMS) else labels


def set_fault(directory: Path, node: str, fault: Fault) -> None:
    """Set a node's fault, from any process; raises KeyError for an unknown node."""
    _node_directory(directory, node).set_fault(fault)


def clear_fault(directory: Path, node: str) -> None:
    """Clear a node's fault, from any process; raises KeyError for an unknown node."""
    _node_directory(directory, node).clear_fault()


def _node_directory(directory: Path, node: str) -> NodeDirectory:
    root = directory / "nodes" / node
    if not root.is_dir():
        raise KeyError(f"{directory}: the fleet has no node {node}")
    return NodeDirectory(root)


class Fleet:
    """`async with Fleet(directory, nodes=12) as fleet:` runs the nodes n1 to n12."""

    def __init__(self, directory: Path, nodes: int = 12) -> None:
        if not 0 < nodes <= MAX_NODES:
            raise ValueError(f"a fleet has 1 to {MAX_NODES} nodes, not {nodes}")
        self.directory = directory.resolve()
        self.nodes = tuple(f"n{number}" for number in range(1, nodes + 1))
        self._mark = {MARK_VARIABLE: str(self.directory)}
        self._servers: dict[str, NodeSshServer] = {}

    @property
    def inventory_file(self) -> Path:
        return self.directory / "inventory.yml"

    @property
    def known_hosts(self) -> Path:
        return self.directory / "known_hosts"

    @property
    def key_file(self) -> Path:
        return self.directory / "id_ed25519"

    async def __aenter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        asyncssh.set_log_level(logging.WARNING)
        key, host_key = (asyncssh.generate_private_key("ssh-ed25519", "rolloutd-demo") for _ in range(2))
        _write(self.key_file, key.export_private_key().decode())
        allowed = asyncssh.import_authorized_keys(key.export_public_key().decode())
        try:
            for name in self.nodes:
                node = NodeDirectory(self.directory / "nodes" / name)
                node.create()
                self._servers[name] = NodeSshServer(node, self._mark)
                await self._servers[name].start(host_key, allowed)
        except BaseException:
            await self._stop()
            raise
        public = " ".join(host_key.export_public_key().decode().split()[:2])
        _write(self.known_hosts, "".join(f"[127.0.0.1]:{s.port} {public}\n" for s in self._servers.values()))
        _write(self.inventory_file, yaml.safe_dump({"all": self._inventory()}, sort_keys=False))
        ready = {"pid": os.getpid(), "nodes": {name: server.port for name, server in self._servers.items()}}
        _write(self.directory / "fleet.json", json.dumps(ready))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        (self.directory / "fleet.json").unlink(missing_ok=True)
        await self._stop()

    def variables(self, node: str) -> Mapping[str, Any]:
        return {**self._common_variables(), **self._node_variables(node)}

    def root(self, node: str) -> Path:
        return self.directory / "nodes" / node

    def processes(self) -> list[int]:
        """Return the pids of all processes on the nodes, also of those that left their session."""
        return processes_with(f"{MARK_VARIABLE}={self.directory}")

    async def _stop(self) -> None:
        async with asyncio.TaskGroup() as group:
            for server in self._servers.values():
                group.create_task(server.stop())
        for _ in range(KILL_ROUNDS):
            remaining = self.processes()
            if not remaining:
                break
            for pid in remaining:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(KILL_PAUSE_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_ROUNDS * KILL_PAUSE_S):
                for server in self._servers.values():
                    await server.wait_ended()

    def _inventory(self) -> dict[str, Any]:
        return {
            "vars": dict(self._common_variables()),
            "hosts": {name: dict(self._node_variables(name)) for name in self.nodes},
        }

    def _common_variables(self) -> dict[str, Any]:
        files = shlex.quote(f'UserKnownHostsFile="{self.known_hosts}"')
        return {
            "ansible_host": "127.0.0.1",
            "ansible_user": getpass.getuser(),
            "ansible_ssh_private_key_file": str(self.key_file),
            # -F: the user's ssh configuration must not change the demo.
            "ansible_ssh_common_args": f"-F /dev/null -o {files} -o GlobalKnownHostsFile=/dev/null "
            "-o StrictHostKeyChecking=yes -o IdentitiesOnly=yes -o IdentityAgent=none",
            "ansible_python_interpreter": sys.executable,
            "ansible_pipelining": True,
            # The nodes have no sftp; with `dd`, paths are the same as in commands.
            "ansible_ssh_transfer_method": "piped",
            "ansible_no_target_syslog": True,
        }

    def _node_variables(self, node: str) -> dict[str, Any]:
        directory = NodeDirectory(self.root(node))
        return {
            "ansible_port": self._servers[node].port,
            "ansible_remote_tmp": _remote_tmp(directory),
            "node_root": str(directory.root),
            **node_labels(int(node[1:])),
        }


def _remote_tmp(node: NodeDirectory) -> str:
    """Return Ansible's directory on a node, relative to its home if a shell would split the path.

    Ansible hands the path to `dd` unquoted.
    """
    path = str(node.remote_tmp)
    return path if shlex.quote(path) == path else str(node.remote_tmp.relative_to(node.root))


def _write(path: Path, text: str) -> None:
    """Write a file atomically, readable only by its owner."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.touch(mode=0o600)
    fresh.write_text(text)
    fresh.rename(path)


async def run_fleet(directory: Path, nodes: int) -> None:
    """Run a fleet until SIGTERM, SIGINT or SIGHUP, or until the parent process ends."""
    parent = os.getppid()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    async with Fleet(directory, nodes):
        # A parent that is killed sends no signal; its child gets another parent.
        while not stop.is_set() and os.getppid() == parent:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PARENT_POLL_S):
                    await stop.wait()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rolloutd.demo.fleet", description="Run a fleet of nodes."
    )
    parser.add_argument(
        "--dir", type=Path, required=True, help="directory of the fleet; it writes nowhere else"
    )
    parser.add_argument("--nodes", type=int, default=12, help="number of nodes (12)")
    chosen = parser.parse_args(arguments)
    asyncio.run(run_fleet(chosen.dir, chosen.nodes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
