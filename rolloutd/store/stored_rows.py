"""The rows of a database: read, written as events say, and settled.

What an event does to rows is in machines/facts/apply.py, their columns and statements in schema.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any, TypeVar, cast

from machines.facts.apply import UnexpectedRow, writes
from machines.model.events import Event, MismatchSettled
from machines.model.rollout import Verdict
from machines.model.rows import Delete, Expected, RolloutRecords, UsedToken, Write
from rolloutd.errors import Conflict, StoreFailed, TokenAlreadyUsed
from rolloutd.ports import DiscoveredNode, SourceAnswer
from rolloutd.store.backend import Connection
from rolloutd.store.schema import HASHED_COLUMNS, KEYS, ROLLOUT_TABLES, TABLES

R = TypeVar("R")

ROWS_AT_ONCE = 1_000
"""Rows of which the columns are in memory at once: more save no time."""


class StoredRows:
    """The rows of a database, for the events that change them."""

    def __init__(self, connection: Connection) -> None:
        self._execute = connection.execute

    def get(self, kind: type[R], *key: Any) -> R | None:
        table = TABLES[kind]
        found = self._execute(table.select_one, key).fetchone()
        return None if found is None else cast(R, next(table.decode((found,))))

    def verdicts_on(self, node: str) -> Iterable[Verdict]:
        return self.load(Verdict, "node = ? AND cleared_at IS NULL", node)

    def load(self, kind: type[R], where: str, *values: Any) -> tuple[R, ...]:
        table = TABLES[kind]
        found = iter(self._execute(f"{table.select} WHERE {where}", values))
        parts = iter(lambda: tuple(islice(found, ROWS_AT_ONCE)), ())
        return tuple(chain.from_iterable(map(table.decode, parts)))


def write_events(connection: Connection, events: Iterable[Event], at: float) -> None:
    """Write what events do; raises Conflict, StoreFailed."""
    rows = StoredRows(connection)
    for event in events:
        try:
            if isinstance(event, MismatchSettled):
                settle_row(connection, event)
            else:
                execute_writes(connection, writes(event, rows, at))
        except UnexpectedRow as error:
            raise Conflict(str(error)) from error
        except UnicodeError:
            raise  # a damaged file: see Backend.errors
        except (LookupError, TypeError, ValueError) as error:
            raise make_unstorable_error(error) from error


def make_unstorable_error(error: Exception) -> StoreFailed:
    return StoreFailed(
        f"database: the event cannot be stored ({error}); nothing was written, report this as a bug"
    )


def execute_writes(connection: Connection, changes: Iterable[Write | Delete]) -> None:
    """Write rows; raises Conflict when one is not as it is expected."""
    one_row_each: list[Write | Delete] = []
    for change in changes:
        if isinstance(change.row, RolloutRecords):
            _delete_records(connection, change.row)
        else:
            one_row_each.append(change)
    # Equal statements in sequence run as one: a submit writes thousands of targets.
    for sql, group in groupby(map(_statement, one_row_each), key=itemgetter(0)):
        while part := [*islice(group, ROWS_AT_ONCE)]:
            _execute_equal(connection, sql, [values for _, values, _ in part], part[0][2])


def _execute_equal(
    connection: Connection, sql: str, rows: Sequence[list[Any]], write: Write | Delete
) -> None:
    """Execute a statement for each row; `write` is the first one."""
    problem = ""
    try:
        changed = execute_rows(connection, sql, rows)
        if isinstance(write, Delete) or changed == len(rows):
            return
    except connection.IntegrityError as error:
        problem = f" ({error})"
    found = "there already" if getattr(write, "expected", None) is Expected.ABSENT else "not as expected"
    row = f"{TABLES[type(write.row)].name} {'/'.join(map(str, rows[0][:2]))}"
    raise (TokenAlreadyUsed if isinstance(write.row, UsedToken) else Conflict)(f"{row} is {found}{problem}")


def _delete_records(connection: Connection, records: RolloutRecords) -> None:
    """Remove rows of a rollout; a table comes before those that it refers to."""
    for node in records.nodes:
        for table in ("step", "failure", "preparation", "target"):
            sql = f"DELETE FROM {table} WHERE rollout = ? AND node = ?"  # noqa: S608  # names of our own schema
            connection.execute(sql, (records.rollout, node))
    if not records.nodes:
        connection.execute("DELETE FROM forecast WHERE rollout = ?", (records.rollout,))
        for table in reversed(list(KEYS)):
            if table in ROLLOUT_TABLES or table == "step":
                connection.execute(f"DELETE FROM {table} WHERE rollout = ?", (records.rollout,))  # noqa: S608
        connection.execute("DELETE FROM rollout WHERE id = ?", (records.rollout,))


def _statement(write: Write | Delete) -> tuple[str, list[Any], Write | Delete]:
    """Return the statement of a write, which must change one row."""
    table = TABLES[type(write.row)]
    if isinstance(write, Delete):
        return table.delete, table.key_of(write.row, write.owner), write
    values = table.encode(write.row, write.owner)
    match write.expected:
        case Expected.ABSENT:
            return table.insert, values, write
        case Expected.PRESENT:
            return table.update, values, write
        case Expected.ANY:
            return table.upsert, values, write


def write_source_answer(connection: Connection, answer: SourceAnswer, removed: Iterable[str]) -> None:
    """Write the new and changed nodes of a source's answer, and drop the `removed` ones."""
    nodes = TABLES[DiscoveredNode]
    execute_rows(connection, TABLES[SourceAnswer].upsert, [TABLES[SourceAnswer].encode(answer)])
    changed = (replace(node, source=answer.source) for node in answer.nodes)
    execute_rows(connection, nodes.upsert, [nodes.encode(node) for node in changed])
    execute_rows(connection, nodes.delete, [(answer.source, name) for name in removed])


def execute_rows(connection: Connection, sql: str, rows: Sequence[Sequence[Any]]) -> int:
    """Execute one statement for each row and return how many rows changed."""
    try:
        if len(rows) == 1:
            return connection.execute(sql, rows[0]).rowcount
        return connection.executemany(sql, rows).rowcount
    except UnicodeEncodeError:
        # Outside text may contain a lone surrogate, which UTF-8 cannot encode: replace only that.
        return connection.executemany(
            sql, [[replace_surrogates(value) for value in row] for row in rows]
        ).rowcount


def replace_surrogates(value: Any) -> Any:
    """Return a text without what UTF-8 cannot encode; other values as they are."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def settle_row(connection: Connection, event: MismatchSettled, *, hashed: bool = False) -> None:
    """Restore a row to the values in the event; raises Conflict if the database refuses them.

    `hashed` writes hashed columns too: a replay keeps their hashes, a real row keeps its values.
    """
    table, row = event.table, event.row
    keys = {name: event.key[name] for name in KEYS[table]}
    where = " AND ".join(f"{name} {'IS NULL' if value is None else '= ?'}" for name, value in keys.items())
    values = [value for value in keys.values() if value is not None]
    if row is None:
        connection.execute(f"DELETE FROM {table} WHERE {where}", values)  # noqa: S608
        return
    names = [name for name in row if hashed or (table, name) not in HASHED_COLUMNS]
    update = f"UPDATE {table} SET {', '.join(f'{name} = ?' for name in names)} WHERE {where}"  # noqa: S608
    if connection.execute(update, (*(row[name] for name in names), *values)).rowcount == 1:
        return
    insert = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"  # noqa: S608
    try:
        connection.execute(insert, tuple(row.values()))
    except connection.IntegrityError as error:
        raise Conflict(f"{event.subject}: the row cannot be restored; restore a backup") from error
