"""Backup of the database (the daemon may run) and restore (the daemon must be stopped).

SQLite's online backup makes a consistent copy of the database.  The integrity and the audit chain of every
copy are checked.  Playbook trees and logs of runs are plain files and not part of a backup.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rolloutd.audit.audit_chain import ChainVerification
from rolloutd.errors import StoreFailed
from rolloutd.store import audit_base
from rolloutd.store.backend import EPOCH_INCREMENT
from rolloutd.store.sqlite import commit_mark, database, files, lock
from rolloutd.store.sqlite.backend import SqliteBackend

PAGES_PER_STEP = 4096
"""Pages (16 MiB) copied per step; the daemon's commits do not wait for the steps."""

_WITHOUT_PLAIN_VALUES = """
UPDATE {table} SET connection = json_patch('{{"rolloutd_withheld": true}}', json_object(
    'provider_id', json_extract(connection, '$.provider_id'),
    'kubernetes_cluster', json_extract(connection, '$.kubernetes_cluster'),
    'kubernetes_node', json_extract(connection, '$.kubernetes_node')
)) WHERE EXISTS (SELECT 1 FROM json_each(connection) WHERE key NOT IN (
    'rolloutd_sealed', 'rolloutd_withheld', 'provider_id', 'kubernetes_cluster', 'kubernetes_node'
))
"""
"""What the migration to sealed variables does, for a copy of a database that no new daemon has opened."""


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """The result of a restore: audit report, path of the old database, new epoch, runs set aside."""

    verification: ChainVerification
    previous_database: Path | None
    epoch: int
    forgotten_runs: int


class SetAside(Protocol):
    """Sets runs aside that a copy does not know, and returns how many; after a kill it is called again."""

    def __call__(self, state_dir: Path, *, known: frozenset[str], since: float, epoch: int) -> int:
        """`known` are the handles of the copy's runs, `since` is the instant of its last audit entry."""


def backup(state_dir: Path, target: Path) -> ChainVerification:
    """Copy the database of a state directory to a file and return its audit report; a daemon may be running.

    A copy with a broken audit chain is kept, but replaces none.  Raises OSError, and StoreFailed when the
    source cannot be read, the copy is damaged, or the target is a file that a daemon uses.
    """
    _require_safe_target(state_dir, target)
    source = database.open_reader(_require_database(state_dir))
    with closing(source), files.temporary_database(target) as temporary:
        _copy_database(source, temporary)
        _remove_secrets(temporary)
        verification = SqliteBackend(temporary).verify_chain()
        if not verification.ok and target.exists():
            # It would take the place of the last copy that can be restored.
            raise StoreFailed(
                f"{target}: it stays, as the new copy's audit chain is broken ({verification.message});"
                " name another file"
            )
        files.move_into_place(temporary, target)
    return verification


def restore(state_dir: Path, backup_file: Path, set_aside: SetAside) -> RestoreResult:
    """Replace the database with a copy; the old one stays in the same directory under another name.

    Runs are set aside first, so that a daemon never finds the copy together with their results, and no daemon
    starts with either database before the end: a killed restore leaves a note, and another one finishes it.

    Raises OSError, AlreadyRunning while a daemon uses the directory, StoreFailed when the copy or its audit
    chain is damaged, or when the restore of another copy was killed.
    """
    if not backup_file.is_file():
        raise StoreFailed(
            f"{backup_file}: {'not a file' if backup_file.exists() else 'no such file'}; name a backup"
        )
    owner = files.find_owner(state_dir)
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    state_lock = lock.StateLock(state_dir)
    state_lock.take()
    try:
        target, previous = state_dir / database.FILE_NAME, None
        # Runs were set aside that another copy may know: its daemon would begin them again.
        if commit_mark.read_unfinished_restore(target) not in (None, str(backup_file.absolute())):
            raise commit_mark.explain_unfinished_restore(target)
        if backup_file.resolve() == target.resolve():
            # Another restore after a kill needs the WAL, which is removed before the rename.
            backup_file = previous = files.link_previous(target) or target
        source = _open_backup(backup_file)
        with closing(source), files.temporary_database(target) as temporary:
            _copy_database(source, temporary)
            verification = SqliteBackend(temporary).verify_chain()
            if not verification.ok:
                raise StoreFailed(
                    f"{backup_file}: its audit chain is broken ({verification.message}); name another backup"
                )
            mark = commit_mark.read_mark(target)
            epoch = _advance_epoch(temporary, _read_epoch(target), 0 if mark is None else mark[0])
            since, known = _read_end(temporary)
            _sign_base(temporary, SqliteBackend(target).load_signing_key())
            files.change_owner(temporary, owner)
            files.write_durably(unfinished := commit_mark.restore_path(target), f"{backup_file.absolute()}\n")
            files.change_owner(unfinished, owner)
            forgotten = set_aside(state_dir, known=known, since=since, epoch=epoch)
            previous = previous or files.link_previous(target)
            files.replace_database(temporary, target)
        # After the rename: a mark that is newer than the database would stop the next start.
        commit_mark.write_mark(target, epoch, verification.entries)
        files.change_owner(commit_mark.mark_path(target), owner)
        files.change_owner(state_dir / lock.FILE_NAME, owner)
        files.remove_durably(unfinished)
    finally:
        state_lock.close()
    return RestoreResult(verification, previous, epoch, forgotten)


