"""The store: one database, one writer task, an audit entry for every change.

No SQL exists above this package, and no rule inside it: machines/facts/apply.py says what an event means.
Only this file chooses the backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rolloutd.ports import Leadership, PostgresqlAddress
from rolloutd.store.audit_checkpoint import read_audit_checkpoint as read_audit_checkpoint
from rolloutd.store.audit_comparison import compare_with_audit as compare_with_audit
from rolloutd.store.backend import Backend as Backend
from rolloutd.store.move import MoveResult as MoveResult
from rolloutd.store.move import move_store as move_store
from rolloutd.store.queries import PlanCompiler
from rolloutd.store.sqlite.backend import SqliteBackend as SqliteBackend
from rolloutd.store.sqlite.backup import backup as backup
from rolloutd.store.sqlite.backup import restore as restore
from rolloutd.store.sqlite.database import FILE_NAME as FILE_NAME
from rolloutd.store.sqlite.lock import StateLock as StateLock
from rolloutd.store.store import Store as Store
from rolloutd.store.store import measure_volume as measure_volume
from rolloutd.store.writer import CommitCallback


def backend_of(
    state_dir: Path,
    postgresql: PostgresqlAddress | None = None,
    *,
    redaction_key_file: Path | None = None,
    inline: bool = False,
) -> Backend:
    """Return the database of a daemon: PostgreSQL's if there is one, else the file in the state directory.

    PostgreSQL's checkpoint is signed with the redaction key, by default that of the state directory.
    """
    if postgresql is None:
        return SqliteBackend(state_dir / FILE_NAME, inline=inline)
    # Imported only where the settings name it: the driver takes 60 ms, and a third of the memory of SQLite's.
    from rolloutd.store.postgresql.backend import PostgresqlBackend

    return PostgresqlBackend(postgresql, state_dir, redaction_key_file=redaction_key_file, inline=inline)


def leadership_of(state_dir: Path, postgresql: PostgresqlAddress | None, *, name: str) -> Leadership:
    """Return how the daemon of a state directory comes to lead; only with PostgreSQL does it wait."""
    if postgresql is None:
        return StateLock(state_dir)
    from rolloutd.store.postgresql.lease import PostgresqlLease

    return PostgresqlLease(postgresql, state_dir, name=name)


def prepare_postgresql(dsn: str, password_file: Path | None, role: str) -> str:
    """Make or migrate the tables as their owner for the daemon's role; return what was done.

    Raises StoreFailed.
    """
    from rolloutd.store.postgresql.connection import Address
    from rolloutd.store.postgresql.tables import prepare

    return prepare(Address(dsn, password_file), role)


def examine_postgresql(address: PostgresqlAddress) -> Iterator[tuple[str, bool, str]]:
    """Yield what a database's server, role and replication are: subject, whether it is right, text.

    Raises StoreFailed.
    """
    from rolloutd.store.postgresql.examination import examine

    yield from examine(address)


async def open_store(
    state_dir: Path,
    postgresql: PostgresqlAddress | None = None,
    *,
    compile_plan: PlanCompiler,
    on_commit: CommitCallback | None = None,
    read_only: bool = False,
    redaction_key_file: Path | None = None,
    inline: bool = False,
    now: Callable[[], float] = time.time,
    name: str = "",
) -> Store:
    """Open the store of a daemon, and begin a term unless `read_only`; raises StoreFailed.

    `name` is that of the daemon for people; default: the machine's.

    `compile_plan` compiles stored plans.  The event loop calls `on_commit`, which must not raise.  `inline`
    runs the SQL in the caller, for simulations.
    """
    backend = backend_of(state_dir, postgresql, redaction_key_file=redaction_key_file, inline=inline)
    if read_only:
        return Store(backend, await backend.open_reader(), compile_plan)
    return await Store.open(backend, compile_plan, on_commit=on_commit, now=now, name=name)
