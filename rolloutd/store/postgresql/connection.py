"""A connection to PostgreSQL as the store uses one: DB-API's, with SQLite's placeholders.

A lost connection can be made again in place, so that what holds it need not know.  One thread uses it at a
time; interrupt() alone may be called from another.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.adapt import Dumper
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.types.numeric import IntLoader
from psycopg.types.string import TextLoader

from rolloutd.errors import StoreFailed
from rolloutd.ports import PostgresqlAddress

SCHEMA = "rolloutd"
"""Schema of the tables, so that the database may be shared."""

CONNECT_TIMEOUT_S = 3
"""For each host of the DSN: a host that is down must not cost the lease before the next is tried."""

UNANSWERED_MS = 5_000
"""After so long without an acknowledgement, the kernel gives the connection up: a third of the lease."""

STATEMENT_LIMIT_MS = 60_000
"""Longest statement: the retention's over years of rollouts takes seconds."""

LOCK_LIMIT_MS = 10_000
"""Longest wait for the term's row: what a lost connection still does is over before that, or never."""

STREAMED_ROWS = 1_000
"""Rows that are in memory at once: entries of 500 nodes have 100 KB."""

ERRORS: tuple[type[Exception], ...] = (psycopg.Error, UnicodeError)

_TOKEN = re.compile(
    r"'(?:[^']|'')*'|\"[^\"]*\"|\?(?P<number>\d+)?|(?<!:):(?P<name>[a-z_]+)|\b(?P<word>freeze|json_array)\b"
)

_WORDS = {"freeze": '"freeze"', "json_array": "json_build_array"}
"""Names that PostgreSQL reserves, or has for something else."""

_SYNC_WAIT_CANCELLED = "01000"
"""Warning of a COMMIT that is on the primary's disk, and may not be on the standby's."""


