"""Retention of run output, source trees, configurations, records of closed rollouts, and the audit.

It removes a few artifacts at a time.  Only the database says which rollouts have ended.  The audit records a
removal before it happens; if the daemon is killed meanwhile, the next pass removes the rest.
It knows artifact stores and not their contents.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from machines.model.events import ConfigurationPruned, RecordsPruned, RunOutputPruned
from machines.model.timefmt import format_duration
from machines.rules import retention
from rolloutd.concurrency import garbage
from rolloutd.engine.background.audit_export import AuditExporter
from rolloutd.engine.state import State
from rolloutd.engine.tasks import Wakeup
from rolloutd.errors import AdapterFailed, LeadershipLost, RolloutdError
from rolloutd.ports import Artifact, ArtifactStore, RolloutRecord
from rolloutd.ports.guards import adapter_errors

log = logging.getLogger(__name__)

INTERVAL_S = 3600.0
"""Interval between two passes: an artifact that is kept for months may stay an hour longer."""

BATCH_SIZE = 20
"""Removals without a pause: some milliseconds of disk work."""

BATCH_PAUSE_S = 1.0
"""Pause between two batches: a rollout of 10,000 nodes is removed in ten minutes."""

NODES_PER_REMOVAL = 100
"""Nodes whose records one commit removes: with their steps some thousand rows, tens of milliseconds."""

OUTPUTS_PER_REMOVAL = 500
"""Steps whose output one transaction removes: some MiB, which are overwritten."""

FORGOTTEN_AFTER_S = 86_400.0
"""How long a closed rollout stays in memory, where the status finds it at once."""

DOCUMENTS_INTERVAL_S = 86_400.0
"""Interval between two removals of documents: the store compares them with all targets, while writes wait."""

MEMORY_INTERVAL_S = 86_400.0
"""Interval between two full passes of the garbage collector, for what large computations leave."""

MIN_TREE_AGE_S = 3600.0
"""Minimum age of a tree: a younger one may belong to a plan that is being submitted."""

CONDITION = "retention"


class RetentionCleaner:
    """Removes runs, trees and configurations that are older than the settings' `keep`.

    `trees` are stores by the name of a tree or a rollout, and stores that no rollout names: copies that can
    be made again.
    """

    def __init__(
        self, state: State, runs: ArtifactStore, trees: Sequence[ArtifactStore], audit: AuditExporter
    ) -> None:
        self._state = state
        self._audit = audit
        self._runs = runs
        self._trees = trees
        self._wakeup = Wakeup()
        self._removed_count = 0
        self._failure: RolloutdError | TimeoutError | None = None
        """The first one of the pass; on a read-only disk each of a hundred thousand artifacts has one."""
        self._documents_removed_at = float("-inf")
        self._memory_collected_at = state.now()
        self.wake_up = self._wakeup.trigger

    async def run(self) -> None:
        """Remove expired artifacts once per interval, and when woken up, until cancelled."""
        conditions = self._state.conditions
        while True:
            try:
                await self.remove_expired()
                conditions.pop(CONDITION, None)
            except (RolloutdError, TimeoutError) as error:
                conditions[CONDITION] = f"retention: not all that has expired was removed: {error}"
                log.warning("%s; the next pass tries again", conditions[CONDITION])
            await self._wakeup.wait_for(self._state.clock.sleep(INTERVAL_S))

    async def remove_expired(self) -> None:
        """Remove one part after another; raises the first failure, after all other parts."""
        self._removed_count, self._failure = 0, None
        rollouts = await self._state.store.list_rollout_records()
        with self._part():
            await self._remove_expired_runs({each.id: each for each in rollouts})
        for store in self._trees:
            with self._part():
                await self._remove_unused_trees(store, rollouts)
        with self._part():
            await self._remove_expired_configurations()
        with self._part():
            await self._forget_closed(rollouts)
        with self._part():
            await self._remove_step_output(rollouts)
        with self._part():
            await self._remove_records()
        with self._part():
            await self._audit.export_due()
        with self._part():
            while await self._state.store.release_space():
                await self._pause_between_batches()
            self._state.stored_volume = await self._state.store.measure(self._state.now())
        self._collect_memory()
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def _part(self) -> Iterator[None]:
        """Continue the pass after a failure: the disk must not fill up because one system is away."""
        try:
            yield
        except LeadershipLost:
            raise  # the rest is another daemon's
        except (RolloutdError, TimeoutError) as error:
            self._failure = self._failure or error

    def _collect_memory(self) -> None:
        """Collect all cycles once a day, while no node's deadline could wait for it."""
        now = self._state.now()
        if now - self._memory_collected_at >= MEMORY_INTERVAL_S and not self._state.index.in_flight():
            self._memory_collected_at = now
            garbage.collect_all()

    async def _forget_closed(self, rollouts: Sequence[RolloutRecord]) -> None:
        """Drop rollouts that closed long ago from memory, as a restart does; the store has them."""
        before = self._state.now() - FORGOTTEN_AFTER_S
        closed = {each.id for each in rollouts if each.ended_at is not None and each.ended_at <= before}
        if not closed & self._state.index.rollouts.keys():
            return
        async with self._state.exclusive_commit():
            # Again under the lock: one of them may be rolled back meanwhile.
            closed = {each.id for each in await self._state.store.list_rollout_records() if each.ended_at}
            for rollout in [*self._state.index.rollouts]:
                if rollout in closed and retention.is_forgettable(self._state.index, rollout, before):
                    self._state.index.forget_rollout(rollout)

    async def _remove_step_output(self, rollouts: Sequence[RolloutRecord]) -> None:
        """Remove the ends of outputs that the database has, when the runs' own go."""
        keep_s, store = self._state.settings.keep.runs_s, self._state.store
        if keep_s is None:
            return
        for rollout in rollouts:
            if not _is_expired(rollout.ended_at, keep_s, self._state.now()):
                continue
            while await store.has_step_output(rollout.id):
                await self._audit_removal(rollout.id, 0, keep_s)
                await store.remove_step_output(rollout.id, OUTPUTS_PER_REMOVAL)
                await self._pause_between_batches()

    async def _remove_records(self) -> None:
        """Remove the records of rollouts that are over for long, a part of their nodes in each commit."""
        keep_s, state = self._state.settings.keep.records_s, self._state
        if keep_s is None:
            return
        cause = f"the settings keep records of closed rollouts for {format_duration(keep_s)}"
        for rollout in await state.store.list_expired_rollouts(state.now() - keep_s):
            if rollout in state.index.rollouts:
                continue  # it was closed by a clock that is ahead, or is live again
            with self._part():
                while nodes := tuple(await state.store.list_recorded_nodes(rollout, NODES_PER_REMOVAL)):
                    await state.commit([RecordsPruned(rollout, nodes, keep_s, state.now())], cause=cause)
                    await self._pause_between_batches()
                # Last, so that a kill in between leaves a rollout whose removal continues.
                await state.commit([RecordsPruned(rollout, (), keep_s, state.now())], cause=cause)

    async def _remove_expired_runs(self, rollouts: Mapping[str, RolloutRecord]) -> None:
        keep_s = self._state.settings.keep.runs_s
        now = self._state.now()
        with adapter_errors("runs"):
            listed = await self._runs.list_artifacts()
        for rollout, runs in _group_by_rollout(listed, rollouts).items():
            known = rollouts.get(rollout)
            if known is not None and known.deleted:
                await self._remove(self._runs, [each.name for each in runs], now)
            elif keep_s is not None and (
                known is None
                or _is_expired(known.ended_at, keep_s, now)
                or retention.is_at_rest(self._state.index, known.id)
            ):
                old = [each.name for each in runs if each.modified_at + keep_s <= now]
                if known is not None and old:
                    await self._audit_removal(known.id, len(old), keep_s)
                if await self._remove(self._runs, old, now - keep_s) and known is None:
                    log.info("removed %d runs that no rollout of this database had", len(old))

    async def _audit_removal(self, rollout: str, runs: int, keep_s: float) -> None:
        if await self._state.store.read_audit(limit=1, rollout=rollout, event=RunOutputPruned.__name__):
            return
        event = RunOutputPruned(rollout, runs, keep_s, self._state.now())
        await self._state.commit(
            [event], cause=f"the settings keep the output of runs for {format_duration(keep_s)}"
        )

    async def _remove_unused_trees(self, store: ArtifactStore, rollouts: Sequence[RolloutRecord]) -> None:
        keep_s = self._state.settings.keep.trees_s
        if keep_s is None:
            return
        now = self._state.now()
        unexpired = [e for e in rollouts if not e.deleted and not _is_expired(e.ended_at, keep_s, now)]
        used = {f"{each.source['kind']}-{each.source['pin']}" for each in unexpired}
        used |= {each.id for each in unexpired}
        untouched_since = now - max(float(keep_s), MIN_TREE_AGE_S)
        with adapter_errors("trees"):
            trees = await store.list_artifacts()
        old = [each.name for each in trees if each.name not in used and each.modified_at <= untouched_since]
        await self._remove(store, old, untouched_since)

    async def _remove_expired_configurations(self) -> None:
        """Remove the records of nodes that are long gone, and once a day the documents that none has."""
        keep_s, now = self._state.settings.keep.runs_s, self._state.now()
        if keep_s is not None:
            gone = await self._state.store.list_expired_configurations(now - keep_s)
            events = [ConfigurationPruned(node, keep_s, now) for node in gone]
            cause = f"the settings keep records of a node that is gone for {format_duration(keep_s)}"
            await self._state.commit(events, cause=cause)
        # abs(), because the clock may have been set back.
        if abs(now - self._documents_removed_at) >= DOCUMENTS_INTERVAL_S:
            await self._state.store.remove_unused_documents()
            self._documents_removed_at = now

    async def _remove(self, store: ArtifactStore, names: Iterable[str], untouched_since: float) -> int:
        """Remove artifacts in batches; return how many were removed."""
        removed = 0
        for name in names:
            try:
                with adapter_errors(name):
                    removed += await store.remove(name, unmodified_since=untouched_since)
            except AdapterFailed as error:  # such as a file that the daemon may not remove
                self._failure = self._failure or error
            await self._pause_between_batches()
        return removed

    async def _pause_between_batches(self) -> None:
        self._removed_count += 1
        if self._removed_count % BATCH_SIZE == 0:
            await self._state.clock.sleep(BATCH_PAUSE_S)


def _is_expired(ended_at: float | None, keep_s: float, now: float) -> bool:
    return ended_at is not None and ended_at + keep_s <= now


def _group_by_rollout(
    runs: Iterable[Artifact], known: Mapping[str, RolloutRecord]
) -> dict[str, list[Artifact]]:
    """Return the runs by rollout; runs of unknown rollouts are under the empty string."""
    grouped: dict[str, list[Artifact]] = {}
    for each in runs:
        grouped.setdefault(each.rollout if each.rollout in known else "", []).append(each)
    return grouped
