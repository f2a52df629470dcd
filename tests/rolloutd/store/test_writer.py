"""The writing half of the store under stress: concurrency, cancellation, full disks, ended terms."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from machines.model.events import FreezeStarted, HoldTaken, RequestDenied, StepRecorded
from machines.model.rollout import Hold
from machines.model.step_record import MAX_OUTPUT_CHARS, MAX_STEP_TEXT_CHARS, StepState
from machines.model.windows import Freeze
from machines.states import Phase, Trigger
from rolloutd.errors import Conflict, StoreFailed
from rolloutd.ports import AuditEntry
from rolloutd.store import SqliteBackend, Store, open_store, writer
from rolloutd.store.sqlite import database
from rolloutd.store.writer import BatchWriter, Transaction
from tests.contracts.store_backends import (
    ALICE,
    moves_to_done,
    phase_moved,
    plan_of,
    rollout_opened,
    step,
    write,
)

ADMITTED = phase_moved("n1", Trigger.ADMITTED, Phase.PENDING, Phase.ISOLATING)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    made = await open_store(tmp_path, compile_plan=plan_of)
    yield made
    await made.close()


def hold(number: int, text: str = "") -> HoldTaken:
    return HoldTaken(Hold("n1", "test", str(number), ALICE, text, 1.0))


def freeze(number: int) -> FreezeStarted:
    return FreezeStarted(Freeze(str(number), "all", "", "alice", 1.0))


def bare(store: Store) -> closing[sqlite3.Connection]:
    """Open the store's file beside it, as somebody's shell would."""
    return closing(sqlite3.connect(store.backend.path, isolation_level=None, timeout=0))


# -- all or nothing, whoever is cancelled ------------------------------------------


@pytest.mark.parametrize("seed", range(3))
async def test_thousands_of_callers_some_in_conflict_some_cancelled(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    told: list[AuditEntry] = []
    store = await open_store(tmp_path, compile_plan=plan_of, on_commit=told.extend)
    answers: dict[int, object] = {}

    async def call(number: int) -> None:
        # The freeze's id is contested: whoever comes second must leave no hold behind.
        try:
            answers[number] = await write(store, hold(number), freeze(draw.randrange(1500)))
        except Conflict as conflict:
            answers[number] = conflict

    async with asyncio.TaskGroup() as group:
        for number in range(3000):
            task = group.create_task(call(number))
            if draw.random() < 0.2:
                asyncio.get_running_loop().call_later(draw.random() * 0.05, task.cancel)
            if draw.random() < 0.1:
                await asyncio.sleep(0)
    held = {int(kept.id) for kept in (await store.load_snapshot()).holds}
    frozen = await store.read_audit(event="FreezeStarted", limit=10_000)
    entries = await store.read_audit(limit=10_000)
    await store.close()

    written = {number for number, answer in answers.items() if isinstance(answer, tuple)}
    refused = {number for number, answer in answers.items() if isinstance(answer, Conflict)}
    assert written <= held
    assert not refused & held
    assert refused
    assert len(answers) < 3000
    # Two entries side by side for each hold that is there, none for any other.
    assert len(entries) == 2 * len(held) == 2 * len(frozen)
    for first, second in zip(entries[::2], entries[1::2], strict=True):
        assert [json.loads(each.text)["event"] for each in (first, second)] == ["HoldTaken", "FreezeStarted"]
    assert told == list(entries)
    assert SqliteBackend(store.backend.path).verify_chain().ok


async def test_a_cancelled_caller_misses_its_answer_and_nothing_else(store: Store) -> None:
    await write(store, rollout_opened())
    with bare(store) as other:
        other.execute("BEGIN IMMEDIATE")  # the writer now waits in its thread, for certain
        caller = asyncio.create_task(write(store, ADMITTED))
        follower = asyncio.create_task(write(store, hold(1)))
        for _ in range(3):
            await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        other.execute("COMMIT")
    await follower
    events = [json.loads(entry.text)["event"] for entry in await store.read_audit()]
    assert events == ["RolloutOpened", "PhaseMoved", "HoldTaken"]
    assert (await store.load_targets("r1"))[0].phase is Phase.ISOLATING


async def test_callers_wait_when_too_much_is_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_QUEUED", 4)
    store = await open_store(tmp_path, compile_plan=plan_of)
    await asyncio.gather(*(write(store, hold(number)) for number in range(50)))
    assert len(await store.read_audit()) == 50
    await store.close()


async def test_close_writes_what_was_handed_in_and_refuses_the_rest(tmp_path: Path) -> None:
    store = await open_store(tmp_path, compile_plan=plan_of)
    callers = [asyncio.create_task(write(store, hold(number))) for number in range(20)]
    await asyncio.sleep(0)
    await store.close()
    assert [len(entries) for entries in await asyncio.gather(*callers)] == [1] * 20
    with pytest.raises(StoreFailed, match="closed"):
        await write(store, hold(99))
    assert SqliteBackend(store.backend.path).verify_chain().entries == 20
    await store.close()  # closing what is closed is fine


async def test_nobody_waits_for_ever_when_the_writer_is_stopped(tmp_path: Path) -> None:
    store = await open_store(tmp_path, compile_plan=plan_of)
    (writer,) = (task for task in asyncio.all_tasks() if task.get_name() == "store-writer")
    with bare(store) as other:
        other.execute("BEGIN IMMEDIATE")
        callers = [asyncio.create_task(write(store, hold(number))) for number in range(3)]
        for _ in range(3):
            await asyncio.sleep(0)
        callers.append(asyncio.create_task(write(store, hold(9))))
        await asyncio.sleep(0)
        writer.cancel()
        answers = await asyncio.gather(*callers, return_exceptions=True)
        other.execute("COMMIT")
    assert all(isinstance(answer, StoreFailed) for answer in answers)
    assert "during the commit" in str(answers[0])
    assert "before the commit" in str(answers[3])
    with pytest.raises(StoreFailed):
        await write(store, hold(10))
    await store.close()


# -- a disk that fails -----------------------------------------------------------------


async def test_full_disk_changes_nothing_and_recovers(tmp_path: Path) -> None:
    store = await open_store(tmp_path, compile_plan=plan_of, inline=True)
    assert store._writer is not None
    connection = store._writer._batch_writer._connection
    await write(store, rollout_opened())
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages + 2}")
    remembered, head = await store.load_snapshot(), await store.latest_audit_entry()
    large = [RequestDenied(ALICE, "x" * 100_000, "", 1.0)]
    for _ in range(3):
        with pytest.raises(StoreFailed, match="no space is left") as full:
            await write(store, hold(1), *large)
        assert "free some" in str(full.value)
    assert await store.load_snapshot() == remembered
    assert await store.latest_audit_entry() == head
    connection.execute("PRAGMA max_page_count = 1000000")
    (_, entry) = await write(store, hold(1), *large)
    assert head is not None
    assert entry.seq == head.seq + 2
    await store.close()
    assert SqliteBackend(store.backend.path).verify_chain().ok


async def test_full_disk_keeps_small_transactions_of_batch(store: Store) -> None:
    assert store._writer is not None
    ledger = store._writer._batch_writer
    await write(store, rollout_opened())

    def limit(connection: sqlite3.Connection) -> None:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {pages + 2}")

    await store._writer._executor.run(limit)
    answers = await asyncio.gather(
        write(store, hold(1)),
        write(store, RequestDenied(ALICE, "x" * 100_000, "", 1.0)),
        write(store, hold(2)),
        return_exceptions=True,
    )
    assert isinstance(answers[1], StoreFailed)
    held = {int(kept.id) for kept in (await store.load_snapshot()).holds}
    assert held == {n for n, answer in ((1, answers[0]), (2, answers[2])) if isinstance(answer, tuple)}
    assert ledger.epoch == 1
    assert SqliteBackend(store.backend.path).verify_chain().ok


async def test_a_locked_database_is_named_and_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.01)
    store = await open_store(tmp_path, compile_plan=plan_of)
    with bare(store) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreFailed, match=r"keeps .* locked"):
            await write(store, hold(1))
        other.execute("ROLLBACK")
    (entry,) = await write(store, hold(1))
    assert entry.seq == 1
    await store.close()


async def test_a_damaged_file_is_named(store: Store) -> None:
    await write(store, rollout_opened(nodes=[f"n{number}" for number in range(500)]))
    with bare(store) as other:
        other.execute("PRAGMA writable_schema = ON")
        other.execute("UPDATE sqlite_schema SET rootpage = 2 WHERE name IN ('hold', 'node')")
        other.execute("PRAGMA schema_version = 99")
    with pytest.raises(StoreFailed) as damaged:
        await write(store, hold(1))
    assert "damaged" in str(damaged.value)
    assert "restore a backup" in str(damaged.value)
    with pytest.raises(StoreFailed):
        await store.load_snapshot()


async def test_unreadable_row_is_an_error_with_a_remedy(store: Store) -> None:
    await write(store, rollout_opened(), hold(1))
    with bare(store) as other:
        other.execute("UPDATE hold SET actor = '{}'")
    with pytest.raises(StoreFailed, match="cannot read"):
        await store.load_snapshot()


async def test_uncompilable_plan_error_names_its_rollout(store: Store) -> None:
    await write(store, rollout_opened())
    with bare(store) as other:
        other.execute("UPDATE rollout SET content = '{}'")
    with pytest.raises(StoreFailed, match="plan of rollout r1"):
        await store.load_snapshot()


# -- one writer ------------------------------------------------------------------------


async def test_writer_after_its_term_writes_nothing(store: Store) -> None:
    await write(store, rollout_opened())
    head = await store.latest_audit_entry()
    with bare(store) as other:
        BatchWriter(other, SqliteBackend(store.backend.path), holder="pid 7", since=1.0, key=b"k")
    with pytest.raises(StoreFailed, match="pid 7 has begun term"):
        await write(store, ADMITTED)
    assert await store.latest_audit_entry() == head
    assert (await store.load_targets("r1"))[0].phase is Phase.PENDING


def test_a_batch_answers_each_of_its_transactions(tmp_path: Path) -> None:
    path = tmp_path / "db"
    with closing(database.open_writer(path)) as connection:
        ledger = BatchWriter(connection, SqliteBackend(path), holder="me", since=0.0, key=b"k")
        first = Transaction((rollout_opened(),), ('{"a":1', '{"a":2'))
        twice = replace(first, audit_drafts=('{"a":3',))
        last = Transaction((hold(1),), ('{"a":4',))
        written, refused, after = ledger.write([first, twice, last])
        assert isinstance(written, tuple)
        assert isinstance(refused, Conflict)
        assert isinstance(after, tuple)
        assert [entry.seq for entry in (*written, *after)] == [1, 2, 3]
        assert SqliteBackend(path).verify_chain().ok


# -- limits ------------------------------------------------------------------------------


async def test_output_and_sentences_are_cut_and_half_characters_replaced(store: Store) -> None:
    await write(store, rollout_opened(), ADMITTED)
    long = step(StepState.FAILED, output="a" * 100_000 + "the end", text="t" * 10_000)
    await write(store, StepRecorded(long))
    (kept,) = await store.load_steps("r1", "n1")
    assert len(kept.output) == MAX_OUTPUT_CHARS
    assert kept.output.endswith("the end")
    assert len(kept.text) == MAX_STEP_TEXT_CHARS
    await write(store, hold(1, "half \ud800 a character"))
    assert (await store.load_snapshot()).holds[0].reason == "half ? a character"
    assert SqliteBackend(store.backend.path).verify_chain().ok


async def test_oversized_prior_state_refuses_the_step(store: Store) -> None:
    await write(store, rollout_opened(), ADMITTED)
    with pytest.raises(StoreFailed, match="the step was not begun"):
        await write(store, StepRecorded(step(StepState.INTENDED, prior="x" * 2_000_000)))
    for prior in (object(), float("nan")):
        with pytest.raises(StoreFailed, match="cannot be stored"):
            await write(store, StepRecorded(step(StepState.INTENDED, prior=prior)))
    with pytest.raises(StoreFailed):
        await write(store, StepRecorded(step(StepState.INTENDED, number=2**70)))
    assert await store.load_steps("r1", "n1") == ()


async def test_a_fleet_of_ten_thousand_is_loaded_whole(store: Store) -> None:
    nodes = [f"n{number}" for number in range(10_000)]
    await write(store, rollout_opened(nodes=nodes))
    await write(store, *moves_to_done("n17"))
    snapshot = await store.load_snapshot()
    assert [target.node for target in snapshot.targets] == nodes
    assert sum(target.phase is Phase.DONE for target in snapshot.targets) == 1