def boot_time_s() -> float:
    """Return seconds since the boot; unlike those of the monotonic clock, they pass in suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class Address:
    """An address that no settings name (ports.PostgresqlAddress)."""

    dsn: str
    password_file: Path | None = None
    lease_s: float = 15.0


class _TextDumper(Dumper):
    oid = psycopg.postgres.types["text"].oid

    def dump(self, obj: str) -> bytes:
        # PostgreSQL has no text with NUL, and outside text may contain one.
        return obj.replace("\0", "\N{REPLACEMENT CHARACTER}").encode()


class _FlagDumper(Dumper):
    oid = psycopg.postgres.types["int2"].oid

    def dump(self, obj: bool) -> bytes:
        return b"1" if obj else b"0"


@lru_cache(maxsize=4096)
def translate(statement: str) -> tuple[str, tuple[int | str, ...]]:
    """Return a statement of the store as PostgreSQL reads it, and which parameter each number stands for."""
    order: list[int | str] = []

    def replace(token: re.Match[str]) -> str:
        if (word := token["word"]) is not None:
            return _WORDS[word]
        if token[0][0] in "'\"":
            return token[0]
        if token["name"] is None and token["number"] is None:
            order.append(len(order))
            return f"${len(order)}"
        key: int | str = token["name"] or int(token["number"]) - 1
        if key not in order:
            order.append(key)
        return f"${order.index(key) + 1}"

    return _TOKEN.sub(replace, statement), tuple(order)


def connection_text(address: PostgresqlAddress) -> str:
    """Return the DSN with its password and our defaults; raises StoreFailed."""
    given: dict[str, Any] = conninfo_to_dict(address.dsn)
    defaults: dict[str, Any] = {
        # A DSN says otherwise for loopback; sockets of this machine have no TLS.
        "sslmode": "verify-full",
        "connect_timeout": CONNECT_TIMEOUT_S,
        "target_session_attrs": "read-write",
        "keepalives_idle": 2,
        "keepalives_interval": 1,
        "keepalives_count": 3,
        "tcp_user_timeout": UNANSWERED_MS,
        "application_name": f"rolloutd {os.uname().nodename} {os.getpid()}",
    }
    if address.password_file is not None:
        given["password"] = _read_password(address.password_file)
    return make_conninfo(**{**defaults, **given})


def _read_password(path: Path) -> str:
    try:
        return path.read_text("utf-8").removesuffix("\n")
    except (OSError, UnicodeError) as error:
        raise StoreFailed(f"{path}: the database's password cannot be read ({error}); check it") from error


class PostgresqlConnection:
    """One session (store.backend.Connection); `session` are the settings that it begins with."""

    IntegrityError = psycopg.IntegrityError

    def __init__(
        self,
        address: PostgresqlAddress,
        session: Mapping[str, str | int],
        *,
        schema: str = SCHEMA,
    ) -> None:
        """Connect; raises psycopg.Error, StoreFailed."""
        self._address = address
        self._session = {"search_path": schema, "client_encoding": "UTF8", "jit": "off", **session}
        self._on_connect: list[Callable[[PostgresqlConnection], object]] = []
        self.is_sync_wait_cancelled = False
        self._raw = self._connect()

    def _connect(self) -> psycopg.Connection[Any]:
        raw = psycopg.connect(
            connection_text(self._address), autocommit=True, cursor_factory=psycopg.RawCursor
        )
        try:
            raw.adapters.register_dumper(str, _TextDumper)
            raw.adapters.register_dumper(bool, _FlagDumper)
            raw.adapters.register_loader("json", TextLoader)
            raw.adapters.register_loader("numeric", IntLoader)
            raw.add_notice_handler(self._note_notice)
            settings = (
                sql.SQL("SET {} = {}").format(sql.Identifier(name), sql.Literal(value)).as_string()
                for name, value in self._session.items()
            )
            raw.execute("; ".join(settings))
        except BaseException:
            raw.close()
            raise
        return raw

    def _note_notice(self, notice: psycopg.errors.Diagnostic) -> None:
        # Its text may be in any language; a false alarm costs one read of the head.
        self.is_sync_wait_cancelled |= notice.sqlstate == _SYNC_WAIT_CANCELLED

    @property
    def raw(self) -> psycopg.Connection[Any]:
        return self._raw

    @property
    def is_lost(self) -> bool:
        return self._raw.closed

    @property
    def in_transaction(self) -> bool:
        status = self._raw.info.transaction_status
        return status in (TransactionStatus.INTRANS, TransactionStatus.INERROR, TransactionStatus.ACTIVE)

    def on_connect(self, prepare: Callable[[PostgresqlConnection], object]) -> None:
        """Prepare this session, and each that replaces it."""
        prepare(self)
        self._on_connect.append(prepare)

    def reconnect(self) -> None:
        """Begin another session; raises psycopg.Error, StoreFailed."""
        self._raw.close()
        self._raw = self._connect()
        for prepare in self._on_connect:
            prepare(self)

    def execute(self, statement: str, parameters: Any = (), /) -> psycopg.Cursor[Any]:
        text, order = translate(statement)
        # Without parameters, a text may have several statements.
        return self._raw.execute(text, [parameters[key] for key in order] or None)

    def executemany(self, statement: str, rows: Iterable[Any], /) -> psycopg.Cursor[Any]:
        text, order = translate(statement)
        cursor = self._raw.cursor()
        cursor.executemany(text, [[row[key] for key in order] for row in rows])
        return cursor

    def interrupt(self) -> None:
        """End the session from another thread: its server may never answer."""
        with suppress(OSError, psycopg.Error):
            duplicate = socket.socket(fileno=os.dup(self._raw.fileno()))
            try:
                duplicate.shutdown(socket.SHUT_RDWR)
            finally:
                duplicate.close()

    def close(self) -> None:
        self._raw.close()


def stream(connection: PostgresqlConnection, statement: str) -> Generator[Any, None, None]:
    """Yield rows as the server sends them, in a transaction that is open."""
    with psycopg.ServerCursor(connection.raw, f"rolloutd_{os.urandom(4).hex()}") as cursor:
        cursor.itersize = STREAMED_ROWS
        cursor.execute(translate(statement)[0])
        yield from cursor
