"""The real store of one daemon process, with injected faults.

A commit can fail, and the power can fail right before and right after it.  The
checker gets each committed event; before each commit, the invariants check the last one.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from machines.facts.fleet_facts import FactsSnapshot
from machines.model.configuration import NodeConfiguration
from machines.model.events import Event, PhaseMoved, StepRecorded, TargetChanged
from machines.model.limits import Limits
from machines.model.node import Observation, SourceFreshness
from machines.model.preparation import StagedComparison
from machines.model.rollout import Actor
from machines.model.traffic import TrafficResult
from machines.model.train import OutageProgress
from rolloutd.audit.audit_chain import GENESIS_HASH, ChainVerification
from rolloutd.engine.state import State
from rolloutd.errors import StoreFailed
from rolloutd.ports import AuditEntry, AuditReport, SourceAnswer
from rolloutd.store import Store
from rolloutd.store.audit_comparison import compare_with_audit
from rolloutd.store.backend import Connection, InlineExecutor
from rolloutd.store.stored_rows import StoredRows
from rolloutd.store.writer import BatchWriter, Transaction, TransactionResult
from tests.sim.fault_plan import EffectOutcome
from tests.sim.loop import SimProcess
from tests.sim.record_judge import on_disk
from tests.sim.world import SimWorld
from tests.support.recount import wrong_counts
from tests.support.snapshot_judge import violations

T = TypeVar("T")

RECOUNT_EVERY = 8
"""Commits between two recounts of the running counts, each of which costs as much as a commit."""

KILLED_WHILE_SIGNING = 0.02
"""Share of the signatures before which the power fails, and after which it does."""


class FaultyStore:
    """The store of one daemon process, over the real one."""

    def __init__(self, inner: Store, world: SimWorld, process: SimProcess) -> None:
        self.state: State | None = None
        self._inner = inner
        self._world = world
        self._process = process
        self._snapshot_before: FactsSnapshot | None = None
        self._observations_before: tuple[Observation, ...] = ()
        self._traffic_before: tuple[TrafficResult, ...] = ()
        self._comparisons_before: Sequence[StagedComparison] = ()
        self._outages_before: Mapping[tuple[str, str], OutageProgress] = {}
        self._sources_before: tuple[SourceFreshness, ...] = ()
        self._limits_before: Limits | None = None
        self._committed_at = 0.0
        self._checked_commits = 0
        self._batch_numbers = itertools.count()
        self._pending_batches: dict[int, Sequence[Event]] = {}
        """The events of the transactions that wait, in their order; a refused one is never written."""

    async def commit(
        self, events: Sequence[Event], *, actor: Actor, cause: str, at: float
    ) -> tuple[AuditEntry, ...]:
        """Commit, with the fault plan's outcome."""
        world = self._world
        if world.is_finished:
            raise StoreFailed("all is over")
        label = "commit " + " ".join(_label(event) for event in events)
        if self.state is not None and self.state.index.journal is not None:
            world.coverage.count("commit:large")
        outcome = world.fault_plan.next_outcome(label)
        # A write takes turns of the loop: others may come, and wait.  On a slow disk they do so anyway.
        for _ in range(0 if world.commit_s else world.streams.latency.randrange(4)):
            await asyncio.sleep(0)
        self.check_last_commit()
        if outcome is EffectOutcome.CUT_BEFORE:
            await world.cut_power(self._process)
        if outcome in (EffectOutcome.FAILS, EffectOutcome.ANSWER_LOST):
            # What SQLite has committed it also says; its answer can be lost only by dying.
            raise StoreFailed(f"nothing was written: {label}")
        self._snapshot_facts(at)
        with self._pending(events):
            entries = await self._inner.commit(events, actor=actor, cause=cause, at=at)
        if outcome is EffectOutcome.TWICE and not any(isinstance(event, TargetChanged) for event in events):
            await self._commit_again(events, actor, cause, at)
        if outcome is EffectOutcome.CUT_AFTER:
            await world.cut_power(self._process)
        return entries

    async def save_source_answer(self, answer: SourceAnswer, removed: Sequence[str] = ()) -> None:
        """Store what a source reported; it takes its turn among the commits."""
        with self._pending():
            await self._inner.save_source_answer(answer, removed)

    @contextmanager
    def _pending(self, events: Sequence[Event] = ()) -> Iterator[None]:
        """Keep the events of a transaction until it is written or refused."""
        number = next(self._batch_numbers)
        self._pending_batches[number] = events
        try:
            yield
        finally:
            self._pending_batches.pop(number, None)

    def intercept_writes(self, writer: BatchWriter) -> None:
        """Report each transaction when it is on disk, also if the daemon dies before the answer."""
        write = writer.write

        def overheard(batch: Sequence[Transaction]) -> list[TransactionResult]:
            oldest = list(itertools.islice(self._pending_batches, len(batch)))
            batch_events = [self._pending_batches.pop(number) for number in oldest]
            batch_events += [()] * (len(batch) - len(oldest))
            answers = write(batch)
            for events, answer in zip(batch_events, answers, strict=True):
                if isinstance(answer, tuple) and not self._world.is_finished:
                    self._on_commit(events)
            self._check_records(
                writer, {e.node for events in batch_events for e in events if isinstance(e, PhaseMoved)}
            )
            return answers

        writer.write = overheard  # type: ignore[method-assign]

    def slow_writes(self, executor: InlineExecutor) -> None:
        """Let the disk take its time for each batch: what is queued meanwhile is the next one."""
        run, commit_s = executor.run, self._world.commit_s

        async def run_slowly(work: Callable[[Connection], T]) -> T:
            await asyncio.sleep(commit_s)
            return await run(work)

        executor.run = run_slowly  # type: ignore[method-assign]

    def _check_records(self, writer: BatchWriter, nodes: Collection[str]) -> None:
        """Compare the configuration records of nodes that moved with what they must be."""
        checker = self._world.checker
        for node in sorted(nodes):
            stored = StoredRows(writer._connection).get(NodeConfiguration, node)
            found = on_disk(stored or NodeConfiguration())
            if found != checker.records.expected(node):
                checker.report_violation(
                    f"{node}: its records are {found}, not {checker.records.expected(node)}"
                )

    def _on_commit(self, events: Sequence[Event]) -> None:
        if not events:
            return
        self._world.record("commit " + " ".join(_label(event) for event in events))
        self._world.checker.on_commit(events)
        for event in events:
            if isinstance(event, PhaseMoved):
                self._world.coverage.count(f"edge:{event.trigger}-{event.source}-{event.target}")

    def check_last_commit(self) -> None:
        """Check the last commit's facts with the invariants."""
        if self.state is None or self._snapshot_before is None:
            return
        index = self.state.index
        problems = violations(
            self._snapshot_before,
            index.snapshot(),
            limits=self._limits_before or index.limits,
            observations=self._observations_before,
            traffic=self._traffic_before,
            now=self._committed_at,
            sources=self._sources_before,
            comparisons=self._comparisons_before,
            outages=self._outages_before,
        )
        self._checked_commits += 1
        if self._checked_commits % RECOUNT_EVERY == 0:
            problems += wrong_counts(index)
        for text in problems:
            self._world.checker.report_violation(f"violation: {text}")
        self._snapshot_before = None

    async def compare_with_disk(self) -> None:
        """Compare the facts in memory with those on disk, while no other write runs."""
        assert self.state is not None
        async with self.state.exclusive_commit():
            in_memory, on_disk = self.state.index.snapshot(), await self._inner.load_snapshot()
        loaded_ids = {rollout.id for rollout in on_disk.rollouts}
        filtered: dict[str, Sequence[Any]] = {
            "rollouts": [each for each in in_memory.rollouts if each.id in loaded_ids],
            "targets": [each for each in in_memory.targets if each.rollout in loaded_ids],
        }
        for name in ("nodes", "holds", "freezes", "rollouts", "targets"):
            here: Sequence[Any] = filtered.get(name, getattr(in_memory, name, ()))
            there: Sequence[Any] = getattr(on_disk, name)
            differences = [each for each in here if each not in there] + [
                each for each in there if each not in here
            ]
            for difference in differences:
                self._world.checker.report_violation(
                    f"{name} in memory differ from those on disk: {difference}"
                )

    def _snapshot_facts(self, at: float) -> None:
        if self.state is not None:
            self._snapshot_before = self.state.index.snapshot()
            self._observations_before = tuple(self.state.index.observations)
            self._traffic_before = tuple(self.state.index.traffic)
            self._comparisons_before = self.state.index.comparisons
            self._outages_before = self.state.index.outages
            self._sources_before = tuple(self.state.index.sources.values())
            self._limits_before = self.state.index.limits
            self._committed_at = at

    async def _commit_again(self, events: Sequence[Event], actor: Actor, cause: str, at: float) -> None:
        """Repeat a commit: it is refused, or changes nothing."""
        try:
            await self._inner.commit(events, actor=actor, cause=cause, at=at)
        except StoreFailed:
            return

    async def verify_audit(self, head: str | None = None, *, gently: bool = False) -> AuditReport:
        """Report that all is well unless rows were forged: time is short, and the end verifies once more."""
        self._maybe_raise()
        if self._world.is_forged:
            return compare_with_audit(self._inner.backend, head)
        return AuditReport(ChainVerification(True, 0, GENESIS_HASH, None, "not read"))

    async def sign_audit_checkpoint(
        self, verified_at: float | None = None, *, all_rows: bool = False
    ) -> None:
        """Sign, and sometimes lose power right before or right after it."""
        # A large fleet has no such fault: its daemon is not started again.
        has_faults = self.state is not None and not self._world.is_finished
        cut = self._world.streams.checkpoints.random() if has_faults else 1.0
        if cut < KILLED_WHILE_SIGNING:
            self._world.coverage.count("fault:killed-while-signing")
            await self._world.cut_power(self._process)
        with self._pending():
            await self._inner.sign_audit_checkpoint(verified_at, all_rows=all_rows)
        if KILLED_WHILE_SIGNING <= cut < 2 * KILLED_WHILE_SIGNING:
            await self._world.cut_power(self._process)

    async def drop_audit_checkpoint(self) -> None:
        """Drop it; it takes its turn among the commits."""
        with self._pending():
            await self._inner.drop_audit_checkpoint()

    async def load_steps(self, *args: Any, **named: Any) -> Any:
        """Read, or raise a disk error."""
        self._maybe_raise()
        return await self._inner.load_steps(*args, **named)

    async def unfinished_runs(self, node: str) -> Any:
        """Read, or raise a disk error."""
        self._maybe_raise()
        return await self._inner.unfinished_runs(node)

    async def load_plan(self, rollout: str) -> Any:
        """Read, or raise a disk error."""
        self._maybe_raise()
        return await self._inner.load_plan(rollout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _maybe_raise(self) -> None:
        if self._world.fault_plan.chance("read-fails", 0.02):
            raise StoreFailed("the disk answers with errors")


def _label(event: Event) -> str:
    match event:
        case PhaseMoved():
            return f"{event.trigger}:{event.node}"
        case StepRecorded(record=record):
            return f"{record.action}-{record.state}:{record.node}:{record.step}#{record.number}"
        case _:
            return type(event).__name__
