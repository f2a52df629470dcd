"""What the records of prepare stages cost: a snapshot is written once, and no query reads all rows."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from machines.model.events import PreparationRecorded
from machines.model.preparation import Preparation, PreparationState
from rolloutd.store import open_store
from rolloutd.store.queries import unfinished_runs
from tests.contracts.store_backends import plan_of, rollout_opened, write

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
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    with closing(sqlite3.connect(store.backend.path)) as connection:
        connection.set_progress_handler(count, 1)
        assert unfinished_runs(connection, "n0")
        assert not unfinished_runs(connection, "n1")
    assert steps < NODES
