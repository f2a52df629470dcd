"""The backend on one PostgreSQL database.

The audit's comparison copies one snapshot to a temporary SQLite file, which compares it as it does its own.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from psycopg.conninfo import conninfo_to_dict

from rolloutd.audit import audit_chain
from rolloutd.audit.audit_chain import GENESIS_HASH, ChainVerification
from rolloutd.concurrency import threads
from rolloutd.errors import FactsBehind, LeadershipLost, StoreFailed
from rolloutd.ports import AuditBase, AuditEntry, PostgresqlAddress
from rolloutd.store import backend, transfer
from rolloutd.store.audit_base import load_base, sign_again
from rolloutd.store.postgresql import copy, tables
from rolloutd.store.postgresql.commit_mark import CommitMark
from rolloutd.store.postgresql.connection import (
    ERRORS,
    LOCK_LIMIT_MS,
    STATEMENT_LIMIT_MS,
    PostgresqlConnection,
    boot_time_s,
    stream,
)
from rolloutd.store.signing_key import derive_signing_key
from rolloutd.store.sqlite import copy as sqlite

T = TypeVar("T")

RETRY_S = 0.2
"""Pause between two tries to reach the database again."""

_FAILURES: tuple[type[Exception], ...] = (*ERRORS, StoreFailed)

READ_LIMIT_S = 90.0
"""Longest read: more than the server's own limit for a statement."""

_CHAIN = (
    "SELECT seq, convert_to(entry, 'UTF8'), convert_to(hash, 'UTF8') FROM audit WHERE seq > {} ORDER BY seq"
)

# A promotion begins a timeline: its terms outrank each one that the old primary may have granted.
_NEXT_EPOCH = (
    "greatest(epoch + 1, ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::bigint << 32)"
)


