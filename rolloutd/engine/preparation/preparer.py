"""Prepare stages, each a job of its own.

It may be killed between any two lines: the next daemon reads the same row,
finds the run by its claim and the files by their digests, and compares with the snapshot in the row.
It knows ports, never an adapter.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from machines.facts.node_work import WorkKind, conflicting_work
from machines.facts.preparations import BUILD_NODE
from machines.model.decision import Prepare
from machines.model.preparation import CLEANUP, Preparation, PreparationState, PrepareKind, PrepareStage
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.engine.outcomes import capture_errors
from rolloutd.engine.preparation.builds import Builder
from rolloutd.engine.preparation.cleanup import Cleanup
from rolloutd.engine.preparation.journal import LOCALHOST, NODE_TIMEOUT_S, PrepareJob, PrepareJournal
from rolloutd.engine.preparation.node_stages import NodeStages
from rolloutd.engine.preparation.runs import PrepareRuns
from rolloutd.engine.state import State
from rolloutd.ports import Failed, Host, Ok, Unknown

log = logging.getLogger("rolloutd.engine.preparation")


class Preparer:
    """The prepare stages under way."""

    def __init__(self, state: State, adapters: AdapterSet) -> None:
        self._state = state
        self._adapters = adapters
        self._journal = PrepareJournal(state)
        self._runs = runs = PrepareRuns(state, adapters)
        self._builder = Builder(state, adapters, self._journal, runs)
        self._cleanup = Cleanup(state, adapters, self._journal, runs)
        self._node_stages = NodeStages(state, adapters, self._journal, runs)

    def node_of(self, wanted: Prepare) -> str:
        """Return the node that the stage works on; empty for a build on the daemon's machine."""
        rollout = self._state.index.rollouts.get(wanted.rollout)
        return wanted.node if rollout is None else rollout.node_of_stage(wanted.node, wanted.stage)

    def _stage(self, rollout: str, name: str) -> PrepareStage | None:
        known = self._state.index.rollouts.get(rollout)
        if name == CLEANUP:
            return PrepareStage(CLEANUP, PrepareKind.INSTALL)
        return None if known is None else next((s for s in known.prepare_stages if s.name == name), None)

    async def prepare(self, wanted: Prepare) -> None:
        """Carry out a stage, and record how it ended."""
        failed = await capture_errors(f"{wanted.rollout}/{wanted.node}", self._carry_out(wanted))
        if failed is not None:
            await self._fail_unrecorded(wanted, failed.text)

    def _is_occupied(self, wanted: Prepare) -> bool:
        """Return whether work has begun on the node since the decision; the journal judges it once more."""
        node, now = self.node_of(wanted), self._state.now()
        return conflicting_work(self._state.index, WorkKind.STAGE, node, now, wanted.rollout) is not None

    async def _carry_out(self, wanted: Prepare) -> None:
        index = self._state.index
        rollout, stage = index.rollouts.get(wanted.rollout), self._stage(wanted.rollout, wanted.stage)
        row = index.preparation(wanted.rollout, wanted.node, wanted.stage)
        if rollout is None or stage is None or (row is not None and row.attempt > wanted.attempt):
            return
        known = wanted.node in index.nodes or wanted.node == BUILD_NODE
        if row is not None and row.state is PreparationState.RUNNING:
            if (rollout.closed and stage.name != CLEANUP) or not known:
                await self._abandon(row)
                return
        elif not known or self._is_occupied(wanted):
            return  # the next decision asks again
        node = self.node_of(wanted)
        host = Host(LOCALHOST) if node in ("", LOCALHOST) else self._state.host(node)
        fresh = self._row_of(wanted)
        if not fresh.content and await self._may_have_lost_run(host, fresh, stage):
            if not await self._journal.begin(fresh):
                return
            if (failure := await self._clean_up(host, fresh)) is not None:
                await self._journal.fail(fresh, failure.text)
                return
            fresh = replace(fresh, handle="")
        job = PrepareJob(rollout, host, stage, fresh)
        if stage.name == CLEANUP:
            await self._cleanup.remove(job)
        elif stage.kind is PrepareKind.BUILD:
            await self._builder.build(job)
        else:
            await self._node_stages.prepare(job)

    def _row_of(self, wanted: Prepare) -> Preparation:
        """Return the row of this attempt: the one that runs already, or a new one after an earlier try."""
        row = self._state.index.preparation(wanted.rollout, wanted.node, wanted.stage)
        if row is not None and row.attempt == wanted.attempt and row.state is PreparationState.RUNNING:
            return row
        now, key = self._state.now(), (wanted.rollout, wanted.node, wanted.stage)
        fresh = Preparation(*key, wanted.attempt, PreparationState.RUNNING, "", now, now)
        if row is not None and row.state in (PreparationState.FAILED, PreparationState.WAITING):
            # What an earlier try may have disturbed is compared with its own snapshot.
            fresh = replace(fresh, before=row.before, handle=row.handle)
        if row is not None and row.state is PreparationState.WAITING:
            fresh = replace(fresh, text=row.text)
        return fresh

    async def _fail_unrecorded(self, wanted: Prepare, text: str) -> None:
        """Record a try that an error ended before it could record its own end."""
        log.error("%s/%s: prepare stage %s: %s", wanted.rollout, wanted.node, wanted.stage, text)
        row = self._state.index.preparation(wanted.rollout, wanted.node, wanted.stage)
        has_ended = (
            row is not None and row.attempt >= wanted.attempt and row.state is not PreparationState.RUNNING
        )
        if wanted.rollout in self._state.index.rollouts and not has_ended:
            await self._journal.fail(self._row_of(wanted), text)

    async def _may_have_lost_run(self, host: Host, row: Preparation, stage: PrepareStage) -> bool:
        """Return whether a run that was lost may still be on the node; a handle is that of an earlier try."""
        runs = bool(stage.playbook) and host.name != LOCALHOST
        return bool(row.handle) or (runs and await self._state.has_unfinished_run(host.name))

    async def _abandon(self, row: Preparation) -> None:
        """End what a stage of a closed rollout, or of a node that is gone, left running."""
        if row.handle:
            await self._runs.cancel(row)
        await self._journal.fail(row, "the rollout was closed, or the node left, before the stage ended")

    async def _clean_up(self, host: Host, row: Preparation) -> Failed | Unknown | None:
        """End the processes of a run that was lost; return why some may be left."""
        if host.name == LOCALHOST:
            return None
        token = await self._state.fence_token()
        result = await capture_errors(
            row.rollout,
            self._adapters.runner.clean_up_stale_runs(host, timeout_s=NODE_TIMEOUT_S, fencing_token=token),
        )
        return None if isinstance(result, Ok) else result
