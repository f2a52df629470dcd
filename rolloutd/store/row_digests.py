"""Digests of the tables, kept by the writer: each is a sum of keyed hashes over rows.

The sum over the steps of a node is a column of its target, that over the rows of a rollout a column of the
rollout, and those of the other tables are in the checkpoint.  So what is compared at a start does not grow
with the history: the rollouts, the rows of live ones, the steps of nodes in flight, and the other tables.

A sum follows each row that this connection changes, by triggers that report to no other connection: a row
that another program alters makes the sum wrong.  A sum of another generation counts as unknown; the next
change in its scope computes it from the rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Final

from rolloutd.store.backend import Backend, Connection, RowChanges, row_text
from rolloutd.store.schema import KEYS, NOT_COMPARED_COLUMNS, ROLLOUT_TABLES

WHOLE_TABLES: Final = tuple(name for name in KEYS if name not in (*ROLLOUT_TABLES, "step"))

SUM_COLUMNS: Final[Mapping[str, str]] = {"rollout": "rows_digest", "target": "steps_digest"}
"""Columns that hold the sum of other rows, so that the sum over this row covers those too."""

UNFINISHED = "(phase NOT IN ('pending', 'done') OR isolated != 0 OR order_kind IS NOT NULL)"
"""Targets that a driver continues after a start; the condition of an index."""

_MODULUS = 1 << 256

_Scope = tuple[str, str, str]
"""Table, rollout and node of a sum; the strings that it has none of are empty."""


class RowDigests:
    """The sums of one database, and the changes of the transaction that is open."""

    def __init__(self, connection: Connection, key: bytes) -> None:
        self._connection = connection
        self._key = key
        self._columns = {table: digested_columns(connection, table) for table in KEYS}
        self._row_changes: RowChanges | None = None
        self._changes: dict[_Scope, int] = {}
        self._opened: set[str] = set()
        """Rollouts that this transaction inserts: no row of theirs is older."""

    # -- what has changed

    def follow_changes(self, backend: Backend) -> None:
        """Let each row that this connection writes change its sum."""
        self._row_changes = backend.follow_rows(self._connection, self._columns)

    def mark(self) -> int:
        """Return the present position in the changes, for forget_since()."""
        return 0 if self._row_changes is None else self._row_changes.mark()

    def forget_since(self, mark: int) -> None:
        """Forget changes that a savepoint took back."""
        if self._row_changes is not None:
            self._row_changes.forget_since(mark)

    def settle(self, generation: str) -> tuple[dict[str, int], set[str]]:
        """Write the sums of the rows that have changed; return those of whole tables, and the rollouts."""
        # Each writes sums, which are columns of rows that the next one counts.
        self._settle_steps(generation)
        rollouts = self._settle_rollouts(generation)
        self._take_changes()
        totals: dict[str, int] = {}
        for (table, rollout, _), change in self._changes.items():
            assert not rollout, "steps and rows of rollouts are settled"
            totals[table] = totals.get(table, 0) + change
        self._changes.clear()
        self._opened.clear()
        return totals, rollouts

    def begin(self) -> None:
        if self._row_changes is not None:
            self._row_changes.begin()
        self._changes.clear()
        self._opened.clear()

    def forget(self) -> None:
        """Forget all changes of the transaction: the sums over the rows count them already."""
        if self._row_changes is not None:
            self._row_changes.take()
        self._changes.clear()
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
        sql = f"SELECT {row_text(self._columns[table])} FROM {table} WHERE {where}"  # noqa: S608  # our own names
        blake, key, prefix, decode = hashlib.blake2b, self._key, table.encode(), int.from_bytes
        return (
            sum(
                decode(blake(prefix + text.encode(), key=key, digest_size=32).digest(), "little")
                for (text,) in self._connection.execute(sql, values)
            )
            % _MODULUS
        )

    # -- changed rows

    def _take_changes(self) -> None:
        """Read the rows that have changed since the last call; those of sums themselves come later."""
        if self._row_changes is None:
            return
        blake, key = hashlib.blake2b, self._key
        for table, rollout, node, sign, text in self._row_changes.take():
            if table == "rollout" and node:
                self._opened.add(node)  # of a new rollout, it is the rollout's own id
            digest = blake(table.encode() + text.encode(), key=key, digest_size=32).digest()
            scope = (table, rollout, node if table == "step" else "")
            change = sign * int.from_bytes(digest, "little")
            self._changes[scope] = self._changes.get(scope, 0) + change

    # -- the columns with sums

    def _settle_steps(self, generation: str) -> None:
        self._take_changes()
        for scope in [each for each in self._changes if each[0] == "step"]:
            _, rollout, node = scope
            change = self._changes.pop(scope)
            before = self._steps_sum(generation, rollout, node)
            after = self.sum_of_steps(rollout, node) if before is None else before + change
            self._write_steps_sum(generation, rollout, node, after)

    def _settle_rollouts(self, generation: str) -> set[str]:
        self._take_changes()
        changed: dict[str, int] = {}
        for scope in [each for each in self._changes if each[1]]:
            rollout = scope[1]
            changed[rollout] = changed.get(rollout, 0) + self._changes.pop(scope)
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


def digested_columns(connection: Connection, table: str) -> list[str]:
    row = connection.execute(f"SELECT * FROM {table} LIMIT 0")  # noqa: S608  # names of our own schema
    skipped = NOT_COMPARED_COLUMNS.get(table, {}).keys() - {SUM_COLUMNS.get(table, "")}
    # PostgreSQL has the order of rows as a column, which a move may change.
    return [name for name, *_ in row.description if name not in skipped and name != "rowid"]
