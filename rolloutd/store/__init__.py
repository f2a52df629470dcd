"""The store: one database, one writer task, an audit entry for every change.

No SQL exists above this package, and no rule inside it: machines/facts/apply.py says what an event means.
Only this file chooses the backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rolloutd.store.audit_checkpoint import read_audit_checkpoint
from rolloutd.store.audit_comparison import compare_with_audit
from rolloutd.store.queries import PlanCompiler
from rolloutd.store.sql_store import SqlStore, measure_volume
from rolloutd.store.sqlite.backend import SqliteBackend as DatabaseBackend
from rolloutd.store.sqlite.backup import backup, restore
from rolloutd.store.sqlite.database import FILE_NAME
from rolloutd.store.sqlite.lock import StateLock
from rolloutd.store.writer import CommitCallback

__all__ = [
    "FILE_NAME",
    "DatabaseBackend",
    "SqlStore",
    "StateLock",
    "backend_of",
    "backup",
    "compare_with_audit",
    "measure_volume",
    "open_store",
    "read_audit_checkpoint",
    "restore",
]


def backend_of(state_dir: Path, *, inline: bool = False) -> DatabaseBackend:
    return DatabaseBackend(state_dir / FILE_NAME, inline=inline)


async def open_store(
    state_dir: Path,
    *,
    compile_plan: PlanCompiler,
    on_commit: CommitCallback | None = None,
    read_only: bool = False,
    inline: bool = False,
    now: Callable[[], float] = time.time,
) -> SqlStore:
    """Open the store of a state directory, and begin a term unless `read_only`; raises StoreFailed.

    `compile_plan` compiles stored plans.  The event loop calls `on_commit`, which must not raise.  `inline`
    runs the SQL in the caller, for simulations.
    """
    backend = backend_of(state_dir, inline=inline)
    if read_only:
        return SqlStore(backend, await backend.open_reader(), compile_plan)
    return await SqlStore.open(backend, compile_plan, on_commit=on_commit, now=now)
