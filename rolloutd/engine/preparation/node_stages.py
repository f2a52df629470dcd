"""One prepare stage of one node: checkpoint, record, snapshot, act, snapshot, record."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from machines.model.node import Node
from machines.model.node_snapshot import differences
from machines.model.preparation import Preparation, PreparationState, PrepareKind, PrepareStage, entry_record
from machines.model.timefmt import format_rfc3339
from rolloutd.engine.drivers.node_session import AdapterSet, PreparationAdapters
from rolloutd.engine.outcomes import capture_errors
from rolloutd.engine.preparation.builds import built_directory, built_name
from rolloutd.engine.preparation.journal import NODE_TIMEOUT_S, PrepareJob, PrepareJournal
from rolloutd.engine.preparation.kept_artifacts import previous_generation, remembered_digests, wanted_digests
from rolloutd.engine.preparation.rate_limit import RateLimits
from rolloutd.engine.preparation.runs import PrepareRuns
from rolloutd.engine.preparation.staged_files import compare_stages
from rolloutd.engine.state import State
from rolloutd.ports import (
    Checkpoint,
    Failed,
    Host,
    Ok,
    Staged,
    Stager,
    StagingRequest,
    StepResult,
    TakeBytes,
    Unknown,
    staged_artifact,
)

ARTIFACTS_VARIABLE = "rolloutd_artifacts"
"""Variable of a stage's playbook: the node's artifacts, each with `src` here and `path` on the node."""


class NodeStages:
    """Carries out the stages of nodes in service."""

    def __init__(
        self,
        state: State,
        adapters: AdapterSet,
        journal: PrepareJournal,
        runs: PrepareRuns,
    ) -> None:
        self._state = state
        self._adapters = adapters
        self._journal = journal
        self._runs = runs
        self._limits = RateLimits()

    @property
    def _ports(self) -> PreparationAdapters:
        return self._adapters.preparation_adapters

    async def prepare(self, job: PrepareJob) -> None:
        """Skip the stage by the node's checkpoint, or do it between two snapshots."""
        stage = job.stage
        node = self._state.index.nodes.get(job.row.node)
        if node is None:
            # It left while its older runs were ended; the preparer ends a stage that was begun.
            return
        is_resumed = bool(job.row.content)
        content = job.row.content or stage.content_for(node)
        row = replace(job.row, content=content)
        found = await capture_errors(
            row.rollout,
            self._ports.checkpoints.read(job.host, timeout_s=NODE_TIMEOUT_S),
        )
        if isinstance(found, Failed | Unknown):
            await self._journal.fail(row, found.text)
            return
        found = found or {}
        checkpoint = found.get((job.rollout.plan.name, stage.name))
        is_done = checkpoint is not None and _is_done(checkpoint, job, content, is_resumed=is_resumed)
        # The checkpoint says what was staged, not what is there now.
        differing = await self._compare(replace(job, row=row), node, is_done=is_done)
        if isinstance(differing, Failed | Unknown):
            await self._journal.fail(row, differing.text)
            return
        if differing and stage.kind is PrepareKind.INSTALL:
            await self._journal.stage_again(row.rollout, row.node, differing, row)
            return
        row = replace(row, text=differing.get(stage.name, row.text if stage.is_compared else ""))
        if checkpoint is not None and is_done and not differing:
            # Its own checkpoint is of a try whose answer was lost: it did bring what is there.
            is_own = is_resumed or checkpoint.rollout == row.rollout
            state = PreparationState.DONE if is_own else PreparationState.SKIPPED
            when = f"done by {checkpoint.rollout} at {format_rfc3339(checkpoint.at)}"
            await self._journal.record(replace(row, state=state, text="" if is_own else when, before=None))
            return
        if row.before is None or not is_resumed:
            measured = await self._snapshot(job.host)
            if isinstance(measured, Failed | Unknown):
                await self._journal.fail(row, measured.text)
                return
            if row.before is not None and (changed := differences(row.before, measured, stage.may_change)):
                await self._journal.disturbed(row, changed)
                return
            row = replace(row, before=measured)
        if stage.playbook:
            row = replace(row, handle=self._runs.handle_of(row))
        if stage.playbook and await self._was_run_lost_meanwhile(row, node.name):
            return
        # Also a row that has not changed: if another daemon has taken over, the write fails.
        if not await self._journal.begin(row):
            return
        previous = await previous_generation(self._state, node, stage, row.rollout, checkpoint)
        artifacts = stage.artifacts_for(node)
        job = replace(job, row=row, artifacts=artifacts, replaced=checkpoint, previous=previous)
        acted = await capture_errors(row.rollout, self._act(job, tuple(found.values())))
        result, row = acted if isinstance(acted, tuple) else (acted, row)
        await self._finish(replace(job, row=row), result)

    async def _was_run_lost_meanwhile(self, row: Preparation, node: str) -> bool:
        """Return whether a run was lost on the node since the decision; the next decision ends it."""
        known = self._state.index.preparation(row.rollout, row.node, row.stage)
        is_under_way = known is not None and known.state is PreparationState.RUNNING
        return not is_under_way and await self._state.has_unfinished_run(node)

    async def _compare(
        self, job: PrepareJob, node: Node, *, is_done: bool
    ) -> Mapping[str, str] | Failed | Unknown:
        """Return how files differ that a stage has staged already, or that an install is about to read."""
        compared: Iterable[PrepareStage] = ()
        if is_done and job.stage.is_compared:
            compared = (job.stage,)
        elif not is_done and not await self._runs.has_begun(job.row):
            # Also for a resumed row: its run may begin hours after the files were compared.
            compared = (each for each in job.stage.reads if each.is_compared and each.applies_to(node))
        return await compare_stages(self._ports.staged_files, job.host, node, compared)

    async def _act(
        self, job: PrepareJob, checkpoints: Collection[Checkpoint]
    ) -> tuple[StepResult, Preparation]:
        """Do the stage; return its result and its row, with the bytes that were sent."""
        stage = job.stage
        if stage.playbook:
            given = await self._given_artifacts(job) if stage.kind is PrepareKind.STAGE else {}
            variables = {**stage.variables, **given}
            request = await self._runs.request(
                job.row, job.host.name, stage.playbook, variables, stage.timeout_s
            )
            return await self._runs.run(job.row, request)
        stager = self._ports.stagers.get(stage.method)
        if stager is None:
            text = f"{stage.method}: no such stager is installed; change the stage's `method`"
            return Failed(text), job.row
        result, sent = await self._stage_artifacts(job, stager)
        if isinstance(result, Ok) and job.replaced is not None:
            await self._remove_replaced(job, job.replaced, stager, checkpoints)
        return result, replace(job.row, bytes=sent)

    async def _given_artifacts(self, job: PrepareJob) -> Mapping[str, object]:
        """Return the variables of a playbook that brings the artifacts itself: what, from where, to where."""
        directory, to = await self._manifest_directory(job), job.rendered(job.stage.to)
        artifacts = []
        for each in job.artifacts:
            staged = staged_artifact(to, each)
            source = str(directory / each.path) if each.path else ""
            places = {"src": source, "path": staged.path, "unpacked": staged.unpacked}
            artifacts.append({**entry_record(each), "select": "", **places})
        return {ARTIFACTS_VARIABLE: artifacts}

    async def _stage_artifacts(self, job: PrepareJob, stager: Stager) -> tuple[StepResult, int]:
        """Bring the node's artifacts; return the result and the bytes that were sent."""
        stage, sent, text = job.stage, 0, ""
        directory = await self._manifest_directory(job)
        to, url, take = job.rendered(stage.to), job.rendered(stage.url), self._take(job)
        for artifact in job.artifacts:
            if sent:  # for people; and it fails if another daemon has taken over
                await self._journal.record(replace(job.row, bytes=sent))
            request = StagingRequest(job.host, artifact, to, directory, url)
            staging = stager.stage(request, take=take, timeout_s=stage.timeout_s)
            staged = await capture_errors(job.rollout.id, staging)
            if not isinstance(staged, Staged):
                return staged, sent
            sent += staged.bytes
            text = text or staged.replaced
        return Ok(text), sent

    async def _remove_replaced(
        self, job: PrepareJob, replaced: Checkpoint, stager: Stager, checkpoints: Collection[Checkpoint]
    ) -> None:
        """Remove the artifacts before the previous ones, which stay so that a rollback fetches nothing."""
        others = (each for each in checkpoints if each is not replaced)
        rollouts = (each for each in self._state.index.rollouts.values() if not each.closed)
        keep = wanted_digests(rollouts) | remembered_digests(others) | set(job.previous)
        if old := remembered_digests([replaced]) - keep:
            to = job.rendered(job.stage.to)
            await capture_errors(job.rollout.id, stager.remove(job.host, to, old, timeout_s=NODE_TIMEOUT_S))

    async def _finish(self, job: PrepareJob, result: StepResult) -> None:
        """Compare the node with its snapshot, leave a checkpoint, and record how the stage ended."""
        row = job.row
        measured = await self._snapshot(job.host)
        if isinstance(measured, Failed | Unknown):
            # The row keeps its snapshot: the next try compares with it first.
            text = measured.text if isinstance(result, Ok) else result.text
            await self._journal.fail(row, text)
            return
        if changed := differences(row.before or {}, measured, job.stage.may_change):
            await self._journal.disturbed(row, changed)
            return
        # Only a run that is lost can still disturb the node.
        ended = row if row.handle else replace(row, before=None)
        if not isinstance(result, Ok):
            await self._journal.fail(ended, result.text)
            return
        to = job.rendered(job.stage.to)
        checkpoint = Checkpoint(
            plan=job.rollout.plan.name,
            stage=row.stage,
            content=row.content,
            change=job.rollout.digest.change,
            rollout=row.rollout,
            at=self._state.now(),
            artifacts={each.name: staged_artifact(to, each) for each in job.artifacts},
            previous=job.previous,
        )
        # It fails if another daemon has taken over, and then nothing is written.
        await self._journal.record(row)
        written = await capture_errors(
            row.rollout,
            self._ports.checkpoints.write(job.host, checkpoint, timeout_s=NODE_TIMEOUT_S),
        )
        if isinstance(written, Failed | Unknown):
            await self._journal.fail(ended, written.text)
            return
        done = replace(ended, state=PreparationState.DONE, text=row.text or result.text)
        await self._journal.record(done)

    async def _snapshot(self, host: Host) -> Mapping[str, str] | Failed | Unknown:
        snapshots = self._ports.snapshots
        return await capture_errors(host.name, snapshots.snapshot(host, timeout_s=NODE_TIMEOUT_S))

    async def _manifest_directory(self, job: PrepareJob) -> Path:
        """Return the directory of the stage's manifest: in the source, or where its build made it."""
        if job.stage.built_by:
            name = built_name(job.rollout.id, job.stage.built_by)
            await self._ports.built.find(name)  # another machine may have built it
            return built_directory(self._state, job.rollout.id, job.stage.built_by)
        tree = self._ports.find_tree(await self._adapters.source(job.rollout.id))
        return (tree / job.stage.manifest_file).parent

    def _take(self, job: PrepareJob) -> TakeBytes:
        stage, rollouts = job.stage, self._state.index.rollouts
        limit = self._limits.limit(job.rollout.id, stage, rollouts)
        share = job.host.labels.get(stage.rate_by, "") if stage.rate_by else ""
        return lambda size: limit.take(size, share)


def _is_done(checkpoint: Checkpoint, job: PrepareJob, content: str, *, is_resumed: bool) -> bool:
    """Return whether the checkpoint says that the stage is done; a forced one only by this rollout."""
    if checkpoint.content != content:
        return False
    by_this_rollout = checkpoint.rollout == job.rollout.id
    return by_this_rollout if job.stage.is_forced_on(job.row.node) or is_resumed else True
