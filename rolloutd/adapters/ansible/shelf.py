"""The Shelf port over the directories of runs: what an ended rollout's runs said is forgotten here.

A directory is first renamed to a name that no run can have, then removed; so a
reader finds a run whole or not at all, and what a crash left of a removal is
removed by whoever looks next.  Whose time has come, the daemon says; that a run
is really over is judged here, by its status, its claim and its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from rolloutd.adapters.ansible import wrapper
from rolloutd.adapters.ansible.rundir import RunDir
from rolloutd.ports import Kept

GONE = ".gone-"
"""How the name of a directory begins that is being removed; a run's begins with a letter or a digit."""


class RunShelf:
    """ports.Shelf over `runs_dir`; a run's subject is its own name, which begins with its rollout's."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir

    async def kept(self) -> Sequence[Kept]:
        """Return all runs, after ending removals that were interrupted."""
        return await asyncio.to_thread(self._kept)

    async def forget(self, name: str, *, untouched_since: float) -> bool:
        """Remove a run that is over."""
        return await asyncio.to_thread(self._forget, name, untouched_since)

    def _kept(self) -> Sequence[Kept]:
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self._runs_dir) as entries:
            for entry in entries:
                if entry.name.startswith(GONE):
                    shutil.rmtree(entry.path, ignore_errors=True)
                elif not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    touched_at = entry.stat(follow_symlinks=False).st_mtime
                    found.append(Kept(entry.name, touched_at, entry.name))
        return sorted(found, key=lambda each: each.name)

    def _forget(self, name: str, untouched_since: float) -> bool:
        directory = RunDir(self._runs_dir / name)
        if not directory.path.is_dir():
            return True
        if directory.path.stat().st_mtime > untouched_since or not _is_over(directory):
            return False
        gone = self._runs_dir / f"{GONE}{name}"
        shutil.rmtree(gone, ignore_errors=True)
        directory.path.rename(gone)
        shutil.rmtree(gone)
        return True


def _is_over(directory: RunDir) -> bool:
    """Say whether nothing of a run goes on here; one that nobody has claimed can never begin from now on."""
    facts = directory.facts()
    if directory.status() is not None or facts.get("refused") is not None:
        return True
    if directory.claim() is None:
        directory.take_claim()
    claim = directory.claim()
    if claim is None or claim.by == "daemon":
        return claim is not None
    return not claim.lives() and not _left(
        directory, str(facts.get("run", "")), str(facts.get("sockets", ""))
    )


def _left(directory: RunDir, run: str, sockets: str) -> bool:
    return bool(run and wrapper.marked(run.encode(), os.fsencode(directory.path), sockets.encode()))
