"""The store on one database: one writer task, one reading connection.

The SQL of the redaction key's row is here, other SQL in the other files of this folder; that of one database,
such as the INSERT of audit entries, is in its backend.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from machines.facts.fleet_facts import FactsSnapshot
from machines.model.events import Event
from machines.model.rollout import Actor, Rollout
from rolloutd import ports
from rolloutd.concurrency import threads
from rolloutd.errors import NotFound, StoreFailed
from rolloutd.store import audit_base, previous_rollout, queries, retention_queries
from rolloutd.store.audit_base import NewBase
from rolloutd.store.audit_checkpoint import AuditCheckpoint, verify_audit_checkpoint
from rolloutd.store.audit_comparison import compare_with_audit, make_base
from rolloutd.store.backend import Backend, Connection, Executor
from rolloutd.store.queries import PlanCompiler
from rolloutd.store.stored_rows import write_source_answer
from rolloutd.store.writer import BatchWriter, CommitCallback, Writer

P = ParamSpec("P")
T = TypeVar("T")


def _query(
    function: Callable[Concatenate[Connection, P], T],
) -> Callable[Concatenate[Store, P], Coroutine[Any, Any, T]]:
    async def read(self: Store, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._read(function, *args, **kwargs)

    return read


def measure_volume(backend: Backend, connection: Connection, now: float) -> ports.StoredVolume:
    file_bytes, free_bytes = backend.file_sizes(connection)
    return replace(
        retention_queries.measure(connection, now),
        file_bytes=file_bytes,
        free_bytes=free_bytes,
        exported_entries=audit_base.load_base(connection).seq,
    )


REDACTION_KEY = "redaction_key"
"""Row of `meta` with the fingerprint of the key of sealed variables and digests."""


def _require_redaction_key(connection: Connection, fingerprint: str) -> None:
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (REDACTION_KEY,)).fetchone()
    if row is None:
        connection.execute("INSERT INTO meta (key, value) VALUES (?, ?)", (REDACTION_KEY, fingerprint))
    elif row[0] != fingerprint:
        raise StoreFailed(
            "redaction key: it is not the key of this store; copy that of the first daemon, or name it with"
            " `redaction_key_file`"
        )


class Store:
    """Rollouts, targets, steps, votes, holds and their audit; without a writer it is read-only.

    Every method raises StoreFailed if the database cannot be read or written.
    """

    def __init__(
        self, backend: Backend, reader: Executor, compile_plan: PlanCompiler, writer: Writer | None = None
    ) -> None:
        self.backend = backend
        self._reader = reader
        self._compile_plan = compile_plan
        self._writer = writer
        self._key = b""
        self._is_stopping = threading.Event()

    @classmethod
    async def open(
        cls,
        backend: Backend,
        compile_plan: PlanCompiler,
        *,
        on_commit: CommitCallback | None = None,
        now: Callable[[], float] = time.time,
        name: str = "",
    ) -> Store:
        """Open a database for writing and begin a term."""
        writing = await backend.open_writer()
        try:
            key = backend.load_signing_key()
            holder = f"{name or os.uname().nodename} (pid {os.getpid()})"
            batch_writer = await writing.run(
                lambda connection: BatchWriter(connection, backend, holder=holder, since=now(), key=key)
            )
            store = cls(backend, await backend.open_reader(), compile_plan)
            try:
                digests = await store._read(queries.load_digests)
            except BaseException:
                await store.close()
                raise
        # A cancelled start too: the connection's thread would keep the process alive.
        except BaseException:
            await writing.close()
            raise
        store._writer, store._key = Writer(writing, batch_writer, digests, on_commit), key
        return store

    # -- writing

    async def commit(
        self, events: Sequence[Event], *, actor: Actor, cause: str, at: float
    ) -> tuple[ports.AuditEntry, ...]:
        """Write the events and their audit entries in one transaction and return the entries in order.

        There is at least one entry per event.  Raises Conflict if a row differs from an event's precondition,
        and StoreFailed also if this daemon's term has ended.  A cancellation of the caller does not split the
        events.
        """
        return await self._require_writer().commit(events, actor, cause, at)

    async def save_source_answer(self, answer: ports.SourceAnswer, removed: Sequence[str] = ()) -> None:
        """Store the new and changed nodes of a source's answer, and drop the `removed` ones.

        The audit has no entry of it: it has the nodes that are made of all answers.
        """
        await self._require_writer().write_unaudited(
            partial(write_source_answer, answer=answer, removed=tuple(removed))
        )

    async def keep_forecast(self, kept: ports.KeptForecast) -> None:
        await self._require_writer().write_unaudited(partial(queries.keep_forecast, kept=kept))

    async def require_term(self) -> None:
        """Raise LeadershipLost if another daemon has begun a term: this one must act on no node any more."""
        await self._require_writer().write_unaudited(lambda connection: None)

    async def require_redaction_key(self, fingerprint: str) -> None:
        """Note the fingerprint of the key, or raise StoreFailed if the store's rows are of another key."""
        await self._require_writer().write_unaudited(partial(_require_redaction_key, fingerprint=fingerprint))

    async def take_over_runs(self, machine: str) -> frozenset[str]:
        nodes: list[frozenset[str]] = []
        await self._require_writer().write_unaudited(
            lambda connection: nodes.append(retention_queries.take_over_runs(connection, machine))
        )
        return nodes[-1]  # a write whose connection was lost is repeated

    async def remove_unused_documents(self) -> None:
        await self._require_writer().write_unaudited(retention_queries.remove_unused_documents)

    async def sign_audit_checkpoint(
        self, verified_at: float | None = None, *, all_rows: bool = False
    ) -> None:
        """Note in the checkpoint which rollouts are live, and when the whole audit was verified.

        `all_rows` signs all rows as they are: only after a verification that accounts for each.
        """

        def sign(checkpoint: AuditCheckpoint, head: ports.AuditEntry) -> None:
            if all_rows:
                checkpoint.establish(head, verified_at or 0.0)
            else:
                checkpoint.refresh(verified_at)

        await self._require_writer().change_checkpoint(sign)

    async def drop_audit_checkpoint(self) -> None:
        """Remove the checkpoint, because a row is in doubt: the next start verifies the whole audit."""
        await self._require_writer().change_checkpoint(lambda checkpoint, head: checkpoint.drop())

    async def remove_step_output(self, rollout: str, limit: int) -> None:
        await self._require_writer().write_unaudited(
            partial(retention_queries.remove_step_output, rollout=rollout, limit=limit)
        )

    async def release_space(self) -> bool:
        """Give some free space of the database's file back to the disk; return whether there is more."""
        before = await self._read(self.backend.file_sizes)
        await self._require_writer().write_unaudited(self.backend.release_space)
        after = await self._read(self.backend.file_sizes)
        # Not less: a file of an older version that could not be rewritten.
        return 0 < after[1] < before[1]

    async def measure(self, now: float) -> ports.StoredVolume:
        return await self._read(lambda connection: measure_volume(self.backend, connection, now))

    async def advance_audit_base(self, seq: int, at: float) -> None:
        """Make an entry the base, after it and those before it were exported.

        What they made of the tables is kept in their place, so that the audit is replayed from there.  At
        least two entries must follow.
        """
        work = partial(make_base, self.backend, seq, at, is_stopping=self._is_stopping.is_set)
        await self.write_audit_base(await threads.DATABASE.run(work))

    async def write_audit_base(self, new: NewBase) -> None:
        """Write a base, each part in a transaction of its own, so that others do not wait."""
        writer, seq = self._require_writer(), new.record.base.seq
        for number, content in enumerate(new.parts):
            await writer.write_unaudited(
                partial(audit_base.write_part, seq=seq, number=number, content=content)
            )
        await writer.write_unaudited(partial(audit_base.write_record, record=new.record))

    async def remove_exported_entries(self, limit: int) -> bool:
        """Remove so many entries up to the base; return whether there is more to remove."""
        if not await self._read(audit_base.has_exported):
            return False
        await self._require_writer().write_unaudited(partial(audit_base.remove_exported, limit=limit))
        return True

    def _require_writer(self) -> Writer:
        if self._writer is None:
            raise StoreFailed(f"{self.backend.name}: opened for reading only; write through the daemon")
        return self._writer

    async def close(self) -> None:
        """Finish the queued transactions, list the live rollouts in the checkpoint, then close."""
        self._is_stopping.set()
        if self._writer is not None:
            with suppress(StoreFailed):  # the one of the last commit stays, and is as good
                await self.sign_audit_checkpoint()
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

    load_preparations = _query(queries.load_preparations)
    load_targets = _query(queries.load_targets)
    list_closed_rollouts = _query(queries.list_closed_rollouts)
    list_rollout_records = _query(queries.list_rollout_records)
    list_uncleaned_nodes = _query(retention_queries.list_uncleaned_nodes)
    find_changes_in_effect = _query(retention_queries.find_changes_in_effect)
    load_plan = _query(queries.load_plan)
    find_previous_approved = _query(previous_rollout.find_previous_approved)
    load_connections = _query(queries.load_connections)
    load_source_answers = _query(queries.load_source_answers)
    find_identical = _query(queries.find_identical)
    find_nodes_with_change = _query(queries.find_nodes_with_change)
    find_later_changes = _query(queries.find_later_changes)
    load_steps = _query(queries.load_steps)
    load_step_durations = _query(queries.load_step_durations)
    load_busy_times = _query(queries.load_busy_times)
    count_attempts = _query(queries.count_attempts)
    load_forecasts = _query(queries.load_forecasts)
    load_configurations = _query(queries.load_configurations)
    list_expired_configurations = _query(retention_queries.list_expired_configurations)
    list_expired_rollouts = _query(retention_queries.list_expired_rollouts)
    list_recorded_nodes = _query(retention_queries.list_recorded_nodes)
    has_step_output = _query(retention_queries.has_step_output)
    load_verdicts = _query(queries.load_verdicts)
    unfinished_runs = _query(queries.unfinished_runs)
    read_audit = _query(queries.read_audit)
    list_changed_nodes = _query(queries.list_changed_nodes)
    latest_audit_entry = _query(queries.latest_audit_entry)
    load_audit_base = _query(audit_base.load_base)
    is_token_used = _query(queries.is_token_used)

    async def verify_audit_checkpoint(self) -> ports.AuditCheckpointReport:
        """Compare the newest entry, and the rows that decisions use, with the signed checkpoint.

        It has a connection of its own, so that other reads need not wait.  Its cost does not grow with the
        audit.  Rows of closed rollouts are not compared.
        """
        reader = await self.backend.open_reader()
        try:
            return await reader.run(partial(verify_audit_checkpoint, key=self._key))
        except self.backend.errors as error:
            return ports.AuditCheckpointReport(f"the database cannot be read: {error}")
        finally:
            await reader.close()

    async def verify_audit(self, head: str | None = None, *, gently: bool = False) -> ports.AuditReport:
        """Verify the audit's chain, that `head` occurs in it, and that the tables follow from the audit.

        It has a connection of its own, so that other reads need not wait.  `gently` leaves most of the
        processor to others, and takes a multiple of the time.
        """
        try:
            is_stopping = self._is_stopping.is_set
            return await threads.DATABASE.run(
                compare_with_audit, self.backend, head, gently=gently, is_stopping=is_stopping
            )
        except NotFound as error:
            raise StoreFailed(
                f"{self.backend.name}: the file is gone; stop the daemon and restore a backup"
            ) from error

    async def _read(
        self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        try:
            return await self._reader.run(lambda connection: query(connection, *args, **kwargs))
        except self.backend.errors as error:
            raise self.backend.explain(error) from error
        except (KeyError, TypeError, ValueError) as error:
            raise StoreFailed(
                f"{self.backend.name}: this version cannot read a value ({error!r}); start the version that"
                " wrote it, or restore a backup"
            ) from error
