"""Ended runs that a restored database does not know."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.ports import id_of


def set_aside(runs_dir: Path, *, known: Collection[str], since: float, suffix: str) -> int:
    """Rename the runs that began after `since` (Unix time), have ended and have no handle in `known`.

    A run's name is its place in a rollout, so the restored daemon would give the same name again, and would
    take the old result for that of a run that it never began, also if the node was rolled back meanwhile.
    A run that has not ended keeps its name: the daemon finds it, because a node has one run at a time.
    Returns the number of runs.  Their output stays until the retention removes it.
    """
    forgotten = [
        directory
        for directory in (RunDirectory(path) for path in (runs_dir.iterdir() if runs_dir.is_dir() else ()))
        if (status := directory.read_status()) is not None
        and status.began_at > since
        and not {directory.path.name, id_of(directory.path.name)} & set(known)
    ]
    for directory in forgotten:
        directory.path.rename(directory.path.with_name(f"{directory.path.name}.{suffix}"))
    return len(forgotten)
