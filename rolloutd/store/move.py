"""A move of a whole store to another database, while no daemon uses either.

The copy refuses to start until it is proven equal, row by row, and the source refuses to start.  So an
interrupted move leaves one store that a daemon may use, and can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from rolloutd.errors import NotFound, StoreFailed
from rolloutd.store.audit_comparison import compare_with_audit
from rolloutd.store.backend import Backend, Row, TableRows
from rolloutd.store.retention_queries import list_nodes_with_runs
from rolloutd.store.transfer import read_refusal

_DIFFERENT = frozenset({("term", "epoch"), ("audit_base", "signature")})
"""Columns that a move may change: the epoch grows where others were granted, each machine has its key."""


@dataclass(frozen=True, slots=True)
class MoveResult:
    """What was moved: audit entries, the last one's hash, and rows of all tables."""

    entries: int
    head: str
    rows: int


def move_store(source: Backend, target: Backend, *, with_runs: bool) -> MoveResult:
    """Move a store; raises StoreFailed, and in each case the source is whole.

    The caller holds the leadership of both.  `with_runs`: both have one state directory, so the next daemon
    can follow the runs that are under way.
    """
    if not with_runs and (nodes := source.read_now(list_nodes_with_runs)):
        raise StoreFailed(
            f"{source.name}: runs are unfinished ({', '.join(nodes[:3])}); let them end, or keep the state"
            " directory"
        )
    try:
        before = compare_with_audit(source)
    except NotFound as error:
        raise StoreFailed(str(error)) from error
    if not before.ok:
        raise StoreFailed(
            f"{source.name}: it differs from its audit; nothing was moved, see `rolloutctl audit verify`"
        )
    moved = f"it was moved to {target.name}; use the settings of that store"
    with source.exported() as tables:
        # What it was moved to is newer: a copy of it would begin runs again, without the votes since.
        if (refusal := source.read_now(read_refusal)) not in ("", moved):
            raise StoreFailed(f"{source.name}: {refusal}")
        target.import_tables(tables)
    rows = _compare(source, target)
    after = compare_with_audit(target)
    if not after.ok or after.chain.head != before.chain.head:
        raise StoreFailed(f"{target.name}: the copy differs from its audit; the source is as it was")
    source.write_refusal(moved)
    target.write_refusal("")
    return MoveResult(after.chain.entries, after.chain.head, rows)


def _compare(source: Backend, target: Backend) -> int:
    """Return how many rows both have; raises StoreFailed for one that differs."""
    count = 0
    with source.exported() as ours, target.exported() as theirs:
        for one, other in zip_longest(ours, theirs):
            assert one.table == other.table, "both read the same tables in the same order"
            for left, right in zip_longest(_values(one), _values(other)):
                if left != right:
                    raise StoreFailed(
                        f"{target.name}: a row of {one.table} differs from {source.name}; nothing was moved"
                    )
                count += 1
    return count


def _values(found: TableRows) -> Iterator[tuple[Any, ...]]:
    """Yield rows with their columns in one order, as PostgreSQL can have them."""
    order = sorted(range(len(found.columns)), key=found.columns.__getitem__)  # each has its own order
    kept = [at for at in order if (found.table, found.columns[at]) not in _DIFFERENT]
    return (tuple(_comparable(row, at) for at in kept) for row in found.rows)


def _comparable(row: Row, at: int) -> Any:
    value = row[at]
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}") if isinstance(value, str) else value
