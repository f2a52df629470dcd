"""Directories of ssh's control sockets that the runs of one node share while it is in flight.

The first ssh of a run becomes the node's master, and the later runs use it: one login for an attempt.  The
masters are processes of their own, so runs survive the daemon.  `runs/.connections` has a link to each
directory, by which the next daemon finds the masters and ends those that it does not need.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tempfile
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rolloutd.adapters.ansible import wrapper
from rolloutd.adapters.ansible.environment import TreeConfig
from rolloutd.ports import JSON

MAX_PARENT_BYTES = 31
"""Longest directory under which a socket's path fits 107 bytes: 18 of `/rolloutd-` and a random end, 41 of
ssh's hash, and 17 of the suffix that ssh adds until the socket is complete."""


class NodeConnections:
    """The directories of one runner; used by several threads."""

    def __init__(self, runs_dir: Path) -> None:
        self._links = runs_dir / ".connections"
        self._kept: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    def keep(self, nodes: Collection[str]) -> None:
        """Let the runs of these nodes share connections; end those of all others."""
        self._kept = frozenset(map(_digest, nodes))
        with self._lock:
            for link in self._links.iterdir() if self._links.is_dir() else ():
                if link.name.partition(".")[0] not in self._kept:
                    _end(link)

    def directory_for(
        self, node: str, tree: Path, variables: Mapping[str, JSON], config: TreeConfig
    ) -> Path | None:
        """Return the directory of a run's control sockets; None if it shares none with other runs."""
        key = _digest(node)
        if key not in self._kept or config.names_control_path:
            return None
        with self._lock:
            link = self._links / f"{key}.{_digest(_connection_settings(tree, variables, config))}"
            target = link.readlink() if link.is_symlink() else None
            if target is None or not _is_own_directory(target):
                link.unlink(missing_ok=True)
                self._links.mkdir(mode=0o700, exist_ok=True)
                target = make_socket_directory()
                link.symlink_to(target)
            return target


def make_socket_directory() -> Path:
    """Create a directory for sockets, whose name is short enough for them."""
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > MAX_PARENT_BYTES:
        parent = "/tmp"  # noqa: S108 - mkdtemp makes a 0700 directory there
    return Path(tempfile.mkdtemp(prefix="rolloutd-", dir=parent))


def _is_own_directory(path: Path) -> bool:
    """Return whether this user made it: in a directory for all, another one may have taken its name."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _end(link: Path) -> None:
    sockets = str(link.readlink())
    wrapper.kill_processes(b"", b"", sockets.encode(), b"ssh\n")
    wrapper.remove_tree(sockets)
    link.unlink(missing_ok=True)


def _connection_settings(tree: Path, variables: Mapping[str, JSON], config: TreeConfig) -> str:
    """Return what a connection depends on: with other settings a run must not use it."""
    chosen: Mapping[str, Any] = {
        name: value
        for name, value in variables.items()
        if name.startswith("ansible_") and "pass" not in name  # no secret, not even as a digest
    }
    settings = [str(tree), config.values.get("ssh_connection"), chosen]
    return json.dumps(settings, sort_keys=True, default=str)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