def _require_safe_target(state_dir: Path, target: Path) -> None:
    """Refuse the live database as target: the daemon would continue to write to an unlinked file."""
    if target.is_dir():
        raise StoreFailed(f"{target}: it is a directory; name a file")
    if not target.absolute().parent.is_dir():
        raise StoreFailed(f"{target.absolute().parent}: no such directory; make it, or name another")
    own = [state_dir / f"{database.FILE_NAME}{suffix}" for suffix in database.FILE_SUFFIXES]
    resolved = target.absolute().resolve()
    if any(resolved == file.absolute().resolve() for file in (*own, state_dir / lock.FILE_NAME)):
        raise StoreFailed(f"{target}: the daemon itself uses it; name another file")


def _require_database(state_dir: Path) -> Path:
    path = state_dir / database.FILE_NAME
    if not path.is_file():
        raise StoreFailed(f"{path}: no such database; name the daemon's own settings with --config")
    return path


def _open_backup(backup_file: Path) -> sqlite3.Connection:
    """Open a copy; reword its errors, whose advice is for the database of a daemon."""
    try:
        return database.open_reader(backup_file)
    except StoreFailed as error:
        if error.__cause__ is None:
            raise
        text = (
            f"{backup_file}: not a valid backup ({error.__cause__}); nothing was changed, name another file"
        )
        raise StoreFailed(text) from error


def _copy_database(source: sqlite3.Connection, temporary: Path) -> None:
    """Copy with SQLite into a single file without a WAL; raises StoreFailed when the copy is damaged."""
    try:
        with closing(sqlite3.connect(temporary, isolation_level=None)) as target:
            source.backup(target, pages=PAGES_PER_STEP)
            # A copy in WAL mode is three files, and people would keep one of them.
            target.execute("PRAGMA journal_mode = DELETE")
            damage = database.find_damage(target)
    except database.DATABASE_ERRORS as error:
        raise database.explain_failure(error, temporary) from error
    if damage:
        raise StoreFailed(f"the copy is damaged, as its source must be: {damage}")


def _remove_secrets(temporary: Path) -> None:
    """Remove the nodes' variables that an older database has as plain texts."""
    try:
        with closing(sqlite3.connect(temporary, isolation_level=None)) as copy:
            copy.execute("BEGIN")
            tables = copy.execute("SELECT name FROM sqlite_schema WHERE name IN ('node', 'source_node')")
            for (table,) in tables.fetchall():
                copy.execute(_WITHOUT_PLAIN_VALUES.format(table=table))
            copy.execute("COMMIT")
            # Free pages of the copy still contain deleted rows with plain values; VACUUM removes these pages.
            copy.execute("VACUUM")
    except database.DATABASE_ERRORS as error:
        raise database.explain_failure(error, temporary) from error


def _read_epoch(path: Path) -> int | None:
    """Return the epoch of the database that is replaced, None when it cannot be read."""
    if not path.exists():
        return None
    try:
        with closing(database.open_reader(path)) as connection:
            return database.read_epoch(connection)
    except (StoreFailed, TypeError, *database.DATABASE_ERRORS):
        return None


def _advance_epoch(temporary: Path, newest: int | None, marked: int) -> int:
    with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
        current = database.read_epoch(connection)
        # The daemon adds one at its start, so the newest known epoch is high enough.
        epoch = max(current + EPOCH_INCREMENT if newest is None else max(current, newest), marked)
        database.write_epoch(connection, epoch)
    return epoch


def _read_end(temporary: Path) -> tuple[float, frozenset[str]]:
    """Return the instant of the last audit entry, and the handles of all runs."""
    handles: set[str] = set()
    with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
        last = connection.execute(
            "SELECT json_extract(entry, '$.at') FROM audit ORDER BY seq DESC LIMIT 1"
        ).fetchone()
        for table in ("step", "preparation"):
            # A copy of an older version may lack the table.
            with suppress(sqlite3.OperationalError):
                handles.update(handle for (handle,) in connection.execute(f"SELECT handle FROM {table}"))  # noqa: S608
    return (0.0 if last is None else float(last[0])), frozenset(handles)


def _sign_base(temporary: Path, key: bytes) -> None:
    """Sign the audit's base with this machine's key: who restores a copy trusts what it holds."""
    with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
        if database.has_current_schema(connection):
            audit_base.sign_again(connection, key)
