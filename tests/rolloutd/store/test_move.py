"""Moves of a whole store between SQLite and a real PostgreSQL, and moves that are interrupted."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from rolloutd.admin.__main__ import main
from rolloutd.errors import NotFound, StoreFailed
from rolloutd.store import Store, backend_of, move_store, open_store
from rolloutd.store.backend import Backend
from rolloutd.store.transfer import TABLES
from tests.contracts.store_backends import moves_to_done, plan_of, rollout_opened, write
from tests.rolloutd.store.test_audit_comparison import write_history
from tests.support.postgresql import Postgresql

pytestmark = pytest.mark.servers("postgresql")


class Stores:
    """A store in a state directory and one in PostgreSQL, and the settings files that name them."""

    def __init__(self, root: Path, server: Postgresql) -> None:
        self.state_dir = root / "state"
        self.state_dir.mkdir(mode=0o700)
        self.address = server.address(server.emptied_database(), lease_s=5.0)
        self.file = root / "file.yaml"
        self.file.write_text(f"state_dir: {self.state_dir}\n")
        self.database = root / "database.yaml"
        self.database.write_text(
            f"state_dir: {self.state_dir}\nstore: {{postgresql: {{dsn: '{self.address.dsn}', lease: 5s}}}}\n"
        )

    def backend(self, *, is_postgresql: bool) -> Backend:
        return backend_of(self.state_dir, self.address if is_postgresql else None)

    async def open(self, *, is_postgresql: bool, read_only: bool = False) -> Store:
        address = self.address if is_postgresql else None
        return await open_store(self.state_dir, address, compile_plan=plan_of, read_only=read_only)


@pytest.fixture
def stores(tmp_path: Path, postgresql: Postgresql) -> Stores:
    return Stores(tmp_path, postgresql)


async def answers(stores: Stores, *, is_postgresql: bool) -> list[Any]:
    """Return what the reading commands of a daemon get from its store."""
    store = await stores.open(is_postgresql=is_postgresql, read_only=True)
    snapshot = await store.load_snapshot()
    ids = [each.id for each in await store.list_rollout_records() if not each.deleted]
    nodes = sorted({each.node for id_ in ids for each in await store.load_targets(id_)})
    found: list[Any] = [
        replace(snapshot, epoch=0),
        await store.read_audit(limit=10_000),
        await store.latest_audit_entry(),
        await store.list_closed_rollouts(),
        await store.list_rollout_records(),
        await store.load_connections(),
        await store.load_source_answers(),
        await store.load_verdicts(),
        await store.load_forecasts(),
        await store.load_step_durations(1000),
        await store.load_configurations(nodes),
        *[await store.load_plan(id_) for id_ in ids],
        *[await store.load_targets(id_) for id_ in ids],
        *[await store.load_preparations(id_) for id_ in ids],
        *[await store.load_steps(id_, node) for id_ in ids for node in nodes],
        *[await store.read_audit(node=node) for node in nodes],
    ]
    await store.close()
    return found


async def fill(stores: Stores, *, is_postgresql: bool = False) -> None:
    await write_history(stores.state_dir, stores.address if is_postgresql else None)


STAY: Final = {"audit_checkpoint", "meta", "sqlite_sequence", "sqlite_stat1"}
"""Tables of one machine or one database."""


async def test_each_table_is_moved_or_stays(stores: Stores) -> None:
    await fill(stores)
    with closing(sqlite3.connect(stores.state_dir / "rolloutd.sqlite")) as database:
        names = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert names - STAY == set(TABLES)


async def test_store_moved_there_and_back_answers_the_same(stores: Stores) -> None:
    await fill(stores)
    store = await stores.open(is_postgresql=False)
    await store.advance_audit_base(4, 9.0)
    while await store.remove_exported_entries(3):
        pass
    await store.close()
    before = await answers(stores, is_postgresql=False)
    there = await asyncio.to_thread(main, ["move", f"--from={stores.file}", f"--to={stores.database}"])
    assert there == 0
    assert await answers(stores, is_postgresql=True) == before
    with pytest.raises(StoreFailed, match="it was moved to database"):
        await stores.open(is_postgresql=False)
    # The next daemon goes on with the chain and the numbers of rows.
    store = await stores.open(is_postgresql=True)
    await write(store, rollout_opened("later"))
    await write(store, *moves_to_done("n1", "later"))
    assert (await store.verify_audit()).ok
    await store.close()
    after = await answers(stores, is_postgresql=True)
    back = await asyncio.to_thread(main, ["move", f"--from={stores.database}", f"--to={stores.file}"])
    assert back == 0
    assert await answers(stores, is_postgresql=False) == after
    with pytest.raises(StoreFailed, match="it was moved to"):
        await stores.open(is_postgresql=True)
    store = await stores.open(is_postgresql=False)
    assert (await store.load_snapshot()).epoch > 1 << 32, "no term comes again"
    await write(store, rollout_opened("last"))
    await store.close()


@pytest.mark.parametrize("is_postgresql", [False, True])
@pytest.mark.parametrize("stop_at", ["import_tables", "_compare", "source refuses", "target starts"])
async def test_interrupted_move_leaves_the_source_whole(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, stop_at: str, *, is_postgresql: bool
) -> None:
    await fill(stores, is_postgresql=is_postgresql)
    before = await answers(stores, is_postgresql=is_postgresql)
    source, target = (stores.backend(is_postgresql=kind) for kind in (is_postgresql, not is_postgresql))
    with monkeypatch.context() as patched:
        _interrupt(patched, stop_at, source, target)
        with pytest.raises(KeyboardInterrupt):
            move_store(source, target, with_runs=True)
    assert await can_start(stores, is_postgresql=is_postgresql) == (stop_at != "target starts")
    assert not await can_start(stores, is_postgresql=not is_postgresql)
    again = (stores.backend(is_postgresql=kind) for kind in (is_postgresql, not is_postgresql))
    moved = move_store(*again, with_runs=True)
    assert moved.entries
    assert await answers(stores, is_postgresql=not is_postgresql) == before


@pytest.mark.parametrize("is_finished", [True, False])
async def test_store_that_was_moved_is_no_source(
    stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_finished: bool
) -> None:
    await fill(stores)
    source, target = (stores.backend(is_postgresql=kind) for kind in (False, True))
    if is_finished:
        move_store(source, target, with_runs=True)
    else:
        with monkeypatch.context() as patched:
            _interrupt(patched, "source refuses", source, target)
            with pytest.raises(KeyboardInterrupt):
                move_store(source, target, with_runs=True)
    third = backend_of(tmp_path)
    older, problem = (source, "it was moved to database") if is_finished else (target, "not finished; repeat")
    with pytest.raises(StoreFailed, match=problem):
        move_store(older, third, with_runs=True)
    assert not third.examine().exists


async def can_start(stores: Stores, *, is_postgresql: bool) -> bool:
    """Return whether a daemon can begin a term on a store with entries."""
    try:
        is_filled = stores.backend(is_postgresql=is_postgresql).verify_chain().entries > 0
        await (await stores.open(is_postgresql=is_postgresql)).close()
    except (NotFound, StoreFailed):
        return False
    return is_filled


def _interrupt(patched: pytest.MonkeyPatch, stop_at: str, source: Backend, target: Backend) -> None:
    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    match stop_at:
        case "import_tables":
            patched.setattr(target, "import_tables", lambda tables: end(next(tables)))
        case "_compare":
            patched.setattr("rolloutd.store.move._compare", end)
        case "source refuses":
            patched.setattr(source, "write_refusal", end)
        case _:
            patched.setattr(target, "write_refusal", end)