class PostgresqlBackend:
    """One PostgreSQL database (store.backend.Backend); `inline` runs the SQL in the caller."""

    errors = ERRORS
    # The lock makes a takeover wait for this commit, and this commit for what a lost connection still does.
    begin_write = "BEGIN ISOLATION LEVEL READ COMMITTED; SELECT epoch FROM term FOR UPDATE"
    next_epoch = _NEXT_EPOCH

    def __init__(
        self,
        address: PostgresqlAddress,
        state_dir: Path,
        *,
        redaction_key_file: Path | None = None,
        inline: bool = False,
    ) -> None:
        self._address = address
        self._redaction_key_file = redaction_key_file
        self._state_dir = state_dir
        self._inline = inline
        self._mark = CommitMark(state_dir)
        self._away_since: float | None = None
        self.name = describe(address)

    def explain(self, error: Exception) -> StoreFailed:
        return StoreFailed(f"{_advise(error, self.name)} (PostgreSQL says: {str(error).strip()})")

    # -- connections

    async def open_writer(self) -> backend.Executor:
        return await self._open(self._connect_writer, repeats=False)

    async def open_reader(self) -> backend.Executor:
        return await self._open(self.connect_reader, repeats=True)

    async def _open(self, connect: Callable[[], PostgresqlConnection], *, repeats: bool) -> backend.Executor:
        if self._inline:
            return backend.InlineExecutor(self._explained(connect))
        is_abandoned = threading.Event()

        def connect_unless_abandoned() -> PostgresqlConnection:
            connection = self._explained(connect)
            if is_abandoned.is_set():  # the loop may have ended
                connection.close()
            return connection

        connecting = asyncio.ensure_future(threads.DATABASE.run(connect_unless_abandoned))
        try:
            connection = await asyncio.shield(connecting)
        except asyncio.CancelledError:
            is_abandoned.set()
            connecting.add_done_callback(_close_unused)
            raise
        # A commit may wait for a standby, and for a database that is away, as long as this daemon leads.
        limit_s = READ_LIMIT_S if repeats else self._address.lease_s
        return SessionThread(connection, limit_s, repeats=repeats)

    def _explained(self, connect: Callable[[], PostgresqlConnection]) -> PostgresqlConnection:
        try:
            return connect()
        except self.errors as error:
            raise self.explain(error) from error

    def _connect_writer(self) -> PostgresqlConnection:
        connection = PostgresqlConnection(
            self._address,
            {
                "statement_timeout": STATEMENT_LIMIT_MS,
                "lock_timeout": LOCK_LIMIT_MS,
                # A daemon that stands still inside a transaction holds the term's row; its successor waits.
                "idle_in_transaction_session_timeout": int(self._address.lease_s * 500),
            },
        )
        try:
            self._require_usable(connection)
            self._mark.require_newest(connection, self.name)
        except BaseException:
            connection.close()
            raise
        return connection

    def connect_reader(self) -> PostgresqlConnection:
        """Open a session whose transactions only read, each one moment; raises StoreFailed, errors."""
        connection = PostgresqlConnection(
            self._address,
            {
                "default_transaction_isolation": "repeatable read",
                "default_transaction_read_only": "on",
                "statement_timeout": STATEMENT_LIMIT_MS,
            },
        )
        try:
            tables.require_current(connection, self.name)
        except BaseException:
            connection.close()
            raise
        return connection

    def _require_usable(self, connection: PostgresqlConnection) -> None:
        tables.require_current(connection, self.name)
        tables.require_original(connection, self.name)
        transfer.require_startable(connection, self.name)

    def load_signing_key(self, *, may_make: bool = True) -> bytes:
        # One for all daemons of the store, so that a takeover starts from the last leader's checkpoint.
        return derive_signing_key(self._state_dir, self._redaction_key_file, may_make=may_make)

    def read_now(self, work: Callable[[backend.Connection], T]) -> T:
        try:
            with closing(self.connect_reader()) as connection:
                return work(connection)
        except self.errors as error:
            raise self.explain(error) from error

    # -- commits

    def check_writable(self, connection: backend.Connection) -> None:
        session = cast(PostgresqlConnection, connection)
        session.is_sync_wait_cancelled = False
        if session.is_lost:
            try:
                self._reconnect(session)
            except self.errors as error:
                raise self.explain(error) from error

    def is_in_doubt(self, connection: backend.Connection) -> bool:
        session = cast(PostgresqlConnection, connection)
        return session.is_lost or session.is_sync_wait_cancelled

    def await_database(self, connection: backend.Connection) -> None:
        session = cast(PostgresqlConnection, connection)
        if self._away_since is None:
            self._away_since = boot_time_s()
        else:
            time.sleep(RETRY_S)
        session.is_sync_wait_cancelled = False
        while boot_time_s() - self._away_since <= self._address.lease_s:
            if not session.is_lost:
                return
            try:
                self._reconnect(session)
            except LeadershipLost:
                raise  # a server that lacks what was acknowledged never has it again
            except _FAILURES:
                time.sleep(RETRY_S)
        raise FactsBehind(
            f"{self.name}: it went away during a commit, and for longer than the lease; the daemon ends, its"
            " next start reads what was written"
        )

    def _reconnect(self, session: PostgresqlConnection) -> None:
        session.reconnect()
        try:
            self._require_usable(session)
            # Before anything is written: a promoted standby server may lack what was acknowledged.
            self._mark.require_newest(session, self.name)
        except BaseException:
            session.close()  # else the next commit would find a session, and write
            raise

    def record_commit(self, epoch: int, head: AuditEntry) -> None:
        self._away_since = None
        self._mark.write(epoch, head)

    def append_entries(self, connection: backend.Connection, entries: Sequence[AuditEntry]) -> None:
        rows = [copy.audit_row(entry.seq, entry.text, entry.hash) for entry in entries]
        if rows:
            connection.executemany(_APPEND, rows)

    def follow_rows(
        self, connection: backend.Connection, columns: Mapping[str, Sequence[str]]
    ) -> backend.RowChanges:
        # The triggers have the columns already: `prepare` made them for this version.
        return tables.PostgresqlRowChanges(cast(PostgresqlConnection, connection))

    def release_space(self, connection: backend.Connection) -> None:
        """Do nothing: PostgreSQL's own vacuum does it."""

    def file_sizes(self, connection: backend.Connection) -> tuple[int, int]:
        sql = (
            "SELECT coalesce(sum(pg_total_relation_size(oid)), 0) FROM pg_class"
            " WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace"
        )
        return connection.execute(sql).fetchone()[0], 0

    # -- the audit

    def read_chain(
        self, connection: backend.Connection, table: str, after: int, limit: int
    ) -> Sequence[backend.ChainRow]:
        return sqlite.read_chain(connection, table, after, limit)

    def verify_chain(self, head: str | None = None) -> ChainVerification:
        try:
            with closing(self.connect_reader()) as connection, copy.snapshot(connection):
                base = load_base(connection)
                start = (base.seq, base.head)
                with closing(stream(connection, _CHAIN.format(base.seq))) as entries:
                    return audit_chain.verify_entries(entries, head, unreadable=self.errors, start=start)
        except self.errors as error:
            return ChainVerification(False, 0, GENESIS_HASH, None, f"{self.name}: not readable: {error}")

    def read_base(self) -> AuditBase:
        return self.read_now(load_base)

    def read_hashes(self, numbers: Iterable[int]) -> dict[int, str]:
        sql = "SELECT seq, hash FROM audit WHERE seq = ?"
        return self.read_now(
            lambda connection: dict(row for seq in numbers for row in connection.execute(sql, (seq,)))
        )

    @contextmanager
    def open_comparison(
        self, audited: Callable[[str, str], str], *, is_resumable: bool = False
    ) -> Iterator[backend.Connection | None]:
        with tempfile.TemporaryDirectory(prefix=".comparison.", dir=self._state_dir) as directory:
            path = Path(directory) / "stored"
            with copy.exported(self.connect_reader) as found:
                sqlite.write_tables(path, found)
            with sqlite.open_comparison(path, audited, None) as comparison:
                yield sqlite.WithoutNul(comparison)

    def exported(self) -> AbstractContextManager[Iterator[backend.TableRows]]:
        return copy.exported(self.connect_reader)

    def import_tables(self, found: Iterable[backend.TableRows]) -> None:
        with self._owned() as connection:
            copy.write_tables(connection, found)
            sign_again(connection, self.load_signing_key())
            transfer.write_refusal(connection, transfer.UNFINISHED)

    def write_refusal(self, text: str) -> None:
        with self._owned() as connection:
            transfer.write_refusal(connection, text)

    @contextmanager
    def _owned(self) -> Iterator[PostgresqlConnection]:
        """Begin a transaction that commits at the end, in a session of its own; raises StoreFailed."""
        try:
            with closing(PostgresqlConnection(self._address, {})) as connection:
                tables.require_current(connection, self.name)
                connection.execute(self.begin_write)
                yield connection
                connection.execute("COMMIT")
        except self.errors as error:
            raise self.explain(error) from error

    def examine(self) -> backend.Examination:
        try:
            with closing(PostgresqlConnection(self._address, {})) as connection:
                version = tables.read_version(connection)
                if version is None:
                    raise StoreFailed(f"{self.name}: it is not prepared; run `{tables.PREPARE}`")
                server = connection.raw.info.parameter_status("server_version")
                text = f"{self.name}, PostgreSQL {server}, schema {version}"
                return backend.Examination(text, is_current=version == tables.latest_version())
        except self.errors as error:
            raise self.explain(error) from error


