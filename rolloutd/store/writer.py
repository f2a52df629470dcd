"""Writing half of the store: one task, its queue, and the synchronous SQL of a batch.

Tasks that share a connection would mix their transactions, and a cancelled `execute` still writes.  So
callers queue whole transactions for one task.  It commits the queued transactions in one batch and answers
after the commit.  A transaction of a cancelled caller is still written.

A batch shares one fsync.  Each of its transactions runs in a savepoint of its own, so a conflict rolls back
only that one.  The chain's head is read from the database inside each batch, because a batch that failed may
or may not be on disk.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from machines.facts.apply import count_rows, rollout_of
from machines.model.events import Event, RolloutOpened
from machines.model.rollout import Actor
from rolloutd.audit.audit_chain import GENESIS_HASH, hash_entry
from rolloutd.concurrency import threads
from rolloutd.errors import LeadershipLost, StoreFailed
from rolloutd.ports import AuditEntry
from rolloutd.store.audit_checkpoint import AuditCheckpoint
from rolloutd.store.audit_entries import add_sequence_number, draft_entries
from rolloutd.store.backend import Backend, Connection, Executor
from rolloutd.store.stored_rows import make_unstorable_error, write_events

MAX_BATCH = 256
"""Transactions per commit: they share one fsync, and no transaction waits behind a long batch."""

LARGE_TRANSACTION_ROWS = 100
"""Rows of events whose entries are made in a thread: each takes up to a tenth of a millisecond."""

MAX_QUEUED = 4096
"""Transactions without an answer; beyond that callers wait, and the queue does not grow."""

CommitCallback = Callable[[tuple[AuditEntry, ...]], object]
"""Gets the entries of each transaction, in order, once they are on disk."""

TransactionResult = tuple[AuditEntry, ...] | StoreFailed
"""The entries of one transaction, or the reason why it was rolled back."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """One caller's events, decided at `at`, and their audit entries without number and hash.

    `unaudited` writes what the audit has nothing of.
    """

    events: tuple[Event, ...] = ()
    audit_drafts: tuple[str, ...] = ()
    at: float = 0.0
    unaudited: Callable[[Connection], object] | None = None
    on_checkpoint: Callable[[AuditCheckpoint, AuditEntry], object] | None = None
    """Changes the checkpoint; gets the head of the transactions before."""


class BatchWriter:
    """Writes batches until another daemon begins a term."""

    def __init__(
        self, connection: Connection, backend: Backend, *, holder: str, since: float, key: bytes
    ) -> None:
        """Begin a term, which ends that of any other daemon; `key` signs.  Raises StoreFailed."""
        self._connection = connection
        self.checkpoint = AuditCheckpoint(connection, key)
        self.checkpoint.digests.follow_changes(backend)
        self._backend = backend
        self._refusals: tuple[type[Exception], ...] = (StoreFailed, OverflowError, *backend.errors)
        sql = f"UPDATE term SET epoch = {backend.next_epoch}, holder = ?, since = ? RETURNING epoch"  # noqa: S608
        try:
            # All rows are read: SQLite ends a RETURNING statement, and its lock, only after the last.
            (self.epoch,) = connection.execute(sql, (holder, since)).fetchall()[0]
        except backend.errors as error:
            raise backend.explain(error) from error
        self._written = self._head()
        backend.record_commit(self.epoch, self._written)

    def write(self, batch: Sequence[Transaction]) -> list[TransactionResult]:
        """Write the transactions and return one result for each; database errors are results."""
        try:
            while (results := self._try_write(batch)) is None:
                pass  # it is not in the database; each turn takes as long as the database was away
            return results
        except StoreFailed as error:
            # One exception for each caller: a shared one would collect the tracebacks of all callers.
            return [type(error)(*error.args) for _ in batch]
        except self._backend.errors as error:
            return [self._backend.explain(error) for _ in batch]

    def _try_write(self, batch: Sequence[Transaction]) -> list[TransactionResult] | None:
        """Return the results, None if the batch must be written again; raises StoreFailed, Backend.errors."""
        self._backend.check_writable(self._connection)
        before = head = AuditEntry(0, "", GENESIS_HASH)
        results: list[TransactionResult] = []
        is_committing = False
        try:
            with self._begin_transaction():
                before = head = self._head()
                if head.hash != self._written.hash:
                    raise LeadershipLost(
                        f"{self._backend.name}: its last entry is {head.seq}, not {self._written.seq} of this"
                        " daemon, as after a restore; nothing was written, inspect the nodes"
                    )
                self.checkpoint.begin(head)
                for transaction in batch:
                    result = self._run_in_savepoint(transaction, head)
                    if isinstance(result, tuple):
                        head = result[-1] if result else head
                    results.append(result)
                self.checkpoint.carry_on(head)
                is_committing = True
        except self._backend.errors:
            if not is_committing or not self._backend.is_in_doubt(self._connection):
                raise
        if self._backend.is_in_doubt(self._connection) and not self._is_committed(before, head):
            return None
        self._backend.record_commit(self.epoch, head)
        self._written = head
        return results

    def _is_committed(self, before: AuditEntry, head: AuditEntry) -> bool:
        """Return whether the chain ends with `head`, not with `before`, once the database answers again.

        Raises FactsBehind, and LeadershipLost if it ends with another entry.
        """
        while True:
            self._backend.await_database(self._connection)
            try:
                # It waits for what the server still does for the lost connection.  Its own commit confirms
                # that what it read is as safe as a commit is.
                with self._begin_transaction():
                    found = self._head()
            except self._backend.errors:
                # Also where the server refused or cancelled it: the outcome is as unknown as before.
                continue
            if found.hash == before.hash:
                return False
            if found.hash == head.hash:
                return True
            raise LeadershipLost(
                f"{self._backend.name}: entry {found.seq} is of another daemon; this one ends,"
                " see `rolloutctl audit`"
            )

    @contextmanager
    def _begin_transaction(self) -> Iterator[None]:
        execute = self._connection.execute
        try:
            # It may begin a transaction and fail then: the wait for the term's row has a limit.
            execute(self._backend.begin_write)
            yield
            execute("COMMIT")
        finally:
            # After some errors, such as a full disk, the database has already rolled back.
            if self._connection.in_transaction:
                execute("ROLLBACK")

    def _head(self) -> AuditEntry:
        """Return the chain's last entry; raises LeadershipLost when this writer's term has ended."""
        epoch, holder = self._connection.execute("SELECT epoch, holder FROM term").fetchone()
        if epoch != self.epoch:
            raise LeadershipLost(
                f"{self._backend.name}: {holder} has begun term {epoch}, this daemon's term {self.epoch} is"
                " over; nothing was written, stop one of the two daemons"
            )
        row = self._connection.execute("SELECT seq, '', hash FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
        return AuditEntry(*row) if row else AuditEntry(0, "", GENESIS_HASH)

    def _run_in_savepoint(self, transaction: Transaction, head: AuditEntry) -> TransactionResult:
        execute = self._connection.execute
        execute("SAVEPOINT one")
        mark = self.checkpoint.digests.mark()
        try:
            write_events(self._connection, transaction.events, transaction.at)
            if transaction.unaudited is not None:
                transaction.unaudited(self._connection)
            if transaction.on_checkpoint is not None:
                transaction.on_checkpoint(self.checkpoint, head)
            entries = self._append_audit_entries(transaction.audit_drafts, head)
        except self._refusals as error:
            # The database has rolled back the whole batch, so all of its transactions fail.
            if not self._connection.in_transaction:
                raise
            execute("ROLLBACK TO one")
            execute("RELEASE one")
            self.checkpoint.digests.forget_since(mark)
            if transaction.on_checkpoint is not None:
                self.checkpoint.abandon()
            return error if isinstance(error, StoreFailed) else self._backend.explain(error)
        execute("RELEASE one")
        return entries

    def _append_audit_entries(self, drafts: Sequence[str], head: AuditEntry) -> tuple[AuditEntry, ...]:
        entries: list[AuditEntry] = []
        for draft in drafts:
            text = add_sequence_number(draft, head.seq + 1)
            head = AuditEntry(head.seq + 1, text, hash_entry(head.hash, text))
            entries.append(head)
        self._backend.append_entries(self._connection, entries)
        return tuple(entries)


@dataclass(frozen=True, slots=True)
class _PendingWrite:
    transaction: Transaction
    digests: Mapping[str, str]
    future: asyncio.Future[tuple[AuditEntry, ...]]


class Writer:
    """The one task that writes, and its queue; `digests`: those of the known rollouts."""

    def __init__(
        self,
        executor: Executor,
        batch_writer: BatchWriter,
        digests: dict[str, str],
        on_commit: CommitCallback | None,
    ) -> None:
        self._executor = executor
        self._batch_writer = batch_writer
        self._digests = digests
        self._on_commit = on_commit
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
        if count_rows(events) < LARGE_TRANSACTION_ROWS:
            return await self._write(*self._translate(events, actor, cause, at))
        return await self._write(*await threads.COMPUTATIONS.run(self._translate, events, actor, cause, at))

    async def write_unaudited(self, execute: Callable[[Connection], object]) -> None:
        """Queue a transaction without audit entries and wait for its answer."""
        await self._write(Transaction(unaudited=execute), {})

    async def change_checkpoint(self, change: Callable[[AuditCheckpoint, AuditEntry], object]) -> None:
        await self._write(Transaction(on_checkpoint=change), {})

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
            await self._executor.close()
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
            raise make_unstorable_error(error) from error
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
                    work = partial(self._write_batch, [pending.transaction for pending in batch])
                    self._resolve(batch, await self._executor.run(work))
                    batch = []
        finally:
            # Something is left only after a cancellation or a bug; its callers must not wait forever.
            self._resolve(batch, [_make_stopped_error("during", "check the audit for it") for _ in batch])
            left = list(self._queue)
            self._queue.clear()
            self._resolve(left, [_make_stopped_error("before", "repeat the command") for _ in left])

    def _write_batch(self, batch: Sequence[Transaction], _: Connection) -> list[TransactionResult]:
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
                # Not called here: an error of the callback must not end the writer.
                asyncio.get_running_loop().call_soon(self._on_commit, result)
            if not write.future.done():
                write.future.set_result(result)


def _make_stopped_error(when: str, action: str) -> StoreFailed:
    return StoreFailed(f"database: the writer stopped {when} the commit; {action}")
