"""The Store port on SQLite: one writer task, one reading connection.

Tasks that share a connection would mix their transactions, and a cancelled
`execute` still writes.  So callers hand whole transactions to one task, which
commits what has piled up in one go and answers only then; a caller that is
cancelled meanwhile misses its answer and nothing else.

SQL is in statements.py, reading.py and ledger.py; here is only who waits for
whom.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from machines.book import Snapshot
from machines.events import Actor, Event, RolloutOpened, StepRecord
from machines.rollout import Rollout, Target
from rolloutd import chain
from rolloutd.errors import StoreFailed
from rolloutd.ports import JSON, ClosedRollout, Entry, Remembered
from rolloutd.store import database, reading
from rolloutd.store.entries import draft, rollout_of
from rolloutd.store.executors import Connect, Executor, open_inline, open_thread
from rolloutd.store.ledger import Answer, Ledger, Transaction
from rolloutd.store.lock import StateLock
from rolloutd.store.reading import Compile
from rolloutd.store.statement import Statement
from rolloutd.store.statements import statements

MAX_BATCH = 256
"""Transactions per commit: one fsync among so many costs each little, and none waits behind a long batch."""

MAX_WAITING = 4096
"""Transactions handed in and not answered; beyond that callers wait, instead of the queue growing."""

Committed = Callable[[tuple[Entry, ...]], object]
"""Is told of the entries of each transaction, in order, once they are on disk."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Order:
    """A transaction that waits for its turn, and who waits for the answer."""

    transaction: Transaction
    digests: Mapping[str, str]
    answer: asyncio.Future[tuple[Entry, ...]]


async def open_store(
    state_dir: Path,
    *,
    compile: Compile,  # noqa: A002  # the word of the port; the builtin has no business here
    committed: Committed | None = None,
    read_only: bool = False,
    inline: bool = False,
    now: Callable[[], float] = time.time,
    ready: Callable[[], object] | None = None,
) -> SqliteStore:
    """Open the store of a state directory, and take the tenure over unless `read_only`.

    `compile` makes plans of contents.  `committed` must not raise; it is called
    by the event loop.  `inline` runs the SQL in the caller, for simulations.
    `ready` is asked, in a thread, once the directory is ours; what it raises is
    raised, and whoever has the tenure keeps it.
    Raises AlreadyRunning when another daemon has the directory, StoreFailed.
    """
    path = state_dir / database.FILE_NAME
    open_executor = open_inline if inline else open_thread
    if read_only:
        return SqliteStore(path, await open_executor(partial(database.open_reader, path)), compile)
    lock = _locked(state_dir, now())
    try:
        if ready is not None:
            await asyncio.to_thread(ready)
        return await _open_writing(path, open_executor, compile, committed, lock, now())
    except BaseException:
        lock.release()
        raise


