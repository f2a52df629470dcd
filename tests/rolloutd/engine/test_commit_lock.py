"""The order of commits: which are written together, and which wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from machines.model.events import Event, PreparationRecorded, StepRecorded
from machines.model.preparation import Preparation, PreparationState
from machines.states import Trigger
from rolloutd.engine.commit_lock import MAX_SHARING, CommitLock
from rolloutd.store import open_store
from rolloutd.store.writer import BatchWriter, Transaction
from tests.rolloutd.control_environment import control_environment
from tests.rolloutd.preparation_environment import plan_with


class Holder:
    """A task that holds the lock from its turn until it is released."""

    def __init__(self, lock: CommitLock, *nodes: str) -> None:
        self.has_lock, self._end = False, asyncio.Event()
        self.task = asyncio.create_task(self._hold(lock, nodes))

    async def _hold(self, lock: CommitLock, nodes: Sequence[str]) -> None:
        async with lock.held(nodes):
            self.has_lock = True
            await self._end.wait()

    async def release(self) -> None:
        self._end.set()
        await self.task
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_different_nodes_share_the_lock() -> None:
    lock = CommitLock()
    first, other, same = Holder(lock, "a"), Holder(lock, "b"), Holder(lock, "a")
    await settle()
    assert [first.has_lock, other.has_lock, same.has_lock] == [True, True, False]
    await first.release()
    assert same.has_lock
    await same.release()
    await other.release()


async def test_exclusive_holder_is_alone_and_in_turn() -> None:
    lock = CommitLock()
    first, alone, later = Holder(lock, "a"), Holder(lock), Holder(lock, "b")
    await settle()
    assert [alone.has_lock, later.has_lock] == [False, False], "a stream of steps delays no decision"
    await first.release()
    assert [alone.has_lock, later.has_lock] == [True, False]
    await alone.release()
    assert later.has_lock
    await later.release()


async def test_cancelled_waiter_delays_no_other() -> None:
    lock = CommitLock()
    first, alone, later = Holder(lock, "a"), Holder(lock), Holder(lock, "b")
    await settle()
    alone.task.cancel()
    await settle()
    assert later.has_lock
    waiting = Holder(lock)
    await settle()
    first._end.set()
    later._end.set()
    await asyncio.wait((first.task, later.task))
    waiting.task.cancel()  # it has its turn, and has not noticed
    await settle()
    async with lock.held():
        pass


async def test_sharing_is_limited() -> None:
    lock = CommitLock()
    async with AsyncExitStack() as held:
        for number in range(MAX_SHARING):
            await held.enter_async_context(lock.held([str(number)]))
        late = Holder(lock, "late")
        await settle()
        assert not late.has_lock
    await settle()
    assert late.has_lock
    await late.release()


@pytest.mark.parametrize("kind", ["step", "stage"])
async def test_steps_of_several_nodes_share_a_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    batches: list[int] = []
    write = BatchWriter.write

    def count(self: BatchWriter, batch: Sequence[Transaction]) -> Any:
        batches.append(len(batch))
        return write(self, batch)

    async def open_database(compile_content: Any) -> Any:
        return await open_store(tmp_path / "state", compile_plan=compile_content)

    async with control_environment(tmp_path, store=open_database) as inside:
        rollout = await inside.start(**({"text": plan_with("one")} if kind == "stage" else {}))
        events: list[Event] = []
        for node in ("p1", "s1"):
            if kind == "stage":
                row = Preparation(rollout, node, "one", 1, PreparationState.SKIPPED, "", at=0.0, began_at=0.0)
                events.append(PreparationRecorded(row))
            else:
                await inside.transition(rollout, node, Trigger.ADMITTED)
                events.append(StepRecorded(inside.step(rollout, node, "isolate.0.command"), isolated=True))
        monkeypatch.setattr(BatchWriter, "write", count)
        entries = await asyncio.gather(*(inside.state.commit([each], cause="test") for each in events))
        assert batches == [2]
        assert [len(each) for each in entries] == [1, 1]
        if kind == "step":
            assert all(inside.state.index.target(rollout, node).isolated for node in ("p1", "s1"))
