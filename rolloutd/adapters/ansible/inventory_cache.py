"""Static inventories, written once per refresh and shared by its runs.

A file's name is the hash of its content; it appears atomically and never changes.  Each run has a hard link
to it, so the run keeps the inventory with which it began, and a link count of 1 means that no run uses the
file: the next call removes it unless it is of the last refresh.  Host variables may hold passwords, so only
the daemon's user can read the files.
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

DIRECTORY_NAME = ".inventories"
"""A directory on the runs' file system, with a name that no run can have."""

MAX_VARIANTS = 16
"""Variants of one refresh: one for each `ansible.cfg` in use, with a margin."""


class InventoryCache:
    """The inventories of one directory of runs; used by several threads."""

    def __init__(self, runs_dir: Path) -> None:
        self._directory = runs_dir / DIRECTORY_NAME
        self._generation: int | None = None
        self._variants: dict[str, Path] = {}
        self._lock = threading.Lock()

    def link_to(
        self, path: Path, generation: int | None, variant: str, build: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Link the inventory to `path`; build a variant once per generation, or each time if that is None."""
        with self._lock:
            if generation is None or generation != self._generation or len(self._variants) >= MAX_VARIANTS:
                self._generation = generation
                self._variants.clear()
            shared = self._variants.get(variant)
            if shared is None or not shared.exists():
                shared = self._variants[variant] = self._write_content(build())
            _link(shared, path)
            self._remove_unused()

    def _write_content(self, inventory: Mapping[str, Any]) -> Path:
        # No indent: it would take ten times as long as everything else here.
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

    def _remove_unused(self) -> None:
        """Remove files that neither a run nor the last refresh uses, and a crash's leftovers."""
        in_use = set(self._variants.values())
        with os.scandir(self._directory) as entries:
            unused = [Path(each.path) for each in entries if each.stat().st_nlink == 1]
        for path in unused:
            if path not in in_use:
                path.unlink(missing_ok=True)


def _link(shared: Path, path: Path) -> None:
    try:
        os.link(shared, path)
    except OSError:
        # Without hard links, or with too many links to this file, the run gets a copy.
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        with os.fdopen(fd, "wb") as file:
            file.write(shared.read_bytes())
