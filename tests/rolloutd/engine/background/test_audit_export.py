"""What `keep.audit` exports: each entry is in a segment or in the database, whenever the daemon is killed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from machines.facts.projection import Projection
from machines.model.events import Event, HoldReleased, HoldTaken, NodesDiscovered, RolloutEnded
from machines.model.rollout import DAEMON, Hold
from rolloutd.admin.forgotten_runs import set_aside
from rolloutd.audit.audit_chain import GENESIS_HASH
from rolloutd.audit.audit_segments import list_segments, read_segment, read_segments
from rolloutd.engine.background import audit_export
from rolloutd.engine.background.audit_export import CONDITION, AuditExporter
from rolloutd.engine.change_notifier import ChangeNotifier
from rolloutd.engine.state import DATABASE_ID_LENGTH, State
from rolloutd.errors import StoreFailed
from rolloutd.settings import Settings
from rolloutd.settings.compile import compile_limits
from rolloutd.store import SqliteBackend, Store, backup, compare_with_audit, open_store, restore
from rolloutd.store.audit_base import NewBase
from rolloutd.store.sqlite import database
from rolloutd.store.writer import BatchWriter, Transaction, TransactionResult
from tests.contracts.store_backends import ALICE, moves_to_done, node, plan_of, rollout_opened
from tests.support.simulated_year import PassingClock

DAY_S = 86_400.0
STRIDE = int(os.environ.get("ROLLOUTD_TEST_KILL_STRIDE", "4"))
"""Steps from one kill to the next; 1 kills at each."""

SEGMENT_ENTRIES = 15
ENTRIES = 28


class Killed(BaseException):
    """The daemon was killed."""


@dataclass(slots=True)
class Keeper:
    """A store with entries of two months, and what exports them."""

    directory: Path
    state: State
    exporter: AuditExporter
    store: Store
    clock: PassingClock

    async def commit(self, *events: Event) -> None:
        await self.store.commit(events, actor=DAEMON, cause="test", at=self.clock.now())

    async def holds(self, count: int) -> None:
        """Write entries, two each three hours."""
        for number in range(count // 2):
            hold = Hold("n1", "test", f"h{number}", ALICE, "busy", self.clock.now(), None)
            await self.commit(HoldTaken(hold))
            await self.commit(HoldReleased("n1", "test", hold.id, DAEMON, self.clock.now()))
            self.clock.at += 3 * 3600

    def segments(self) -> list[tuple[int, int]]:
        return [(file.first, file.last) for file in list_segments(self.directory / "segments")]


@asynccontextmanager
async def keeper(
    directory: Path, keep: str | None = "7d", clock: PassingClock | None = None
) -> AsyncIterator[Keeper]:
    clock = clock or PassingClock()
    store = await open_store(directory, compile_plan=plan_of, inline=True, now=clock.now)
    try:
        settings = Settings.model_validate({"keep": {"audit": keep}})
        snapshot = await store.load_snapshot()
        index = Projection.build(snapshot, compile_limits(settings), plan_of)
        state = State(index, store, clock, settings, ChangeNotifier(), epoch=snapshot.epoch)
        key = store.backend.load_signing_key()
        yield Keeper(directory, state, AuditExporter(state, directory / "segments", key), store, clock)
    finally:
        await store.close()


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_export, "MAX_SEGMENT_ENTRIES", SEGMENT_ENTRIES)
    monkeypatch.setattr(audit_export, "PAGE_ENTRIES", 10)
    monkeypatch.setattr(audit_export, "REMOVED_ENTRIES", 15)


async def fill(directory: Path) -> None:
    async with keeper(directory) as made:
        await made.store.sign_audit_checkpoint(1.0, all_rows=True)
        await made.commit(NodesDiscovered((node("n1"), node("n2"))))
        await made.commit(rollout_opened())
        await made.commit(*moves_to_done("n1"))
        await made.commit(*moves_to_done("n2"))
        await made.commit(RolloutEnded("r1", 3.0))
        await made.holds(ENTRIES)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a state directory that each test copies."""
    directory = tmp_path_factory.mktemp("filled") / "state"
    asyncio.run(fill(directory))
    return directory


def later(days: float = 30) -> PassingClock:
    clock = PassingClock()
    clock.at += days * DAY_S
    return clock


@pytest.fixture
def state_dir(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "state"))


def database_of(state_dir: Path) -> SqliteBackend:
    return SqliteBackend(state_dir / database.FILE_NAME)


async def numbers(made: Keeper) -> list[int]:
    """Return the numbers of all entries, of the segments and then of the database."""
    base = await made.store.load_audit_base()
    exported = list(read_segments(made.directory / "segments", base.seq, base.head))
    kept = await made.store.read_audit(limit=10_000)
    return [entry[0] for entry in exported] + [entry.seq for entry in kept]