class SqliteStore:
    """What is remembered, in one SQLite file; see the port for what the methods promise."""

    def __init__(
        self, path: Path, reader: Executor, compile_plan: Compile, writer: _Writer | None = None
    ) -> None:
        self.path = path
        self._reader = reader
        self._compile = compile_plan
        self._writer = writer

    # -- writing

    async def commit(
        self, events: Sequence[Event], *, actor: Actor, cause: str, at: float
    ) -> tuple[Entry, ...]:
        """Write the events and their audit entries in one transaction, or nothing."""
        if self._writer is None:
            raise StoreFailed(f"{self.path} was opened for reading only")
        return await self._writer.commit(events, actor, cause, at)

    async def close(self) -> None:
        """Finish what was handed in, then close and give the state directory free."""
        try:
            await self._reader.close()
        finally:
            if self._writer is not None:
                await self._writer.close()

    # -- reading

    async def load(self) -> Snapshot:
        """Return everything the core decides from."""
        return await self._read(lambda connection: reading.snapshot(connection, self._compile))

    async def rollout(self, rollout: str) -> Rollout:
        """Return one rollout, also a closed one."""
        return await self._read(lambda connection: reading.rollout_of(connection, rollout, self._compile))

    async def targets(self, rollout: str) -> Sequence[Target]:
        """Return the targets of one rollout in their order."""
        return await self._read(lambda connection: reading.targets_of(connection, rollout))

    async def closed_rollouts(self, limit: int = 100) -> Sequence[ClosedRollout]:
        """Return closed rollouts, latest first."""
        return await self._read(lambda connection: reading.closed_of(connection, limit))

    async def remembered(self) -> Sequence[Remembered]:
        """Return every rollout that was ever submitted."""
        return await self._read(reading.remembered_of)

    async def content(self, rollout: str) -> tuple[Mapping[str, JSON], Mapping[str, str]]:
        """Return a rollout's content and what was pinned."""
        return await self._read(lambda connection: reading.content_of(connection, rollout))

    async def connections(self) -> Mapping[str, Mapping[str, JSON]]:
        """Return how each node is reached."""
        return await self._read(reading.connections_of)

    async def find_identical(self, change: str, selector_digest: str, policy: str) -> str | None:
        """Return the latest rollout of the same content."""
        return await self._read(
            lambda connection: reading.identical_of(connection, change, selector_digest, policy)
        )

    async def done_before(self, change: str) -> frozenset[str]:
        """Return the nodes that some rollout brought to this change, or found there."""
        return await self._read(lambda connection: reading.done_of(connection, change))

    async def steps(self, rollout: str, node: str, attempt: int | None = None) -> Sequence[StepRecord]:
        """Return the step records of a node, oldest first."""
        return await self._read(lambda connection: reading.steps_of(connection, rollout, node, attempt))

    async def unclean(self, node: str) -> bool:
        """Say whether a run on the node is not known to have ended and was not cleared since."""
        return await self._read(lambda connection: reading.unclean_of(connection, node))

    async def audit(
        self,
        *,
        after: int = 0,
        limit: int = 1000,
        rollout: str | None = None,
        node: str | None = None,
        event: str | None = None,
    ) -> Sequence[Entry]:
        """Return entries with a sequence number greater than `after`, oldest first."""
        return await self._read(
            lambda connection: reading.audit_of(
                connection, after, limit, rollout=rollout, node=node, event=event
            )
        )

    async def head(self) -> Entry | None:
        """Return the latest audit entry."""
        return await self._read(reading.head_of)

    async def verify(self, head: str | None = None) -> chain.Verdict:
        """Check the chain on a connection of its own, beside everything else that is read."""
        try:
            return await asyncio.to_thread(chain.verify, self.path, head)
        except FileNotFoundError as error:
            raise StoreFailed(f"{self.path} is gone: stop the daemon and restore a backup") from error

    async def is_spent(self, token: str) -> bool:
        """Say whether a vote came by this token already."""
        return await self._read(lambda connection: reading.is_spent(connection, token))

    async def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return await self._reader.run(query)
        except database.BROKEN as error:
            raise database.failure(error, self.path) from error
        except (KeyError, TypeError, ValueError) as error:
            raise StoreFailed(
                f"{self.path} holds something that this version cannot read ({error!r}): start the version"
                " that wrote it, or restore a backup"
            ) from error


