"""The static inventories that runs read: written once for each refresh, shared by all runs of it.

A file is named after the hash of its content, is never changed, and appears
whole or not at all.  A run's own directory has it under a second name (a hard
link), so the run keeps what it began with for as long as it needs it, and a
file with one name left is used by no run: whoever looks next removes it, unless
it is of the last refresh.  No other book is kept of who uses what.  Host
variables may hold passwords, so nobody but the daemon's user may read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

DIRECTORY = ".inventories"
"""Beside the runs, on their file system; no run can have this name."""

MOST_VARIANTS = 16
"""Variants of one refresh that are kept ready: one for each `ansible.cfg` in use, and some air."""


class Inventories:
    """The inventories of one directory of runs; used by several threads."""

    def __init__(self, runs_dir: Path) -> None:
        self._directory = runs_dir / DIRECTORY
        self._generation: int | None = None
        self._variants: dict[str, Path] = {}
        self._lock = threading.Lock()

    def put(
        self, place: Path, generation: int | None, variant: str, make: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Let the inventory be found at `place`; each variant of a generation is made once.

        Where no generation is known it is made each time, and written if it is another one.
        """
        with self._lock:
            if generation is None or generation != self._generation or len(self._variants) >= MOST_VARIANTS:
                self._generation = generation
                self._variants.clear()
            shared = self._variants.get(variant)
            if shared is None or not shared.exists():
                shared = self._variants[variant] = self._written(make())
            _link(shared, place)
            self._tidy()

    def _written(self, inventory: Mapping[str, Any]) -> Path:
        # Without indent: that alone takes ten times as long as all the rest.
        content = json.dumps(inventory, ensure_ascii=True, separators=(",", ":")).encode()
        path = self._directory / f"{hashlib.sha256(content).hexdigest()}.json"
        if path.exists() and path.read_bytes() == content:
            return path
        self._directory.mkdir(mode=0o700, exist_ok=True)
        draft = self._directory / f"draft.{os.getpid()}"
        draft.unlink(missing_ok=True)
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        return path

    def _tidy(self) -> None:
        """Remove what neither a run nor the last refresh uses, and what a crash left."""
        kept = set(self._variants.values())
        with os.scandir(self._directory) as entries:
            unused = [Path(each.path) for each in entries if each.stat().st_nlink == 1]
        for path in unused:
            if path not in kept:
                path.unlink(missing_ok=True)


def _link(shared: Path, place: Path) -> None:
    try:
        os.link(shared, place)
    except OSError:
        # A file system without hard links, or one that has no more for this file: the run gets a copy.
        with contextlib.suppress(FileNotFoundError):
            place.unlink()
        fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        with os.fdopen(fd, "wb") as file:
            file.write(shared.read_bytes())
