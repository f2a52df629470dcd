"""Static inventories, shared by the runs of one refresh.

The file of a run is a hard link to that of the run before it, so the fleet's variables are written once and
are gone with the last of these runs: they may hold passwords.  The next run writes the encoded text again,
which is in memory.  A file never changes, so a run keeps the inventory with which it began.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

OLD_DIRECTORY_NAME = ".inventories"
"""Where rolloutd 0.1 kept the inventory of the latest refresh without end."""


class InventoryCache:
    """The latest inventory files of one directory of runs; used by several threads."""

    def __init__(self, runs_dir: Path) -> None:
        self._generation: int | None = None
        self._latest: dict[str, Path] = {}
        self._contents: dict[str, tuple[str, bytes]] = {}
        self._lock = threading.Lock()
        shutil.rmtree(runs_dir / OLD_DIRECTORY_NAME, ignore_errors=True)

    def link_to(
        self, path: Path, generation: int | None, variant: str, build: Callable[[], Mapping[str, Any]]
    ) -> str:
        """Link the inventory to `path`; build it if no run has this generation and variant (None: always).

        Returns a name of the content, empty without a generation; a hash could betray passwords in it.
        """
        if generation is None:
            _write(path, _encode(build()))
            return ""
        with self._lock:
            if generation != self._generation:
                self._generation = generation
                self._latest.clear()
                self._contents.clear()
            latest = self._latest.get(variant)
            if latest is None or not _link(latest, path):
                if variant not in self._contents:
                    self._contents[variant] = secrets.token_hex(8), _encode(build())
                _write(path, self._contents[variant][1])
            self._latest[variant] = path
            return self._contents[variant][0]


def _link(existing: Path, path: Path) -> bool:
    try:
        os.link(existing, path)
    except OSError:
        return False  # that run is over, or the file system has no hard links, or no more to this file
    return True


def _encode(inventory: Mapping[str, Any]) -> bytes:
    # No indent: it would take ten times as long as everything else here.
    return json.dumps(inventory, ensure_ascii=True, separators=(",", ":")).encode()


def _write(path: Path, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
