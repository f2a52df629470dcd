"""Artifact store of the run directories.

A removal first renames a directory to a name that no run can have, so a reader finds a complete run or none,
and the next listing finishes a removal that a crash interrupted.  The daemon decides what has expired; this
module only removes runs that are over by their status, claim and processes.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from rolloutd.adapters.ansible import stale_processes, wrapper
from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.adapters.directory_store import DirectoryStore
from rolloutd.concurrency import threads
from rolloutd.ports import Artifact

log = logging.getLogger("rolloutd.adapters.ansible.artifact_store")

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


class SharedOutput(DirectoryStore):
    """What ended runs said, by their handles, in a directory of all machines."""

    def find(self, handle: str) -> RunDirectory | None:
        """Return the output of a run, or of the run of its name that another machine began.

        An ended prepare stage names no handle, and one machine alone began the run of its attempt.
        """
        if Path(handle).name != handle:
            return None
        same_name = sorted(self.parent.glob(f"{glob.escape(stale_processes.name_of(handle))}@*"))
        paths = [path for path in (self.parent / handle, *same_name) if path.is_dir()]
        return RunDirectory(paths[0]) if paths else None

    def share(self, directory: RunDirectory) -> None:
        """Copy what an ended run said; without the copy only this machine can show it."""
        name = directory.path.name
        try:
            if not (self.parent / name).is_dir():
                staged = self.stage()
                # Nothing else: the other files of a run are about this machine, or secret.
                for path in (directory.events_file, *directory.path.glob("output*")):
                    if path.is_file():
                        shutil.copyfile(path, staged / path.name)
                self.publish(staged, name, mode=0o700)
        except OSError as error:
            log.warning("%s: its output is not in %s: %s", name, self.parent, error)


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
