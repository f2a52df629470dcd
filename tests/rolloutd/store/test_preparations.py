"""What records cost: a snapshot is written once, and no query reads rows that it does not need."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

from machines.model.events import PreparationRecorded
from machines.model.preparation import Preparation, PreparationState
from rolloutd.store import open_store
from rolloutd.store.queries import unfinished_runs
from rolloutd.store.retention_queries import list_uncleaned_nodes
from tests.contracts.store_backends import moves_to_done, plan_of, rollout_opened, write

NODES = 2000
ROW = Preparation("r1", "n0", "install", 1, PreparationState.RUNNING, "c1", 7.0, 7.0)
SNAPSHOT = {f"sysctl/net.{number}": "0" * 50 for number in range(2000)}


async def test_snapshot_is_written_once(tmp_path: Path) -> None:
    store = await open_store(tmp_path, compile_plan=plan_of, inline=True)
    await write(store, rollout_opened(nodes=["n0"], at=0.0))
    row = replace(ROW, before=SNAPSHOT)
    await write(store, PreparationRecorded(row))
    log = Path(f"{store.backend.path}-wal")
    size = log.stat().st_size
    for sent in range(1, 5):
        await write(store, PreparationRecorded(replace(row, bytes=sent)))
    assert log.stat().st_size - size < len(SNAPSHOT) * 50
    assert await store.load_preparations("r1") == (replace(row, bytes=4),)
    await write(store, PreparationRecorded(replace(row, before=None)))
    assert await store.load_preparations("r1") == (ROW,)
    await store.close()


async def test_question_for_lost_runs_reads_no_other_rows(tmp_path: Path) -> None:
    store = await open_store(tmp_path, compile_plan=plan_of, inline=True)
    await write(store, rollout_opened(nodes=["n0"], at=0.0))
    rows = (replace(ROW, node=f"n{number}", handle="run") for number in range(NODES))
    await write(store, *map(PreparationRecorded, rows))
    await write(store, PreparationRecorded(replace(ROW, handle="run", state=PreparationState.FAILED)))
    await store.close()
    with counted_steps(store.backend.path) as (connection, steps):
        assert unfinished_runs(connection, "n0")
        assert not unfinished_runs(connection, "n1")
    assert next(steps) < NODES


async def test_question_for_uncleaned_nodes_reads_no_live_targets(tmp_path: Path) -> None:
    store = await open_store(tmp_path, compile_plan=plan_of, inline=True)
    await write(store, rollout_opened(nodes=[f"n{number}" for number in range(NODES)], at=0.0))
    await write(store, *moves_to_done("n0"))
    await store.close()
    with counted_steps(store.backend.path) as (connection, steps):
        assert not list_uncleaned_nodes(connection, 0.0, 1e10)
    assert next(steps) < NODES


@contextmanager
def counted_steps(path: Path) -> Iterator[tuple[sqlite3.Connection, Iterator[int]]]:
    """Yield a connection, and a count of the steps of SQLite's machine on it."""
    steps = count()
    with closing(sqlite3.connect(path)) as connection:
        connection.set_progress_handler(lambda: next(steps) < 0, 1)
        yield connection, steps