_APPEND = transfer.insert_statement("audit", copy.AUDIT_COLUMNS)


class SessionThread:
    """A session and its thread (store.backend.Executor); work over the limit loses its session.

    With `repeats`, work that loses its session is done once more on a new one; it may only read.
    """

    def __init__(self, connection: PostgresqlConnection, limit_s: float, *, repeats: bool) -> None:
        self._connection = connection
        self._limit_s = limit_s
        self._repeats = repeats
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="postgresql")

    async def run(self, work: Callable[[PostgresqlConnection], T]) -> T:
        if self._is_closed:
            raise StoreFailed("the store is closed: start the daemon again")
        loop = asyncio.get_running_loop()
        # A cancelled caller must not stop the work, also if it has not begun.
        return await asyncio.shield(loop.run_in_executor(self._thread, self._work, loop, work))

    def _work(self, loop: asyncio.AbstractEventLoop, work: Callable[[PostgresqlConnection], T]) -> T:
        # A server that stands still acknowledges, and answers never.
        timer: list[asyncio.TimerHandle] = []
        loop.call_soon_threadsafe(
            lambda: timer.append(loop.call_later(self._limit_s, self._connection.interrupt))
        )
        try:
            return self._do(work)
        finally:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lambda: timer[0].cancel())

    def _do(self, work: Callable[[PostgresqlConnection], T]) -> T:
        if not self._repeats:
            return work(self._connection)
        if self._connection.is_lost:
            self._connection.reconnect()
        try:
            return work(self._connection)
        except ERRORS:
            if not self._connection.is_lost:
                raise
            self._connection.reconnect()
            return work(self._connection)

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await asyncio.get_running_loop().run_in_executor(self._thread, self._connection.close)
            self._thread.shutdown()


def _close_unused(connecting: asyncio.Future[PostgresqlConnection]) -> None:
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()


def describe(address: PostgresqlAddress) -> str:
    """Return the database as messages name it, without anything of its password."""
    given: dict[str, Any] = conninfo_to_dict(address.dsn)
    host = given.get("host") or "the local socket"
    return f"database {given.get('dbname') or given.get('user') or ''} on {host}"


def _advise(error: Exception, name: str) -> str:
    state = getattr(error, "sqlstate", None) or ""
    match state[:2]:
        case "08" | "57" | "":
            return f"nothing was written: {name} does not answer; the daemon resumes when it does"
        case "28":
            return f"{name}: it refuses the role; check `store.postgresql` and pg_hba.conf"
        case "53":
            return f"nothing was written: {name} has no more space or connections; see its log"
        case "25":
            return f"nothing was written: {name} is read-only; name its primary first"
        case "42" | "3D":
            return f"{name}: it is not prepared, or lacks rights; run `{tables.PREPARE}`"
        case "40" | "55":
            return f"nothing was written: another session keeps {name} locked; see pg_stat_activity"
    return f"nothing was written: {name} could not take it"
