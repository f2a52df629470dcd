"""Retention of run output, source trees and configurations.

It removes a few artifacts at a time.  Only the database says which rollouts have ended.  The audit records a
removal before it happens; if the daemon is killed meanwhile, the next pass removes the rest.
It knows artifact stores and not their contents.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from machines.model.events import ConfigurationPruned, RunOutputPruned
from machines.model.timefmt import format_duration
from rolloutd.engine.state import State
from rolloutd.engine.tasks import Wakeup
from rolloutd.errors import StoreFailed
from rolloutd.ports import Artifact, ArtifactStore, RolloutRecord

log = logging.getLogger("rolloutd.engine.background.retention")

INTERVAL_S = 3600.0
"""Interval between two passes: an artifact that is kept for months may stay an hour longer."""

BATCH_SIZE = 20
"""Removals without a pause: some milliseconds of disk work."""

BATCH_PAUSE_S = 1.0
"""Pause between two batches: a rollout of 10,000 nodes is removed in ten minutes."""

DOCUMENTS_INTERVAL_S = 86_400.0
"""Interval between two removals of documents: the store compares them with all targets, while writes wait."""

MIN_TREE_AGE_S = 3600.0
"""Minimum age of a tree: a younger one may belong to a plan that is being submitted."""


class RetentionCleaner:
    """Removes runs, trees and configurations that are older than the settings' `keep`.

    `trees` are stores by the name of a tree or a rollout, and stores that no rollout names: copies that can
    be made again.
    """

    def __init__(self, state: State, runs: ArtifactStore, trees: Sequence[ArtifactStore]) -> None:
        self._state = state
        self._runs = runs
        self._trees = trees
        self._wakeup = Wakeup()
        self._removed_count = 0
        self._documents_removed_at = float("-inf")
        self.wake_up = self._wakeup.trigger

    async def run(self) -> None:
        """Remove expired artifacts once per interval, and when woken up, until cancelled."""
        while True:
            try:
                await self.remove_expired()
            except (StoreFailed, OSError) as error:
                log.warning("expired artifacts could not be removed; the next pass tries again: %s", error)
            await self._wakeup.wait_for(self._state.clock.sleep(INTERVAL_S))

    async def remove_expired(self) -> None:
        self._removed_count = 0
        rollouts = await self._state.store.list_rollout_records()
        await self._remove_expired_runs({each.id: each for each in rollouts})
        await self._remove_unused_trees(rollouts)
        await self._remove_expired_configurations()

    async def _remove_expired_runs(self, rollouts: Mapping[str, RolloutRecord]) -> None:
        keep_s = self._state.settings.keep.runs_s
        now = self._state.now()
        for rollout, runs in _group_by_rollout(await self._runs.list_artifacts(), rollouts).items():
            known = rollouts.get(rollout)
            if known is not None and known.deleted:
                await self._remove(self._runs, [each.name for each in runs], now)
            elif keep_s is not None and (known is None or _is_expired(known.ended_at, keep_s, now)):
                old = [each.name for each in runs if each.modified_at + keep_s <= now]
                if known is not None and old:
                    await self._audit_removal(known.id, len(old), keep_s)
                if await self._remove(self._runs, old, now - keep_s) and known is None:
                    log.info("removed %d runs that no rollout of this database had", len(old))

    async def _audit_removal(self, rollout: str, runs: int, keep_s: float) -> None:
        """Record the removal in the audit, once for each rollout."""
        if await self._state.store.read_audit(limit=1, rollout=rollout, event=RunOutputPruned.__name__):
            return
        event = RunOutputPruned(rollout, runs, keep_s, self._state.now())
        await self._state.commit(
            [event], cause=f"the settings keep the output of runs for {format_duration(keep_s)}"
        )

    async def _remove_unused_trees(self, rollouts: Sequence[RolloutRecord]) -> None:
        keep_s = self._state.settings.keep.trees_s
        if keep_s is None:
            return
        now = self._state.now()
        unexpired = [e for e in rollouts if not e.deleted and not _is_expired(e.ended_at, keep_s, now)]
        used = {f"{each.source['kind']}-{each.source['pin']}" for each in unexpired}
        used |= {each.id for each in unexpired}
        untouched_since = now - max(float(keep_s), MIN_TREE_AGE_S)
        for store in self._trees:
            trees = await store.list_artifacts()
            old = [
                each.name for each in trees if each.name not in used and each.modified_at <= untouched_since
            ]
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
            removed += await store.remove(name, unmodified_since=untouched_since)
            self._removed_count += 1
            if self._removed_count % BATCH_SIZE == 0:
                await self._state.clock.sleep(BATCH_PAUSE_S)
        return removed


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
