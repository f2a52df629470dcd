"""The Store port on SQLite: one writer task, one reading connection.

Tasks that share a connection would mix their transactions, and a cancelled `execute` still writes.  So
callers queue whole transactions for one task.  It commits the queued transactions in one batch and answers
after the commit.  A transaction of a cancelled caller is still written.

The SQL is in tables.py, queries.py and batch_writer.py; this file only queues and answers.
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
from typing import Concatenate, ParamSpec, TypeVar

from machines.facts.apply import rollout_of
from machines.facts.fleet_facts import FactsSnapshot
from machines.model.events import Actor, Event, RolloutOpened, StepRecord
from machines.model.preparation import Preparation
from machines.model.rollout import Rollout, Target
from machines.model.verdict import Verdict
from rolloutd.errors import StoreFailed
from rolloutd.ports import (
    JSON,
    AuditEntry,
    AuditReport,
    ClosedRollout,
    NodeConfigurations,
    RolloutRecord,
    SourceAnswer,
)
from rolloutd.store import cleaning_queries, database, queries
from rolloutd.store.audit_comparison import compare_with_audit
from rolloutd.store.audit_entries import draft_entries
from rolloutd.store.batch_writer import BatchWriter, Transaction, TransactionResult, write_source_answer
from rolloutd.store.commit_mark import require_newest
from rolloutd.store.executors import ConnectionFactory, Executor, open_inline_executor, open_thread_executor
from rolloutd.store.lock import StateLock
from rolloutd.store.queries import PlanCompiler

MAX_BATCH = 256
"""Transactions per commit: they share one fsync, and no transaction waits behind a long batch."""

MAX_QUEUED = 4096
"""Transactions without an answer; beyond that callers wait, and the queue does not grow."""

CommitCallback = Callable[[tuple[AuditEntry, ...]], object]
"""Gets the entries of each transaction, in order, once they are on disk."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _PendingWrite:
    """A transaction in the queue, and the future of its caller."""

    transaction: Transaction
    digests: Mapping[str, str]
    future: asyncio.Future[tuple[AuditEntry, ...]]


async def open_store(
    state_dir: Path,
    *,
    compile_plan: PlanCompiler,
    on_commit: CommitCallback | None = None,
    read_only: bool = False,
    inline: bool = False,
    now: Callable[[], float] = time.time,
    check_ready: Callable[[], object] | None = None,
) -> SqliteStore:
    """Open the store of a state directory, and begin a term unless `read_only`.

    `compile_plan` compiles stored plans.  The event loop calls `on_commit`, which must not raise.  `inline`
    runs the SQL in the caller, for simulations.  `check_ready` runs in a thread once the directory is locked;
    its error is raised, and no new term begins.
    Raises AlreadyRunning when another daemon has the directory, StoreFailed.
    """
    path = state_dir / database.FILE_NAME
    open_executor = open_inline_executor if inline else open_thread_executor
    if read_only:
        return SqliteStore(path, await open_executor(partial(database.open_reader, path)), compile_plan)
    lock = _lock_state_dir(state_dir, now())
    try:
        if check_ready is not None:
            await asyncio.to_thread(check_ready)
        return await _open_for_writing(path, open_executor, compile_plan, on_commit, lock, now())
    except BaseException:
        lock.release()
        raise