async def test_old_entries_move_to_segments(state_dir: Path) -> None:
    before = compare_with_audit(database_of(state_dir)).chain
    async with keeper(state_dir, clock=later()) as made:
        await made.exporter.export_due()
        count = before.entries
        assert made.segments() == [(1, 15), (16, 30), (31, count - 2)]
        assert await numbers(made) == list(range(1, count + 1))
        assert [entry.seq for entry in await made.store.read_audit()] == [count - 1, count]
        assert not (await made.store.verify_audit_checkpoint()).problem
        assert (await made.store.verify_audit()).ok
        await made.holds(2)
    report = compare_with_audit(database_of(state_dir), before.head)
    assert (report.ok, report.chain.entries) == (True, before.entries + 2)
    assert compare_with_audit(database_of(state_dir), segments=state_dir / "segments").ok
    assert compare_with_audit(database_of(state_dir), GENESIS_HASH).ok


async def test_nothing_exported_by_default(state_dir: Path) -> None:
    async with keeper(state_dir, keep=None, clock=later()) as made:
        await made.exporter.export_due()
        assert made.segments() == []


async def test_younger_entries_stay(state_dir: Path) -> None:
    async with keeper(state_dir, clock=later(7.5)) as made:
        await made.exporter.export_due()
        assert made.segments() == [], "not a day older than `keep.audit`"
        made.clock.at += 0.75 * DAY_S
        await made.exporter.export_due()
        # Of the last 24 hours, two entries an hour.
        (kept, *_) = await made.store.read_audit()
        assert kept.seq == made.segments()[-1][1] + 1
        count = compare_with_audit(database_of(state_dir)).chain.entries
        assert count - kept.seq > 5
        assert json.loads(kept.text)["at"] > made.clock.at - 8 * DAY_S


async def test_export_continues_from_earlier_segments(state_dir: Path) -> None:
    async with keeper(state_dir, clock=later()) as made:
        await made.exporter.export_due()
        (_, first_end) = made.segments()[-1]
        await made.holds(10)
        made.clock.at += 30 * DAY_S
        await made.exporter.export_due()
        assert made.segments()[-1:] == [(first_end + 1, first_end + 10)]
        assert (await made.store.verify_audit()).ok
    assert compare_with_audit(database_of(state_dir), segments=state_dir / "segments").ok


class KilledWriter:
    """Kills the daemon before or after the n-th batch of writes, or before the n-th read of a page."""

    def __init__(self, made: Keeper, step: int, *, after: bool) -> None:
        self.steps = 0
        self.kill_at = step
        self._after = after
        assert made.store._writer is not None
        writer: BatchWriter = made.store._writer._batch_writer
        self._write = writer.write
        writer.write = self.write  # type: ignore[method-assign]
        self._read = made.store._read
        made.store._read = self.read  # type: ignore[method-assign]

    def write(self, batch: Sequence[Transaction]) -> list[TransactionResult]:
        if not self._after:
            self._pass()
        results = self._write(batch)
        if self._after:
            self._pass()
        return results

    async def read(self, query: Callable[..., Any], *args: Any, **named: Any) -> Any:
        result = await self._read(query, *args, **named)
        self._pass()
        return result

    def _pass(self) -> None:
        self.steps += 1
        if self.steps >= self.kill_at:  # nothing is written at the end either
            raise Killed


@pytest.mark.parametrize("after", [False, True])
async def test_kill_at_any_step_loses_nothing(filled: Path, tmp_path: Path, after: bool) -> None:
    step, was_killed = 1 - STRIDE, True
    count = compare_with_audit(database_of(filled)).chain.entries
    while was_killed:
        step += STRIDE
        state_dir = Path(shutil.copytree(filled, tmp_path / f"{step}"))
        was_killed = await export_until_killed(state_dir, step, after=after)
        report = compare_with_audit(database_of(state_dir))
        assert report.ok, (step, report)
        async with keeper(state_dir, clock=later()) as made:
            await made.exporter.export_due()
            assert CONDITION not in made.state.conditions, step
            assert await numbers(made) == list(range(1, count + 1)), step
            assert not await made.store.remove_exported_entries(1), step
        assert compare_with_audit(database_of(state_dir), segments=state_dir / "segments").ok, step
        names = sorted(path.name for path in (state_dir / "segments").iterdir())
        assert all(name.startswith("audit-") for name in names), step
        shutil.rmtree(state_dir)
    assert step > 20, "each page, part and removal is a step"


async def export_until_killed(state_dir: Path, step: int, *, after: bool) -> bool:
    try:
        async with keeper(state_dir, clock=later()) as made:
            killed = KilledWriter(made, step, after=after)
            await made.exporter.export_due()
            killed.kill_at = 10_000
            return False
    except (Killed, StoreFailed):  # of a transaction whose writer was killed
        return True


