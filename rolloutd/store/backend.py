"""Port of the database under the store; each database has its own folder.

The connection is that of DB-API 2.0 with the exceptions as its attributes; parameters are `?` and `?1`.
The SQL is what both databases understand: flags are numbers, and tables without a key have a `rowid`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rolloutd.audit.audit_chain import ChainVerification
from rolloutd.errors import StoreFailed
from rolloutd.ports import AuditBase, AuditEntry

T = TypeVar("T")

EPOCH_INCREMENT = 1_000_000
"""Added to the epoch of a restored database, whose last epoch is unknown.

Nodes refuse the runs of a daemon with an older epoch, so a restore must go beyond every epoch ever used.
"""

ChainRow = tuple[Any, Any, Any]
"""Number, text and hash of an audit entry; text and hash as bytes, because both may be damaged."""


class Cursor(Protocol):
    @property
    def description(self) -> Any: ...
    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    @property
    def in_transaction(self) -> bool: ...
    @property
    def IntegrityError(self) -> type[Exception]: ...  # noqa: N802  # DB-API's name
    def execute(self, sql: str, parameters: Any = ..., /) -> Cursor: ...
    def executemany(self, sql: str, parameters: Iterable[Any], /) -> Cursor: ...


RowChange = tuple[str, str, str, int, str]
"""Table, rollout, node, +1 or -1, and text of a row that appeared or went; an update is both.

Of a rollout that was inserted, the node is the rollout's id.
"""

Row = Sequence[Any]


@dataclass(frozen=True, slots=True)
class TableRows:
    """The rows of one table, in the order in which they were inserted."""

    table: str
    columns: Sequence[str]
    rows: Iterator[Row]


class RowChanges(Protocol):
    """The rows that one connection has changed in the transaction that is open."""

    def begin(self) -> None:
        """Forget what is left of the last transaction: one has begun."""

    def mark(self) -> int:
        """Return the present position."""

    def forget_since(self, mark: int) -> None:
        """Forget the changes after a position, which were rolled back."""

    def take(self) -> list[RowChange]:
        """Return the changes, and forget them."""


def row_text(columns: Iterable[str]) -> str:
    """Return SQL for one text of all columns, which the database makes faster than Python does."""
    # Numbers have the digits that this version of the database prints: another one verifies the whole.
    return f"json_array({', '.join(columns)})"


class Executor(Protocol):
    """One connection that runs one piece of work at a time."""

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Return the result of `work` on the connection; cancelling the caller does not stop it."""

    async def close(self) -> None:
        """Finish the work that was submitted, then close the connection."""


class InlineExecutor:
    """A connection in the caller's thread: a simulation under virtual time cannot wait for another one."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def run(self, work: Callable[[Any], T]) -> T:
        return work(self.connection)

    async def close(self) -> None:
        self.connection.close()


@dataclass(frozen=True, slots=True)
class Examination:
    """The state of a database, which `text` names; `inaccessible`: files that this user may not write."""

    text: str
    damage: str = ""
    is_current: bool = True
    inaccessible: tuple[str, ...] = ()
    exists: bool = True


class Backend(Protocol):
    @property
    def name(self) -> str:
        """The database, as messages name it."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What a statement raises when the database fails."""

    @property
    def begin_write(self) -> str:
        """The statement that begins a transaction in which no other writer can begin a term."""

    @property
    def next_epoch(self) -> str:
        """SQL for the epoch of the next term, from the column `epoch` of the last one."""

    def explain(self, error: Exception) -> StoreFailed:
        """Return an error that names the remedy."""

    async def open_writer(self) -> Executor:
        """Open for writing, create what is missing, and migrate; raises StoreFailed."""

    async def open_reader(self) -> Executor:
        """Open for reading while another connection writes; raises StoreFailed."""

    def load_signing_key(self, *, may_make: bool = True) -> bytes:
        """Return the key that signs the checkpoint; raises StoreFailed.

        Where there is none it is made, or empty unless `may_make`.
        """

    def read_now(self, work: Callable[[Connection], T]) -> T:
        """Return the result of `work` on a reading connection of its own; raises StoreFailed."""

    def check_writable(self, connection: Connection) -> None:
        """Raise StoreFailed if a commit would succeed and be lost, or if there is no database now."""

    def is_in_doubt(self, connection: Connection) -> bool:
        """Return whether the last COMMIT may have succeeded though it raised, or may be lost though not."""

    def await_database(self, connection: Connection) -> None:
        """Return when the database answers again; raises FactsBehind when it does not in time."""

    def record_commit(self, epoch: int, head: AuditEntry) -> None:
        """Note the term and the last audit entry of a commit, outside the database."""

    def append_entries(self, connection: Connection, entries: Sequence[AuditEntry]) -> None:
        """Insert audit entries."""

    def follow_rows(self, connection: Connection, columns: Mapping[str, Sequence[str]]) -> RowChanges:
        """Report the rows of these tables that this connection changes from now on, with these columns."""

    def release_space(self, connection: Connection) -> None:
        """Give some free space of the file back to the disk, in the transaction that is open."""

    def file_sizes(self, connection: Connection) -> tuple[int, int]:
        """Return the size of the file, and how much of it is free (bytes)."""

    # -- the audit

    def read_chain(self, connection: Connection, table: str, after: int, limit: int) -> Sequence[ChainRow]:
        """Return the first audit entries after a number."""

    def verify_chain(self, head: str | None = None) -> ChainVerification:
        """Check the chain, read-only; a damaged database is a result.  Raises NotFound."""

    def read_base(self) -> AuditBase:
        """Return the audit's base, also of a database with an older schema, which has none."""

    def read_hashes(self, numbers: Iterable[int]) -> dict[int, str]:
        """Return the recorded hashes of these entries, without those that are missing."""

    def open_comparison(
        self, audited: Callable[[str, str], str], *, is_resumable: bool = False
    ) -> AbstractContextManager[Connection | None]:
        """Open empty tables as schema `main`, and the database read-only as schema `stored`.

        `audited` is made a function of SQL.  Yields None for a database with an older schema.  A resumable
        comparison may be given the tables of one that a kill or ComparisonStopped has ended.
        """

    # -- a move

    def exported(self) -> AbstractContextManager[Iterator[TableRows]]:
        """Read all tables as of one moment, each to its end before the next; raises StoreFailed, errors."""

    def import_tables(self, found: Iterable[TableRows]) -> None:
        """Fill an empty store, which refuses to start until write_refusal(); raises StoreFailed."""

    def write_refusal(self, text: str) -> None:
        """Let no daemon start on this store, for the reason in the text; with an empty one every daemon."""

    def examine(self) -> Examination:
        """Return what is wrong with the database; raises StoreFailed, OSError."""