class SqliteStore:
    """The port Store in one SQLite file."""

    def __init__(
        self, path: Path, reader: Executor, compile_plan: PlanCompiler, writer: _Writer | None = None
    ) -> None:
        self.path = path
        self._reader = reader
        self._compile_plan = compile_plan
        self._writer = writer

    # -- writing

    async def commit(
        self, events: Sequence[Event], *, actor: Actor, cause: str, at: float
    ) -> tuple[AuditEntry, ...]:
        """Write the events and their audit entries in one transaction, or nothing."""
        if self._writer is None:
            raise StoreFailed(f"{self.path} was opened for reading only")
        return await self._writer.commit(events, actor, cause, at)

    async def save_source_answer(self, answer: SourceAnswer, removed: Sequence[str] = ()) -> None:
        if self._writer is None:
            raise StoreFailed(f"{self.path} was opened for reading only")
        await self._writer.write_unaudited(
            partial(write_source_answer, answer=answer, removed=tuple(removed))
        )

    async def remove_unused_documents(self) -> None:
        if self._writer is None:
            raise StoreFailed(f"{self.path} was opened for reading only")
        await self._writer.write_unaudited(cleaning_queries.remove_unused_documents)

    async def close(self) -> None:
        """Finish the queued transactions, then close and unlock the state directory."""
        try:
            await self._reader.close()
        finally:
            if self._writer is not None:
                await self._writer.close()

    # -- reading

    async def load_snapshot(self) -> FactsSnapshot:
        return await self._read(queries.load_snapshot, self._compile_plan)

    async def load_rollout(self, rollout: str) -> Rollout:
        return await self._read(queries.load_rollout, rollout, self._compile_plan)

    async def load_preparations(self, rollout: str) -> Sequence[Preparation]:
        return await self._read(queries.load_preparations, rollout)

    async def load_targets(self, rollout: str) -> Sequence[Target]:
        return await self._read(queries.load_targets, rollout)

    async def list_closed_rollouts(self, limit: int = 100) -> Sequence[ClosedRollout]:
        return await self._read(queries.load_closed_rollouts, limit)

    async def list_rollout_records(self) -> Sequence[RolloutRecord]:
        return await self._read(queries.load_rollout_records)

    async def list_uncleaned_nodes(self, ended_after: float, ended_before: float) -> Sequence[str]:
        return await self._read(cleaning_queries.list_uncleaned_nodes, ended_after, ended_before)

    async def find_changes_in_effect(self, node: str, rollouts: Sequence[str]) -> Mapping[str, bool]:
        return await self._read(cleaning_queries.find_changes_in_effect, node, rollouts)

    async def load_plan(self, rollout: str) -> tuple[Mapping[str, JSON], Mapping[str, str]]:
        return await self._read(queries.load_content, rollout)

    async def load_connections(self) -> Mapping[str, Mapping[str, JSON]]:
        return await self._read(queries.load_connections)

    async def load_source_answers(self) -> Sequence[SourceAnswer]:
        return await self._read(queries.load_source_answers)

    async def find_identical(self, change: str, selector_digest: str, policy: str) -> str | None:
        return await self._read(queries.find_identical, change, selector_digest, policy)

    async def find_nodes_with_change(self, change: str) -> frozenset[str]:
        return await self._read(queries.load_done_nodes, change)

    async def find_later_changes(self, rollout: str) -> Mapping[str, str]:
        return await self._read(queries.load_later_changes, rollout)

    async def load_steps(self, rollout: str, node: str, attempt: int | None = None) -> Sequence[StepRecord]:
        return await self._read(queries.load_steps, rollout, node, attempt)

    async def load_configurations(self, nodes: Sequence[str]) -> NodeConfigurations:
        return await self._read(queries.load_configurations, nodes)

    async def list_expired_configurations(self, gone_before: float) -> Sequence[str]:
        return await self._read(cleaning_queries.list_expired_configurations, gone_before)

    async def load_verdicts(self) -> Sequence[Verdict]:
        return await self._read(queries.load_verdicts)

    async def has_unfinished_run(self, node: str) -> bool:
        return await self._read(queries.has_unfinished_run, node)

    async def read_audit(
        self,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int = 1000,
        rollout: str | None = None,
        node: str | None = None,
        event: str | None = None,
    ) -> Sequence[AuditEntry]:
        return await self._read(
            lambda connection: queries.load_audit(
                connection, after, before, limit, event, rollout=rollout, node=node
            )
        )

    async def latest_audit_entry(self) -> AuditEntry | None:
        return await self._read(queries.load_head)

    async def verify_audit(self, head: str | None = None) -> AuditReport:
        """Verify on a connection of its own, so that other reads need not wait."""
        try:
            return await asyncio.to_thread(compare_with_audit, self.path, head)
        except FileNotFoundError as error:
            raise StoreFailed(f"{self.path} is gone: stop the daemon and restore a backup") from error

    async def is_token_used(self, token: str) -> bool:
        return await self._read(queries.is_token_used, token)

    async def _read(
        self, query: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        try:
            return await self._reader.run(lambda connection: query(connection, *args, **kwargs))
        except database.DATABASE_ERRORS as error:
            raise database.explain_failure(error, self.path) from error
        except (KeyError, TypeError, ValueError) as error:
            raise StoreFailed(
                f"{self.path} holds something that this version cannot read ({error!r}): start the version"
                " that wrote it, or restore a backup"
            ) from error


class _Writer:
    """The one task that writes, and its queue."""

    def __init__(
        self,
        executor: Executor,
        batch_writer: BatchWriter,
        digests: dict[str, str],
        on_commit: CommitCallback | None,
        lock: StateLock,
    ) -> None:
        self._executor = executor
        self._batch_writer = batch_writer
        self._digests = digests
        self._on_commit = on_commit
        self._lock = lock
        self._capacity = asyncio.Semaphore(MAX_QUEUED)
        self._wakeup = asyncio.Event()
        self._queue: deque[_PendingWrite] = deque()
        self._is_closing = False
        # The store owns this task: close() waits for it and raises its error.
        self._task = asyncio.create_task(self._run(), name="store-writer")

    async def commit(
        self, events: Sequence[Event], actor: Actor, cause: str, at: float
    ) -> tuple[AuditEntry, ...]:
        """Queue a transaction and wait for its answer."""
        return await self._write(*self._translate(events, actor, cause, at))

    async def write_unaudited(self, execute: Callable[[sqlite3.Connection], object]) -> None:
        """Queue a transaction without audit entries and wait for its answer."""
        await self._write(Transaction(unaudited=execute), {})

    async def _write(self, transaction: Transaction, digests: dict[str, str]) -> tuple[AuditEntry, ...]:
        await self._capacity.acquire()
        if self._is_closing or self._task.done():
            self._capacity.release()
            raise StoreFailed("the store is closed: nothing was written; start the daemon again")
        future: asyncio.Future[tuple[AuditEntry, ...]] = asyncio.get_running_loop().create_future()
        self._queue.append(_PendingWrite(transaction, digests, future))
        self._wakeup.set()
        return await future

    async def close(self) -> None:
        """Write the queued transactions, then end."""
        self._is_closing = True
        self._wakeup.set()
        try:
            await asyncio.wait((self._task,))
        finally:
            try:
                await self._executor.close()
            finally:
                self._lock.release()
        if not self._task.cancelled():
            self._task.result()

    def _translate(
        self, events: Sequence[Event], actor: Actor, cause: str, at: float
    ) -> tuple[Transaction, dict[str, str]]:
        drafts: list[str] = []
        opened: dict[str, str] = {}
        try:
            for event in events:
                if isinstance(event, RolloutOpened):
                    opened[event.rollout] = event.digest.whole
                rollout = rollout_of(event)
                digest = opened.get(rollout) or self._digests.get(rollout) if rollout else None
                drafts.extend(draft_entries(event, actor=actor, cause=cause, at=at, digest=digest))
        except (TypeError, ValueError) as error:
            raise StoreFailed(f"nothing was written: what happened cannot be kept ({error})") from error
        return Transaction(tuple(events), tuple(drafts), at), opened

    async def _run(self) -> None:
        batch: list[_PendingWrite] = []
        try:
            while self._queue or not self._is_closing:
                if not self._queue:
                    self._wakeup.clear()
                    await self._wakeup.wait()
                batch = [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
                if batch:
                    work = partial(self._write_batch, [order.transaction for order in batch])
                    self._resolve(batch, await self._executor.run(work))
                    batch = []
        finally:
            # Something is left only after a cancellation or a bug; its callers must not wait forever.
            self._resolve(
                batch, [_make_stopped_error("it may have been written: look at the audit") for _ in batch]
            )
            left = list(self._queue)
            self._queue.clear()
            self._resolve(left, [_make_stopped_error("it was not written") for _ in left])

    def _write_batch(self, batch: Sequence[Transaction], _: sqlite3.Connection) -> list[TransactionResult]:
        return self._batch_writer.write(batch)

    def _resolve(self, writes: Sequence[_PendingWrite], results: Sequence[TransactionResult]) -> None:
        for write, result in zip(writes, results, strict=True):
            self._capacity.release()
            if isinstance(result, StoreFailed):
                if not write.future.done():
                    write.future.set_exception(result)
                continue
            self._digests.update(write.digests)
            if self._on_commit is not None and result:
                asyncio.get_running_loop().call_soon(self._on_commit, result)
            if not write.future.done():
                write.future.set_result(result)


def _make_stopped_error(what: str) -> StoreFailed:
    return StoreFailed(f"the store was stopped before it could answer; {what}")


def _lock_state_dir(state_dir: Path, since: float) -> StateLock:
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreFailed(
            f"the state directory {state_dir} cannot be made ({error}): name another one"
        ) from error
    _require_private_directory(state_dir)
    return StateLock(state_dir, since)


def _require_private_directory(state_dir: Path) -> None:
    """Refuse a directory in which other users could replace playbooks or the database."""
    status = state_dir.stat()
    if status.st_mode & 0o022:
        mode = f"{status.st_mode & 0o777:o}"
        raise StoreFailed(
            f"others may write to the state directory {state_dir} (mode {mode}): chmod 700 {state_dir}"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise StoreFailed(
            f"the state directory {state_dir} belongs to uid {status.st_uid} and we are uid {os.geteuid()}:"
            " start rolloutd as its owner, or name another one"
        )


async def _open_for_writing(
    path: Path,
    open_executor: Callable[[ConnectionFactory], Awaitable[Executor]],
    compile_plan: PlanCompiler,
    on_commit: CommitCallback | None,
    lock: StateLock,
    since: float,
) -> SqliteStore:
    require_newest(path)
    writing = await open_executor(partial(database.open_writer, path))
    try:
        holder = f"pid {os.getpid()} on {os.uname().nodename}"
        ledger = await writing.run(
            lambda connection: BatchWriter(connection, path, holder=holder, since=since)
        )
        reader = await open_executor(partial(database.open_reader, path))
        store = SqliteStore(path, reader, compile_plan)
        try:
            digests = await store._read(queries.load_digests)
        except BaseException:
            await reader.close()
            raise
    except BaseException:
        await writing.close()
        raise
    store._writer = _Writer(writing, ledger, digests, on_commit, lock)
    return store
