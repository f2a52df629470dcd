"""All rows of a store, in and out of PostgreSQL."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Final

from rolloutd.errors import StoreFailed
from rolloutd.store.backend import Row, TableRows
from rolloutd.store.postgresql.connection import PostgresqlConnection, stream, translate
from rolloutd.store.stored_rows import replace_surrogates
from rolloutd.store.transfer import NUMBERED, TABLES, UNFINISHED, read_refusal, read_tables

AUDIT_COLUMNS: Final = ("seq", "entry", "hash", "at", "actor", "event", "rollout", "node")


def audit_row(seq: int, text: str, entry_hash: str) -> tuple[Any, ...]:
    """Return the columns of an entry; those of the text are for queries, and a trigger compares them."""
    entry = json.loads(text)
    names = (entry["actor"]["name"], entry["event"], entry["rollout"], entry["node"])
    return seq, text, entry_hash, entry["at"], *(each and replace_surrogates(each) for each in names)


@contextmanager
def snapshot(connection: PostgresqlConnection) -> Iterator[None]:
    """See one moment; reading all of a large audit takes longer than one statement may."""
    connection.execute("SET statement_timeout = 0")
    connection.execute("BEGIN")
    try:
        yield
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@contextmanager
def exported(connect: Callable[[], PostgresqlConnection]) -> Iterator[Iterator[TableRows]]:
    """Yield all tables as of one moment."""
    with closing(connect()) as connection, snapshot(connection), ExitStack() as streams:

        def open_stream(statement: str) -> Iterator[Any]:
            # Closed with its session, also where its reader has stopped before the end.
            return streams.enter_context(closing(stream(connection, statement)))

        yield read_tables(connection, open_stream)


def write_tables(connection: PostgresqlConnection, tables: Iterable[TableRows]) -> None:
    """Fill the tables, in the transaction that is open; raises StoreFailed, psycopg.Error.

    What an unfinished move left is replaced; of the audit, where no one may do that, the rest is appended.
    """
    last = connection.execute("SELECT seq, hash FROM audit ORDER BY seq DESC LIMIT 1").fetchone() or (0, "")
    if last[0] and read_refusal(connection) != UNFINISHED:
        raise StoreFailed("database: it holds a store already; prepare another one")
    connection.execute("SET LOCAL statement_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = 0")
    for table in (*reversed(TABLES), "audit_checkpoint"):
        if table not in ("audit", "term"):
            connection.execute(f"DELETE FROM {table}")  # noqa: S608  # names of our own schema
    for each in tables:
        if each.table == "term":
            for row in each.rows:
                _write_term(connection, dict(zip(each.columns, row, strict=True)))
        elif each.table == "audit":
            _copy(connection, "audit", AUDIT_COLUMNS, _rest_of_audit(each.rows, *last))
        else:
            _copy(connection, each.table, each.columns, each.rows)
    for table in NUMBERED:
        connection.execute(
            f"SELECT setval(pg_get_serial_sequence('{table}', 'number'), max(number)) FROM {table}"  # noqa: S608
            " HAVING max(number) IS NOT NULL"
        )


def _rest_of_audit(rows: Iterable[Row], seq: int, entry_hash: str) -> Iterator[Row]:
    for row in rows:
        if row[0] > seq:
            yield audit_row(*row)
        elif row[0] == seq and row[2] != entry_hash:
            raise StoreFailed("database: it holds another store's audit; prepare another one")


def _copy(
    connection: PostgresqlConnection, table: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]
) -> None:
    statement = translate(f"COPY {table} ({', '.join(columns)}) FROM STDIN")[0]
    with connection.raw.cursor() as cursor, cursor.copy(statement) as copy:
        for row in rows:
            copy.write_row(list(row))


def _write_term(connection: PostgresqlConnection, term: dict[str, Any]) -> None:
    # The daemon's role may change this row, and no more; this database may have granted later epochs.
    connection.execute(
        "UPDATE term SET epoch = greatest(epoch, ?), holder = ?, since = ?",
        (term["epoch"], term["holder"], term["since"]),
    )
