"""Artifact store of the run directories.

A removal first renames a directory to a name that no run can have, so a reader finds a complete run or none,
and the next listing finishes a removal that a crash interrupted.  The daemon decides what has expired; this
module only removes runs that are over by their status, claim and processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from rolloutd.adapters.ansible import stale_processes, wrapper
from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.adapters.directory_store import DirectoryStore
from rolloutd.concurrency import threads
from rolloutd.errors import SourceFailed
from rolloutd.ports import Artifact

log = logging.getLogger(__name__)

SHARE_LIMIT_S = 5.0
"""How long a node waits until other machines can show its run's output; an upload that began continues."""

OUTPUT_DIRECTORY = "output"
"""Name of the directory of all machines with what ended runs said."""

REMOVING_PREFIX = ".gone-"
"""Name prefix of a directory being removed; a run's name begins with a letter or a digit."""


class RunArtifactStore:
    """ports.ArtifactStore over `runs_dir`."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir = runs_dir

    async def list_artifacts(self) -> Sequence[Artifact]:
        return await threads.RUNS.run(self._list_artifacts)

    async def remove(self, name: str, *, unmodified_since: float) -> bool:
        return await threads.RUNS.run(self._remove, name, unmodified_since)

    def abandon_unbegun(self) -> None:
        """Remove the secrets of runs that a killed daemon prepared; to be called before the first start."""
        for path in self._runs_dir.iterdir():
            if any((path / name).exists() for name in wrapper.SECRET_FILES):
                RunDirectory(path).abandon()

    def _list_artifacts(self) -> Sequence[Artifact]:
        found = []
        with contextlib.suppress(FileNotFoundError), os.scandir(self._runs_dir) as entries:
            for entry in entries:
                if entry.name.startswith(REMOVING_PREFIX):
                    shutil.rmtree(entry.path, ignore_errors=True)
                elif not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    modified_at = entry.stat(follow_symlinks=False).st_mtime
                    found.append(
                        Artifact(entry.name, modified_at, _rollout_of(RunDirectory(Path(entry.path))))
                    )
        return sorted(found, key=lambda each: each.name)

    def _remove(self, name: str, unmodified_since: float) -> bool:
        directory = RunDirectory(self._runs_dir / name)
        if not directory.path.is_dir():
            return True
        if directory.path.stat().st_mtime > unmodified_since or not _is_over(directory):
            return False
        removing = self._runs_dir / f"{REMOVING_PREFIX}{name}"
        shutil.rmtree(removing, ignore_errors=True)
        directory.path.rename(removing)
        shutil.rmtree(removing)
        return True


class SharedOutput:
    """What ended runs said, by their handles, for all machines."""

    def __init__(self, store: DirectoryStore) -> None:
        self._store = store

    async def find(self, handle: str) -> RunDirectory | None:
        """Return the output of a run, or of the run of its name that another machine began.

        An ended prepare stage names no handle, and one machine alone began the run of its attempt.
        """
        if Path(handle).name != handle:
            return None
        path = await self._store.find(handle)
        path = path or await self._store.find_first(f"{stale_processes.name_of(handle)}@")
        return None if path is None else RunDirectory(path)

    async def share(self, directory: RunDirectory) -> None:
        """Copy what an ended run said; without the copy only this machine can show it."""
        name, limit = directory.path.name, asyncio.timeout(SHARE_LIMIT_S)
        try:
            async with limit:
                await self._share(name, directory)
        except (OSError, SourceFailed, TimeoutError) as error:
            problem = f"not within {SHARE_LIMIT_S:g} s" if limit.expired() else error
            log.warning("%s: other machines cannot show its output: %s", name, problem)

    async def _share(self, name: str, directory: RunDirectory) -> None:
        if not (self._store.parent / name).is_dir():
            staged = await threads.RUNS.run(self._copy, directory)
            await self._store.publish(staged, name, mode=0o700)

    def _copy(self, directory: RunDirectory) -> Path:
        """Copy what a run said, and nothing else: its other files are about this machine, or secret."""
        staged = self._store.stage()
        for path in (directory.events_file, *directory.path.glob("output*")):
            if path.is_file():
                shutil.copyfile(path, staged / path.name)
        return staged


def _rollout_of(directory: RunDirectory) -> str:
    """Return the rollout of a run; up to rolloutd 0.1 only the run's name had it.

    There it stands before the node's name, or before `localhost` for a build on another host.
    """
    facts = directory.read_metadata()
    if (rollout := facts.get("rollout")) is not None:
        return str(rollout)
    for node in (facts.get("node", ""), "localhost"):
        rollout, _, rest = directory.path.name.partition(f".{node}.")
        if rest:
            return rollout
    return ""


def _is_over(directory: RunDirectory) -> bool:
    """Return whether nothing of a run is active; an unclaimed run is claimed, so that it never begins."""
    facts = directory.read_metadata()
    if directory.read_status() is not None or facts.get("refused") is not None:
        return True
    if directory.read_claim() is None:
        directory.take_claim()
    claim = directory.read_claim()
    if claim is None or claim.holder == "daemon":
        return claim is not None
    return not claim.is_alive() and not _has_processes(
        directory, str(facts.get("run", "")), str(facts.get("sockets", ""))
    )


def _has_processes(directory: RunDirectory, run_id: str, sockets: str) -> bool:
    return bool(
        run_id and wrapper.find_processes(run_id.encode(), os.fsencode(directory.path), sockets.encode())
    )
