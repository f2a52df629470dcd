"""Carries out prepare stages: checkpoint, record, snapshot, act, snapshot, record.

Each stage is a job of its own.  It may be killed between any two lines: the next daemon reads the same row,
finds the run by its claim and the files by their digests, and compares with the snapshot in the row.
It knows ports, never an adapter.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from machines.facts.preparations import BUILD_NODE
from machines.model.decision import Prepare
from machines.model.events import ArtifactsBuilt, Event, PreparationRecorded
from machines.model.node_snapshot import differences
from machines.model.preparation import (
    CLEANUP,
    Preparation,
    PreparationState,
    PrepareKind,
    PrepareStage,
    entry_of_record,
)
from machines.model.rollout import FailureCode, Rollout
from machines.model.timefmt import format_rfc3339
from machines.scheduler.preparing import may_begin
from machines.states import Phase, Trigger
from machines.workflow.phase_transitions import transition
from machines.workflow.steps import backoff_s
from rolloutd.engine.built_manifest import MANIFEST_VARIABLE, read_built_manifest
from rolloutd.engine.drivers.node_session import AdapterSet, PreparationAdapters
from rolloutd.engine.kept_artifacts import previous_generation, remembered_digests, wanted_digests
from rolloutd.engine.outcomes import capture_errors
from rolloutd.engine.prepare_runs import LOCALHOST, PrepareRuns, run_id
from rolloutd.engine.rate_limit import RateLimit
from rolloutd.engine.state import State
from rolloutd.errors import StoreFailed
from rolloutd.plugin.templates import render
from rolloutd.ports import (
    Checkpoint,
    Failed,
    Host,
    Ok,
    Staged,
    StagingRequest,
    StepResult,
    TakeBytes,
    Unknown,
    staged_artifact,
    without_rollout,
)

log = logging.getLogger("rolloutd.engine.preparation")

NODE_TIMEOUT_S = 60.0
"""Limit of one command on a node: a checkpoint or a snapshot is some hundred kilobytes."""

STORE_RETRY_S = 5.0
"""Pause before a stage whose record could not be written is tried again."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One stage of one node, as it was decided."""

    rollout: Rollout
    host: Host
    stage: PrepareStage
    row: Preparation
    replaced: Checkpoint | None = None
    previous: tuple[str, ...] = ()
    """What the node remembers of the stage, and what it keeps for a rollback from now on."""


