"""Ended runs that a restored database does not know."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.adapters.ansible.stale_processes import run_name
from rolloutd.adapters.clusters import run_records as objects
from rolloutd.adapters.kubernetes_jobs import records as jobs
from rolloutd.errors import StoreFailed
from rolloutd.ports import id_of

FORGOTTEN = ".forgotten-"
"""Before the epoch, in the names of runs that are set aside."""


def set_aside(state_dir: Path, *, known: Collection[str], since: float, epoch: int) -> int:
    """Set the runs aside that began after `since` (Unix time), have ended and have no handle in `known`.

    A run's name is its place in a rollout, so the restored daemon would give the same name again, and would
    take the old result for that of a run that it never began, also if the node was rolled back meanwhile.
    A run that has not ended keeps its name: the daemon finds it, because a node has one run at a time.
    Returns the number of runs.  Their output stays until the retention removes it, or the run is begun again.
    """
    forgotten = _Forgotten(_names(known), since, f"{FORGOTTEN}{epoch}")
    count = sum(forgotten.set_run_aside(path) for path in _entries(state_dir / "runs"))
    for runner in _entries(state_dir / "runners"):
        for path in _entries(runner):
            if path.suffix == ".json":
                count += forgotten.set_object_aside(path)
            elif path.is_dir():
                count += forgotten.set_job_aside(path)
    return count


class _Forgotten:
    def __init__(self, known: Collection[str], since: float, suffix: str) -> None:
        self._known, self._since, self._suffix = known, since, suffix

    def set_run_aside(self, path: Path) -> bool:
        try:
            status = RunDirectory(path).read_status()
        except TypeError as error:
            raise StoreFailed(f"{path / 'status'}: not the status of a run; remove the file") from error
        if status is None or not self._is_unknown(path.name, status.began_at):
            return False
        path.rename(path.with_name(f"{path.name}{self._suffix}"))
        return True

    def set_job_aside(self, path: Path) -> bool:
        """Mark a run in a Job: the cluster may have it still, and would answer by it."""
        record = jobs.RunRecord(RunDirectory(path))
        began_at = float(record.metadata.get("began_at", 0.0))
        if record.result is None or record.is_forgotten or not self._is_unknown(path.name, began_at):
            return False
        record.forget()
        return True

    def set_object_aside(self, path: Path) -> bool:
        """Rename the record of a change of an object, and the run in it."""
        record = objects.RunRecord(path)
        began_at = float(record.content.get("began_at", 0.0))
        if record.result is None or not self._is_unknown(path.stem, began_at):
            return False
        name, owner = f"{record.content['run']}{self._suffix}", path.stat()
        renamed = objects.RunRecord(path.with_name(f"{run_name(name)}.json"))
        renamed.write(**{**record.content, "run": name})
        os.chown(renamed.path, owner.st_uid, owner.st_gid)
        path.unlink()
        return True

    def _is_unknown(self, name: str, began_at: float) -> bool:
        is_known = name in self._known or id_of(name) in self._known
        return began_at > self._since and not is_known and FORGOTTEN not in name


def _entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def _names(handles: Collection[str]) -> frozenset[str]:
    """Return the names of these runs on the disk; before `=` a handle has its runner's place."""
    own = {part for handle in handles for part in (handle, handle.partition("=")[2]) if part}
    return frozenset(own) | {_shortened(each) for each in own}


def _shortened(handle: str) -> str:
    try:
        return run_name(handle)
    except ValueError:  # of a later start, which is not shortened
        return handle
