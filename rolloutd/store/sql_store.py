"""The Store port: one writer task, one reading connection.

The SQL is in schema.py, rows.py, queries.py and writer.py; this file only passes on and answers.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from machines.facts.fleet_facts import FactsSnapshot
from machines.model.events import Actor, Event, StepRecord
from machines.model.preparation import Preparation
from machines.model.rollout import Rollout, Target, Verdict
from rolloutd.errors import NotFound, StoreFailed
from rolloutd.ports import (
    JSON,
    AuditEntry,
    AuditReport,
    ClosedRollout,
    NodeConfigurations,
    RolloutRecord,
    SourceAnswer,
)
from rolloutd.store import queries
from rolloutd.store.audit_comparison import compare_with_audit
from rolloutd.store.engine import Connection, Engine, Executor
from rolloutd.store.queries import PlanCompiler
from rolloutd.store.writer import BatchWriter, CommitCallback, Writer, write_source_answer

P = ParamSpec("P")
T = TypeVar("T")


class SqlStore:
    """The port Store on one database; without a writer it is read-only."""

    def __init__(
        self, engine: Engine, reader: Executor, compile_plan: PlanCompiler, writer: Writer | None = None
    ) -> None:
        self.engine = engine
        self._reader = reader
        self._compile_plan = compile_plan
        self._writer = writer

    @classmethod
    async def open(
        cls,
        engine: Engine,
        compile_plan: PlanCompiler,
        *,
        on_commit: CommitCallback | None = None,
        now: Callable[[], float] = time.time,
    ) -> SqlStore:
        """Open a database for writing and begin a term."""
        writing = await engine.open_writer()
        try:
            holder = f"pid {os.getpid()} on {os.uname().nodename}"
            batch_writer = await writing.run(
                lambda connection: BatchWriter(connection, engine, holder=holder, since=now())
            )
            store = cls(engine, await engine.open_reader(), compile_plan)
            try:
                digests = await store._read(queries.load_digests)
            except BaseException:
                await store.close()
                raise
        except BaseException:
            await writing.close()
            raise
        store._writer = Writer(writing, batch_writer, digests, on_commit)
        return store

    # -- writing

    async def commit(
        self, events: Sequence[Event], *, actor: Actor, cause: str, at: float
    ) -> tuple[AuditEntry, ...]:
        """Write the events and their audit entries in one transaction, or nothing."""
        return await self._require_writer().commit(events, actor, cause, at)

    async def save_source_answer(self, answer: SourceAnswer, removed: Sequence[str] = ()) -> None:
        await self._require_writer().write_unaudited(
            partial(write_source_answer, answer=answer, removed=tuple(removed))
        )

    async def remove_unused_documents(self) -> None:
        await self._require_writer().write_unaudited(queries.remove_unused_documents)

    def _require_writer(self) -> Writer:
        if self._writer is None:
            raise StoreFailed(f"{self.engine.name} was opened for reading only")
        return self._writer

    async def close(self) -> None:
        """Finish the queued transactions, then close."""
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
        return await self._read(queries.list_uncleaned_nodes, ended_after, ended_before)

    async def find_changes_in_effect(self, node: str, rollouts: Sequence[str]) -> Mapping[str, bool]:
        return await self._read(queries.find_changes_in_effect, node, rollouts)

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
        return await self._read(queries.list_expired_configurations, gone_before)

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
            return await asyncio.to_thread(compare_with_audit, self.engine, head)
        except NotFound as error:
            raise StoreFailed(f"{self.engine.name} is gone: stop the daemon and restore a backup") from error

    async def is_token_used(self, token: str) -> bool:
        return await self._read(queries.is_token_used, token)

    async def _read(
        self, query: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        try:
            return await self._reader.run(lambda connection: query(connection, *args, **kwargs))
        except self.engine.errors as error:
            raise self.engine.explain(error) from error
        except (KeyError, TypeError, ValueError) as error:
            raise StoreFailed(
                f"{self.engine.name} holds something that this version cannot read ({error!r}): start the"
                " version that wrote it, or restore a backup"
            ) from error
