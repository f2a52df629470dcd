"""Digests of the tables, kept by the writer: each is a sum of keyed hashes over rows.

The sum over the steps of a node is a column of its target, that over the rows of a rollout a column of the
rollout, and those of the other tables are in the checkpoint.  So what is compared at a start does not grow
with the history: the rollouts, the rows of live ones, the steps of nodes in flight, and the other tables.

A sum follows each row that this connection changes, by triggers that no other connection has: a row that
another program alters makes the sum wrong.  A sum of another generation counts as unknown; the next change
in its scope computes it from the rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final

from rolloutd.store.backend import Connection
from rolloutd.store.schema import KEYS, NOT_COMPARED_COLUMNS, ROLLOUT_TABLES

WHOLE_TABLES: Final = tuple(name for name in KEYS if name not in (*ROLLOUT_TABLES, "step"))
"""Tables with one sum each."""

SUM_COLUMNS: Final[Mapping[str, str]] = {"rollout": "rows_digest", "target": "steps_digest"}
"""Columns that hold the sum of other rows, so that the sum over this row covers those too."""

UNFINISHED = "(phase NOT IN ('pending', 'done') OR isolated OR order_kind IS NOT NULL)"
"""Targets that a driver continues after a start; the condition of an index."""

_MODULUS = 1 << 256

_FUNCTION = "note_row"

_Scope = tuple[str, str, str]
"""Table, rollout and node of a sum; the strings that it has none of are empty."""


class RowDigests:
    """The sums of one database, and the changes of the transaction that is open."""

    def __init__(self, connection: Connection, key: bytes) -> None:
        self._connection = connection
        self._key = key
        self._columns = {table: _digested_columns(connection, table) for table in KEYS}
        self._changes: list[tuple[_Scope, int]] = []
        self._opened: set[str] = set()
        """Rollouts that this transaction inserts: no row of theirs is older."""

    # -- what has changed

    def follow_changes(self) -> None:
        """Let each row that this connection writes change its sum."""
        self._connection.create_function(_FUNCTION, 5, self._note)
        for table, columns in self._columns.items():
            for event, old, new in (("INSERT", 0, 1), ("UPDATE", 1, 1), ("DELETE", 1, 0)):
                opened = "new.id" if (table, event) == ("rollout", "INSERT") else "''"
                calls = [self._call(table, "old", -1, columns, opened)] * old
                calls += [self._call(table, "new", 1, columns, opened)] * new
                self._connection.execute(
                    f"CREATE TEMP TRIGGER digest_{table}_{event} AFTER {event} ON main.{table}"
                    f" BEGIN {' '.join(calls)} END"
                )

    def mark(self) -> int:
        """Return the present position in the changes, for forget_since()."""
        return len(self._changes)

    def forget_since(self, mark: int) -> None:
        """Forget changes that a savepoint took back."""
        del self._changes[mark:]

    def settle(self, generation: str) -> tuple[dict[str, int], set[str]]:
        """Write the sums of the rows that have changed; return those of whole tables, and the rollouts."""
        self._settle_steps(generation)
        rollouts = self._settle_rollouts(generation)
        totals: dict[str, int] = {}
        for (table, rollout, _), change in self._changes:
            assert not rollout, "steps and rows of rollouts are settled"
            totals[table] = totals.get(table, 0) + change
        self.forget_since(0)
        self._opened.clear()
        return totals, rollouts

    def forget(self) -> None:
        """Forget all changes: the transaction was rolled back, or nobody trusts the sums."""
        self.forget_since(0)
        self._opened.clear()

    # -- sums over rows

    def sum_of_table(self, table: str) -> int:
        return self._sum(table, "true", ())

    def sum_of_rollout(self, rollout: str) -> int:
        return sum(self._sum(table, "rollout = ?", (rollout,)) for table in ROLLOUT_TABLES) % _MODULUS

    def sum_of_steps(self, rollout: str, node: str) -> int:
        return self._sum("step", "rollout = ? AND node = ?", (rollout, node))

    def record_live(self, generation: str, rollouts: Iterable[str], *, only_unknown: bool = False) -> None:
        """Compute the sums of rollouts, and of the steps of their unfinished targets, from the rows."""
        for rollout in rollouts:
            if only_unknown and self._rollout_sum(generation, rollout) is not None:
                continue
            for node in self._unfinished(rollout):
                self._write_steps_sum(generation, rollout, node, self.sum_of_steps(rollout, node))
            self._write_rollout_sum(generation, rollout, self.sum_of_rollout(rollout))

    def find_difference(self, generation: str, rollouts: Iterable[str]) -> str:
        """Return what of these rollouts differs from its sum, the empty string for nothing."""
        for rollout in rollouts:
            # A rollout whose rows were removed with it has neither, and the sum over rollouts shows it.
            stored = self._rollout_sum(generation, rollout)
            if stored != self.sum_of_rollout(rollout) and self._has(rollout):
                return f"rows of rollout {rollout}"
            for node in self._unfinished(rollout):
                # Without a sum of this generation, the target has had no step in it.
                if (self._steps_sum(generation, rollout, node) or 0) != self.sum_of_steps(rollout, node):
                    return f"steps of {node} in rollout {rollout}"
        return ""

    def _sum(self, table: str, where: str, values: tuple[str, ...]) -> int:
        sql = f"SELECT {_as_text(self._columns[table])} FROM {table} WHERE {where}"  # noqa: S608  # our own names
        blake, key, prefix, decode = hashlib.blake2b, self._key, table.encode(), int.from_bytes
        return (
            sum(
                decode(blake(prefix + text.encode(), key=key, digest_size=32).digest(), "little")
                for (text,) in self._connection.execute(sql, values)
            )
            % _MODULUS
        )

    # -- the triggers

    def _call(self, table: str, row: str, sign: int, columns: list[str], opened: str) -> str:
        rollout = f"{row}.rollout" if table in (*ROLLOUT_TABLES, "step") else "''"
        node = f"{row}.node" if table == "step" else opened
        text = _as_text([f"{row}.{column}" for column in columns])
        return f"SELECT {_FUNCTION}('{table}', {rollout}, {node}, {sign}, {text});"

    def _note(self, table: str, rollout: str, node: str, sign: int, text: str) -> None:
        if table == "rollout" and node:
            self._opened.add(node)
            node = ""
        digest = hashlib.blake2b(table.encode() + text.encode(), key=self._key, digest_size=32).digest()
        self._changes.append(((table, rollout, node), sign * int.from_bytes(digest, "little")))

    # -- the columns with sums

    def _settle_steps(self, generation: str) -> None:
        changes, self._changes = self._changes, []
        changed: dict[tuple[str, str], int] = {}
        for (table, rollout, node), change in changes:
            if table == "step":
                changed[rollout, node] = changed.get((rollout, node), 0) + change
            else:
                self._changes.append(((table, rollout, node), change))
        for (rollout, node), change in changed.items():
            before = self._steps_sum(generation, rollout, node)
            after = self.sum_of_steps(rollout, node) if before is None else before + change
            self._write_steps_sum(generation, rollout, node, after)

    def _settle_rollouts(self, generation: str) -> set[str]:
        changes, self._changes = self._changes, []
        changed: dict[str, int] = {}
        for (table, rollout, _node), change in changes:
            if rollout:
                changed[rollout] = changed.get(rollout, 0) + change
            else:
                self._changes.append(((table, "", ""), change))
        for rollout, change in changed.items():
            before = 0 if rollout in self._opened else self._rollout_sum(generation, rollout)
            after = self.sum_of_rollout(rollout) if before is None else before + change
            self._write_rollout_sum(generation, rollout, after)
        return set(changed)

    def _has(self, rollout: str) -> bool:
        return (
            self._connection.execute("SELECT 1 FROM rollout WHERE id = ?", (rollout,)).fetchone() is not None
        )

    def _rollout_sum(self, generation: str, rollout: str) -> int | None:
        row = self._connection.execute("SELECT rows_digest FROM rollout WHERE id = ?", (rollout,)).fetchone()
        return None if row is None else parse(generation, row[0])

    def _steps_sum(self, generation: str, rollout: str, node: str) -> int | None:
        sql = "SELECT steps_digest FROM target WHERE rollout = ? AND node = ?"
        row = self._connection.execute(sql, (rollout, node)).fetchone()
        return None if row is None else parse(generation, row[0])

    def _write_steps_sum(self, generation: str, rollout: str, node: str, value: int) -> None:
        sql = "UPDATE target SET steps_digest = ? WHERE rollout = ? AND node = ?"
        self._connection.execute(sql, (format_sum(generation, value), rollout, node))

    def _write_rollout_sum(self, generation: str, rollout: str, value: int) -> None:
        sql = "UPDATE rollout SET rows_digest = ? WHERE id = ?"
        self._connection.execute(sql, (format_sum(generation, value), rollout))

    def _unfinished(self, rollout: str) -> list[str]:
        sql = f"SELECT node FROM target WHERE rollout = ? AND {UNFINISHED}"  # noqa: S608  # a constant
        return [node for (node,) in self._connection.execute(sql, (rollout,)).fetchall()]


def format_sum(generation: str, value: int) -> str:
    return f"{generation}:{value % _MODULUS:064x}"


def parse(generation: str, text: str) -> int | None:
    """Return a stored sum, None for one of another generation."""
    before, _, digits = text.partition(":")
    return int(digits, 16) if before == generation and digits else None


def _digested_columns(connection: Connection, table: str) -> list[str]:
    row = connection.execute(f"SELECT * FROM {table} LIMIT 0")  # noqa: S608  # names of our own schema
    skipped = NOT_COMPARED_COLUMNS.get(table, {}).keys() - {SUM_COLUMNS.get(table, "")}
    return [name for name, *_ in row.description if name not in skipped]


def _as_text(columns: Iterable[str]) -> str:
    """Return SQL for one text of all columns, which SQLite makes faster than Python does."""
    # Numbers have the digits that this version of SQLite prints: with another one the whole is verified.
    return f"json_array({', '.join(columns)})"