async def test_damaged_segment_stops_removal(state_dir: Path) -> None:
    async with keeper(state_dir, clock=later()) as made:
        await made.exporter.export_due()
    async with keeper(state_dir, clock=later()) as made:
        await made.holds(20)
        made.clock.at += 30 * DAY_S
        store = made.store
        write_audit_base = store.write_audit_base

        async def killed(new: NewBase) -> None:
            await write_audit_base(new)
            raise Killed

        store.write_audit_base = killed  # type: ignore[method-assign]
        with pytest.raises(Killed):
            await made.exporter.export_due()
        del store.write_audit_base
        *_, newest = list_segments(state_dir / "segments")
        content = newest.path.read_bytes()
        newest.path.write_bytes(content[:-40])
        before = await store.read_audit(limit=1)
        await made.exporter.export_due()
        assert "truncated or damaged" in made.state.conditions[CONDITION]
        assert await store.read_audit(limit=1) == before
        newest.path.write_bytes(content)
        await made.exporter.export_due()
        assert CONDITION not in made.state.conditions
        assert (await store.read_audit(limit=1))[0].seq == newest.last + 1


async def test_segment_of_another_history_is_kept(state_dir: Path) -> None:
    """A backup is restored that does not have what was exported since."""
    copy = state_dir / "copy"
    backup(state_dir, copy)
    async with keeper(state_dir, clock=later()) as made:
        await made.holds(40)
        made.clock.at += 30 * DAY_S
        await made.exporter.export_due()
        exported = made.segments()
    restore(state_dir, copy, set_aside)
    async with keeper(state_dir, clock=later(90)) as made:
        await made.holds(40)
        made.clock.at += 30 * DAY_S
        await made.exporter.export_due()
        assert "the database has other entries" in made.state.conditions[CONDITION]
        assert made.segments() == exported
        assert (await made.store.verify_audit()).ok


async def test_backup_is_whole_without_segments(state_dir: Path, tmp_path: Path) -> None:
    async with keeper(state_dir, clock=later()) as made:
        await made.exporter.export_due()
        await made.holds(4)
    backup(state_dir, tmp_path / "copy")
    other = tmp_path / "other"
    restored = restore(other, tmp_path / "copy", set_aside)
    assert restored.verification.ok
    assert compare_with_audit(database_of(other)).ok, "the base is signed again with the key of this machine"
    async with keeper(other, clock=later(90)) as made:
        await made.holds(4)
        assert (await made.store.verify_audit()).ok
        assert (await made.state.fence_token()).split()[1] == first_hash(state_dir)[:DATABASE_ID_LENGTH]


def first_hash(state_dir: Path) -> str:
    (first, *_) = list_segments(state_dir / "segments")
    (_, _, entry_hash) = next(read_segment(first, None))
    return entry_hash


@pytest.mark.parametrize(
    "script",
    [
        "UPDATE audit_base SET head = hex(zeroblob(32))",
        "UPDATE audit_base SET seq = seq + 1; UPDATE audit_base_part SET seq = seq + 1",
        "UPDATE audit_base SET origin = ''",
    ],
)
async def test_altered_base_is_reported(state_dir: Path, script: str) -> None:
    async with keeper(state_dir, clock=later()) as made:
        await made.exporter.export_due()
    run_sql(state_dir, script)
    assert not compare_with_audit(database_of(state_dir)).ok


async def test_altered_tables_of_base_are_reported(state_dir: Path) -> None:
    async with keeper(state_dir, clock=later()) as made:
        await made.exporter.export_due()
    run_sql(state_dir, "DELETE FROM audit_base_part WHERE number = 1")
    with pytest.raises(StoreFailed, match="is damaged"):
        compare_with_audit(database_of(state_dir))
    assert compare_with_audit(database_of(state_dir), segments=state_dir / "segments").ok


async def test_row_altered_after_export_is_a_mismatch(state_dir: Path) -> None:
    async with keeper(state_dir, clock=later()) as made:
        await made.exporter.export_due()
    run_sql(state_dir, "UPDATE node SET kind = 'host', labels = '[]' WHERE name = 'n1'")
    (row,) = compare_with_audit(database_of(state_dir)).mismatches
    assert row.mismatch.subject == "node/n1"


async def test_altered_segment_is_found_with_the_database(state_dir: Path) -> None:
    async with keeper(state_dir, clock=later()) as made:
        await made.exporter.export_due()
    (_, second, _) = list_segments(state_dir / "segments")
    second.path.unlink()
    report = compare_with_audit(database_of(state_dir), segments=state_dir / "segments")
    assert (report.ok, report.chain.first_bad, report.mismatches) == (False, 16, ())
    assert "entries 16 to 30 are missing" in report.chain.message


def run_sql(state_dir: Path, script: str) -> None:
    with closing(sqlite3.connect(state_dir / database.FILE_NAME)) as connection:
        connection.executescript(script)