class Preparer:
    """The prepare stages under way, at most one for each node of a rollout."""

    def __init__(self, state: State, adapters: AdapterSet) -> None:
        self._state = state
        self._adapters = adapters
        self._limits: dict[tuple[str, str], RateLimit] = {}
        self._runs = PrepareRuns(state, adapters)
        self._running: set[tuple[str, str]] = set()
        self._active: Counter[tuple[str, str]] = Counter()

    def request(self, tasks: asyncio.TaskGroup, wanted: Sequence[Prepare]) -> None:
        """Start the stages that are not under way yet, of nodes whose secrets are known."""
        for each in wanted:
            if each.node != BUILD_NODE and self._state.awaited_sources(each.node):
                continue
            key, name = (each.rollout, each.node), f"prepare {each.rollout}/{each.node} {each.stage}"
            stage = self._stage(each.rollout, each.stage)
            if key in self._running or stage is None:
                continue
            # A decision does not know the stages that were begun and are not recorded yet.
            if self._active[each.rollout, each.stage] < stage.max_parallel:
                self._active[each.rollout, each.stage] += 1
                self._running.add(key)
                tasks.create_task(self._prepare(each), name=name)

    @property
    def _ports(self) -> PreparationAdapters:
        assert self._adapters.preparation is not None, "the daemon was made without stagers"
        return self._adapters.preparation

    def _stage(self, rollout: str, name: str) -> PrepareStage | None:
        known = self._state.index.rollouts.get(rollout)
        if name == CLEANUP:
            return PrepareStage(CLEANUP, PrepareKind.INSTALL)
        return None if known is None else next((s for s in known.prepare_stages if s.name == name), None)

    async def _prepare(self, wanted: Prepare) -> None:
        try:
            failed = await capture_errors(f"{wanted.rollout}/{wanted.node}", self._carry_out(wanted))
            if failed is not None:
                await self._fail_unrecorded(wanted, failed.text)
        except StoreFailed as failure:
            log.error("%s/%s: not recorded: %s", wanted.rollout, wanted.node, failure)
            self._state.last_write_error = str(failure)
            await self._state.clock.sleep(STORE_RETRY_S)
        finally:
            self._active[wanted.rollout, wanted.stage] -= 1
            self._running.discard((wanted.rollout, wanted.node))
            self._state.wake_up()

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
        elif not known:
            return
        host = Host(LOCALHOST) if wanted.node == BUILD_NODE else self._state.host(wanted.node)
        fresh = self._row_of(wanted)
        if not fresh.content and await self._may_have_lost_run(fresh, stage):
            if not await self._begin(fresh):
                return
            if (failure := await self._clean_up(host, fresh)) is not None:
                await self._fail(fresh, failure.text)
                return
            fresh = replace(fresh, handle="")
        job = _Job(rollout, host, stage, fresh)
        if stage.name == CLEANUP:
            await self._remove(job)
        elif stage.kind is PrepareKind.BUILD:
            await self._build(job)
        else:
            await self._prepare_node(job)

    def _row_of(self, wanted: Prepare) -> Preparation:
        """Return the row of this attempt: the one that runs already, or a new one after an earlier try."""
        row = self._state.index.preparation(wanted.rollout, wanted.node, wanted.stage)
        if row is not None and row.attempt == wanted.attempt and row.state is PreparationState.RUNNING:
            return row
        now, key = self._state.now(), (wanted.rollout, wanted.node, wanted.stage)
        fresh = Preparation(*key, wanted.attempt, PreparationState.RUNNING, "", now, now)
        if row is not None and row.state is PreparationState.FAILED:
            # What an earlier try may have disturbed is compared with its own snapshot.
            fresh = replace(fresh, before=row.before, handle=row.handle)
        return fresh

    async def _fail_unrecorded(self, wanted: Prepare, text: str) -> None:
        """Record a try that an error ended before it could record its own end."""
        log.error("%s/%s: prepare stage %s: %s", wanted.rollout, wanted.node, wanted.stage, text)
        row = self._state.index.preparation(wanted.rollout, wanted.node, wanted.stage)
        has_ended = (
            row is not None and row.attempt >= wanted.attempt and row.state is not PreparationState.RUNNING
        )
        if wanted.rollout in self._state.index.rollouts and not has_ended:
            await self._fail(self._row_of(wanted), text)

    async def _may_have_lost_run(self, row: Preparation, stage: PrepareStage) -> bool:
        """Return whether a run that was lost may still be on the node; a handle is that of an earlier try."""
        runs = bool(stage.playbook) and row.node != BUILD_NODE
        return bool(row.handle) or (runs and await self._state.store.has_unfinished_run(row.node))

    async def _abandon(self, row: Preparation) -> None:
        """End what a stage of a closed rollout, or of a node that is gone, left running."""
        if row.handle:
            await self._runs.cancel(row.handle)
        await self._fail(row, "the rollout was closed, or the node left, before the stage ended")

    async def _clean_up(self, host: Host, row: Preparation) -> Failed | Unknown | None:
        """End the processes of a run that was lost; return why some may be left."""
        if row.node == BUILD_NODE:
            return None
        result = await capture_errors(
            row.rollout,
            self._adapters.runner.clean_up_stale_runs(host, keep=None, timeout_s=NODE_TIMEOUT_S),
        )
        return None if isinstance(result, Ok) else result

    # -- one stage of one node

    async def _prepare_node(self, job: _Job) -> None:
        """Skip the stage by the node's checkpoint, or do it between two snapshots."""
        adapters, stage = self._ports, job.stage
        node = self._state.index.nodes[job.row.node]
        is_resumed = bool(job.row.content)
        content = job.row.content or stage.content_for(node)
        row = replace(job.row, content=content)
        found = await capture_errors(
            row.rollout, adapters.checkpoints.read(job.host, timeout_s=NODE_TIMEOUT_S)
        )
        if isinstance(found, Failed | Unknown):
            await self._fail(row, found.text)
            return
        found = found or {}
        checkpoint = found.get((job.rollout.plan.name, stage.name))
        if checkpoint is not None and _is_done(checkpoint, job, content, is_resumed=is_resumed):
            state = PreparationState.DONE if is_resumed else PreparationState.SKIPPED
            when = f"done by {checkpoint.rollout} at {format_rfc3339(checkpoint.at)}"
            await self._record(replace(row, state=state, text="" if is_resumed else when, before=None))
            return
        if row.before is None or not is_resumed:
            measured = await self._snapshot(job.host)
            if isinstance(measured, Failed | Unknown):
                await self._fail(row, measured.text)
                return
            if row.before is not None and (changed := differences(row.before, measured, stage.may_change)):
                await self._disturbed(row, changed)
                return
            row = replace(row, before=measured)
        if stage.playbook:
            row = replace(row, handle=row.handle or run_id(row))
        # Also a row that has not changed: if another daemon has taken over, the write fails.
        if not await self._begin(row):
            return
        previous = previous_generation(self._state.index, node, stage, checkpoint)
        job = replace(job, row=row, replaced=checkpoint, previous=previous)
        acted = await capture_errors(row.rollout, self._act(job, tuple(found.values())))
        result, row = acted if isinstance(acted, tuple) else (acted, row)
        await self._finish(replace(job, row=row), result)

    async def _act(self, job: _Job, checkpoints: Collection[Checkpoint]) -> tuple[StepResult, Preparation]:
        """Do the stage; return its result and its row, with the bytes that were sent."""
        stage = job.stage
        if stage.playbook:
            request = await self._runs.request(
                job.row, job.host.name, stage.playbook, stage.variables, stage.timeout_s
            )
            return await self._runs.run(job.row, request)
        node = self._state.index.nodes[job.row.node]
        sent, timeout_s = 0, stage.timeout_s
        stager = self._ports.stagers.get(stage.method)
        if stager is None:
            text = f"{stage.method}: no such stager is installed; change the stage's `method`"
            return Failed(text), job.row
        directory = await self._manifest_directory(job)
        for artifact in stage.artifacts_for(node):
            if sent:  # for people; and it fails if another daemon has taken over
                await self._record(replace(job.row, bytes=sent))
            request_ = StagingRequest(
                job.host, artifact, self._rendered(job, stage.to), directory, self._rendered(job, stage.url)
            )
            staged = await capture_errors(
                job.rollout.id, stager.stage(request_, take=self._take(job), timeout_s=timeout_s)
            )
            if not isinstance(staged, Staged):
                return staged, replace(job.row, bytes=sent)
            sent += staged.bytes
        if job.replaced is not None:
            # The artifacts of the previous rollout stay, so that a rollback fetches nothing.
            others = (each for each in checkpoints if each is not job.replaced)
            rollouts = (each for each in self._state.index.rollouts.values() if not each.closed)
            keep = wanted_digests(rollouts) | remembered_digests(others) | set(job.previous)
            if old := remembered_digests([job.replaced]) - keep:
                to = self._rendered(job, stage.to)
                removed = stager.remove(job.host, to, old, timeout_s=NODE_TIMEOUT_S)
                await capture_errors(job.rollout.id, removed)
        return Ok(), replace(job.row, bytes=sent)

    async def _finish(self, job: _Job, result: StepResult) -> None:
        """Compare the node with its snapshot, leave a checkpoint, and record how the stage ended."""
        row = job.row
        measured = await self._snapshot(job.host)
        if isinstance(measured, Failed | Unknown):
            # The row keeps its snapshot: the next try compares with it first.
            text = measured.text if isinstance(result, Ok) else result.text
            await self._fail(row, text)
            return
        if changed := differences(row.before or {}, measured, job.stage.may_change):
            await self._disturbed(row, changed)
            return
        # Only a run that is lost can still disturb the node.
        ended = row if row.handle else replace(row, before=None)
        if not isinstance(result, Ok):
            await self._fail(ended, result.text)
            return
        node = self._state.index.nodes.get(row.node)
        artifacts = () if node is None else job.stage.artifacts_for(node)
        checkpoint = Checkpoint(
            plan=job.rollout.plan.name,
            stage=row.stage,
            content=row.content,
            change=job.rollout.digest.change,
            rollout=row.rollout,
            at=self._state.now(),
            artifacts={
                each.name: staged_artifact(self._rendered(job, job.stage.to), each) for each in artifacts
            },
            previous=job.previous,
        )
        await self._record(row)  # it fails if another daemon has taken over, and then nothing is written
        written = await capture_errors(
            row.rollout,
            self._ports.checkpoints.write(job.host, checkpoint, timeout_s=NODE_TIMEOUT_S),
        )
        if isinstance(written, Failed | Unknown):
            await self._fail(ended, written.text)
            return
        await self._record(replace(ended, state=PreparationState.DONE, text=result.text))

    async def _snapshot(self, host: Host) -> Mapping[str, str] | Failed | Unknown:
        snapshots = self._ports.snapshots
        return await capture_errors(host.name, snapshots.snapshot(host, timeout_s=NODE_TIMEOUT_S))

    # -- builds and cleanup

    async def _build(self, job: _Job) -> None:
        """Run a build's playbook and record the manifest that it wrote."""
        directory = self._built_directory(job.rollout.id, job.stage.name)
        row = replace(job.row, handle=job.row.handle or run_id(job.row), content=job.stage.playbook_digest)
        await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
        if not await self._begin(row):
            return
        path = directory / PurePosixPath(job.stage.manifest_file).name
        variables = {**job.stage.variables, MANIFEST_VARIABLE: str(path)}
        job = replace(job, row=row)
        request = await self._runs.request(
            row, job.stage.host or LOCALHOST, job.stage.playbook, variables, job.stage.timeout_s
        )
        result, row = await self._runs.run(row, request)
        if not isinstance(result, Ok):
            await self._fail(row, result.text)
            return
        found = await capture_errors(row.rollout, read_built_manifest(path))
        if isinstance(found, Failed | Unknown):
            await self._fail(row, found.text)
            return
        now = self._state.now()
        done = replace(row, state=PreparationState.DONE, at=now)
        manifest = tuple(map(entry_of_record, found))
        built = ArtifactsBuilt(row.rollout, row.stage, manifest, now)
        await self._state.commit([built, PreparationRecorded(done)], cause=f"stage {row.stage} is built")

    async def _remove(self, job: _Job) -> None:
        """Remove from a node what a cancelled rollout brought, by its playbook or by digest."""
        cleanup, row = job.rollout.plan.prepare_cleanup, job.row
        if cleanup is not None:
            row = replace(row, handle=row.handle or run_id(row))
        await self._record(row)
        job = replace(job, row=row)
        if cleanup is not None:
            request = await self._runs.request(
                row, job.host.name, cleanup.playbook, cleanup.variables, cleanup.timeout_s
            )
            result, row = await self._runs.run(row, request)
        else:
            result = await self._remove_artifacts(job)
        if isinstance(result, Ok):
            await self._record(replace(row, state=PreparationState.DONE, text=result.text))
        else:
            await self._fail(row, result.text)

    async def _remove_artifacts(self, job: _Job) -> StepResult:
        """Remove only what this rollout brought, and nothing that another may need."""
        adapters = self._ports
        found = await capture_errors(
            job.rollout.id, adapters.checkpoints.read(job.host, timeout_s=NODE_TIMEOUT_S)
        )
        if isinstance(found, Failed | Unknown):
            return found
        if found is None:
            return Ok("nothing was removed: the node's checkpoints are not as they were written")
        left = without_rollout(found, job.rollout.id)
        others = (each for each in self._state.index.rollouts.values() if each.cancelled is None)
        keep = wanted_digests(others) | remembered_digests(left.values())
        for stage in job.rollout.prepare_stages:
            stager = adapters.stagers.get(stage.method)
            digests = {each.sha256 for each in stage.manifest} - keep
            if digests and stager is not None:
                to = self._rendered(job, stage.to)
                removal = stager.remove(job.host, to, digests, timeout_s=NODE_TIMEOUT_S)
                failure = await capture_errors(job.rollout.id, removal)
                if failure is not None:
                    return failure
        if left != found:
            await self._record(job.row)  # it fails if another daemon has taken over
            removal = adapters.checkpoints.remove(job.host, job.rollout.id, timeout_s=NODE_TIMEOUT_S)
            failure = await capture_errors(job.rollout.id, removal)
            if failure is not None:
                return failure
        return Ok("the staged artifacts are removed")

    # -- records

    async def _begin(self, row: Preparation) -> bool:
        """Record that a stage begins; return False when it may not begin any more."""
        async with self._state.exclusive_commit() as commit:
            index, now = self._state.index, self._state.now()
            known = index.preparation(row.rollout, row.node, row.stage)
            is_running = known is not None and known.state is PreparationState.RUNNING
            if not is_running and not may_begin(index, row.rollout, row.node, row.stage, now):
                return False
            row = replace(row, at=now)
            await commit([PreparationRecorded(row)], f"prepare stage {row.stage} {row.state}")
            return True

    async def _record(self, row: Preparation) -> None:
        row = replace(row, at=self._state.now())
        cause = f"prepare stage {row.stage} {row.state}"
        await self._state.commit([PreparationRecorded(row)], cause=cause)

    async def _fail(self, row: Preparation, text: str) -> None:
        """Record a try that failed, with its snapshot; it is repeated after a pause that doubles."""
        failed = replace(
            row,
            state=PreparationState.FAILED,
            text=text,
            not_before=self._state.now() + backoff_s(row.attempt - 1),
        )
        await self._record(failed)

    async def _disturbed(self, row: Preparation, changed: Sequence[str]) -> None:
        """Record what the stage changed on a node in service; the node fails, and nothing else begins."""
        text, now = "; ".join(changed), self._state.now()
        target = self._state.index.target(row.rollout, row.node)
        if target.phase is not Phase.PENDING:
            await self._fail(row, text)  # it was skipped or left meanwhile
            return
        step = f"prepare.{row.stage}"
        moved = transition(
            target,
            Trigger.DISTURBED,
            now,
            step=step,
            text=text,
            code=FailureCode.PREPARE_DISTURBED,
            suffix=f".{row.stage}.{row.attempt}",
        )
        disturbed = replace(row, state=PreparationState.DISTURBED, text=text, before=None, at=now)
        events: list[Event] = [moved, PreparationRecorded(disturbed)]
        await self._state.commit(events, cause=f"{step} disturbed the node")

    # -- places and limits

    async def _manifest_directory(self, job: _Job) -> Path:
        """Return the directory of the stage's manifest: in the source, or where its build made it."""
        if job.stage.built_by:
            return self._built_directory(job.rollout.id, job.stage.built_by)
        tree = await self._adapters.tree(job.rollout.id)
        return (tree / job.stage.manifest_file).parent

    def _built_directory(self, rollout: str, stage: str) -> Path:
        return self._state.settings.state_dir / "artifacts" / rollout / stage

    def _rendered(self, job: _Job, text: str) -> str:
        """Return a path or a URL with the node's name, address and labels."""
        host = job.host
        rendered = render(
            {"text": text}, node=host.name, address=host.address, labels=host.labels, variables={}
        )
        return str(rendered["text"])

    def _take(self, job: _Job) -> TakeBytes:
        key, stage = (job.rollout.id, job.stage.name), job.stage
        limit = self._limits.setdefault(key, RateLimit(stage.rate_bps, sleep=self._state.clock.sleep))
        share = job.host.labels.get(stage.rate_by, "") if stage.rate_by else ""
        return lambda size: limit.take(size, share)


def _is_done(checkpoint: Checkpoint, job: _Job, content: str, *, is_resumed: bool) -> bool:
    """Return whether the checkpoint says that the stage is done; a forced one only by this rollout."""
    if checkpoint.content != content:
        return False
    by_this_rollout = checkpoint.rollout == job.rollout.id
    return by_this_rollout if job.stage.force or is_resumed else True