class _Writer:
    """The one task that writes, and the queue before it."""

    def __init__(
        self,
        executor: Executor,
        ledger: Ledger,
        digests: dict[str, str],
        committed: Committed | None,
        lock: StateLock,
    ) -> None:
        self._executor = executor
        self._ledger = ledger
        self._digests = digests
        self._committed = committed
        self._lock = lock
        self._room = asyncio.Semaphore(MAX_WAITING)
        self._bell = asyncio.Event()
        self._waiting: deque[_Order] = deque()
        self._closing = False
        # Its parent is the store: close() waits for it, and what it dies of is what close() raises.
        self._task = asyncio.create_task(self._write_on(), name="store-writer")

    async def commit(self, events: Sequence[Event], actor: Actor, cause: str, at: float) -> tuple[Entry, ...]:
        """Hand a transaction in and wait for its answer."""
        transaction, digests = self._translated(events, actor, cause, at)
        await self._room.acquire()
        if self._closing or self._task.done():
            self._room.release()
            raise StoreFailed("the store is closed: nothing was written; start the daemon again")
        answer: asyncio.Future[tuple[Entry, ...]] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Order(transaction, digests, answer))
        self._bell.set()
        return await answer

    async def close(self) -> None:
        """Write what was handed in, then end."""
        self._closing = True
        self._bell.set()
        try:
            await asyncio.wait((self._task,))
        finally:
            try:
                await self._executor.close()
            finally:
                self._lock.release()
        if not self._task.cancelled():
            self._task.result()

    def _translated(
        self, events: Sequence[Event], actor: Actor, cause: str, at: float
    ) -> tuple[Transaction, dict[str, str]]:
        rows: list[Statement] = []
        drafts: list[str] = []
        opened: dict[str, str] = {}
        try:
            for event in events:
                if isinstance(event, RolloutOpened):
                    opened[event.rollout] = event.digest.whole
                rollout = rollout_of(event)
                digest = opened.get(rollout) or self._digests.get(rollout) if rollout else None
                rows.extend(statements(event, at))
                drafts.extend(draft(event, actor=actor, cause=cause, at=at, digest=digest))
        except (TypeError, ValueError) as error:
            raise StoreFailed(f"nothing was written: what happened cannot be kept ({error})") from error
        return Transaction(tuple(rows), tuple(drafts)), opened

    async def _write_on(self) -> None:
        batch: list[_Order] = []
        try:
            while self._waiting or not self._closing:
                if not self._waiting:
                    self._bell.clear()
                    await self._bell.wait()
                batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
                if batch:
                    work = partial(self._written, [order.transaction for order in batch])
                    self._answer(batch, await self._executor.run(work))
                    batch = []
        finally:
            # Only a cancelled task or a bug leaves anything here; nobody shall wait for ever.
            self._answer(batch, [_stopped("it may have been written: look at the audit") for _ in batch])
            left = list(self._waiting)
            self._waiting.clear()
            self._answer(left, [_stopped("it was not written") for _ in left])

    def _written(self, batch: Sequence[Transaction], _: sqlite3.Connection) -> list[Answer]:
        return self._ledger.write(batch)

    def _answer(self, orders: Sequence[_Order], answers: Sequence[Answer]) -> None:
        for order, answer in zip(orders, answers, strict=True):
            self._room.release()
            if isinstance(answer, StoreFailed):
                if not order.answer.done():
                    order.answer.set_exception(answer)
                continue
            self._digests.update(order.digests)
            if self._committed is not None and answer:
                asyncio.get_running_loop().call_soon(self._committed, answer)
            if not order.answer.done():
                order.answer.set_result(answer)


def _stopped(what: str) -> StoreFailed:
    return StoreFailed(f"the store was stopped before it could answer; {what}")


def _locked(state_dir: Path, since: float) -> StateLock:
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreFailed(
            f"the state directory {state_dir} cannot be made ({error}): name another one"
        ) from error
    _mind_owner(state_dir)
    return StateLock(state_dir, since)


def _mind_owner(state_dir: Path) -> None:
    """Refuse a directory in which others could put playbooks or a database of theirs in the place of ours."""
    found = state_dir.stat()
    if found.st_mode & 0o022:
        mode = f"{found.st_mode & 0o777:o}"
        raise StoreFailed(
            f"others may write to the state directory {state_dir} (mode {mode}): chmod 700 {state_dir}"
        )
    if found.st_uid not in (os.geteuid(), 0):
        raise StoreFailed(
            f"the state directory {state_dir} belongs to uid {found.st_uid} and we are uid {os.geteuid()}:"
            " start rolloutd as its owner, or name another one"
        )


async def _open_writing(
    path: Path,
    open_executor: Callable[[Connect], Awaitable[Executor]],
    compile_plan: Compile,
    committed: Committed | None,
    lock: StateLock,
    since: float,
) -> SqliteStore:
    writing = await open_executor(partial(database.open_writer, path))
    try:
        holder = f"pid {os.getpid()} on {os.uname().nodename}"
        ledger = await writing.run(lambda connection: Ledger(connection, path, holder=holder, since=since))
        reader = await open_executor(partial(database.open_reader, path))
        store = SqliteStore(path, reader, compile_plan)
        try:
            digests = await store._read(reading.digests_of)
        except BaseException:
            await reader.close()
            raise
    except BaseException:
        await writing.close()
        raise
    store._writer = _Writer(writing, ledger, digests, committed, lock)
    return store
