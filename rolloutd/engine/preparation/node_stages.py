"""One prepare stage of one node: snapshot, record, act, snapshot, checkpoint, record."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from machines.model.node import Node
from machines.model.node_snapshot import differences
from machines.model.preparation import (
    ManifestEntry,
    PrepareKind,
    PrepareStage,
    entry_record,
)
from machines.model.timefmt import format_rfc3339
from machines.workflow import prepare_try
from rolloutd.engine.outcomes import capture_errors
from rolloutd.engine.preparation.builds import built_directory, built_name
from rolloutd.engine.preparation.kept_artifacts import previous_generation, remembered_digests, wanted_digests
from rolloutd.engine.preparation.rate_limit import RateLimits
from rolloutd.engine.preparation.session import NODE_TIMEOUT_S, StageSession
from rolloutd.engine.preparation.staged_files import compare_stages, stage_again
from rolloutd.ports import (
    Checkpoint,
    Failed,
    Ok,
    Stager,
    StagingRequest,
    StepResult,
    TakeBytes,
    Unknown,
    staged_artifact,
)

ARTIFACTS_VARIABLE = "rolloutd_artifacts"
"""Variable of a stage's playbook: the node's artifacts, each with `src` here and `path` on the node."""


class NodeStage:
    """One try of a stage on a node in service."""

    def __init__(self, session: StageSession, limits: RateLimits) -> None:
        self._session = session
        self._limits = limits
        self._artifacts: tuple[ManifestEntry, ...] = ()
        """What the node gets, by its labels as the stage began: it may leave the inventory meanwhile."""

    async def prepare(self) -> StepResult | None:
        """Skip the stage by the node's checkpoint, or do it between two snapshots.

        None if its end is recorded, or it may not begin.  Raises what the ports raise.
        """
        session, stage = self._session, self._session.stage
        node = session.state.index.nodes.get(session.row.node)
        if node is None:
            # It left while its older runs were ended; the preparer ends a stage that was begun.
            return None
        is_resumed, earlier = prepare_try.is_acting(session.row), prepare_try.uncompared_snapshot(session.row)
        session.change(content=session.row.content or stage.content_for(node))
        checkpoints = (
            await session.preparation_adapters.checkpoints.read(session.host, timeout_s=NODE_TIMEOUT_S) or {}
        )
        checkpoint = checkpoints.get((session.rollout.plan.name, stage.name))
        is_done = checkpoint is not None and _is_done(checkpoint, session, is_resumed=is_resumed)
        # The checkpoint says what was staged, not what is there now.
        differing = await self._compare(node, is_done=is_done)
        if differing and stage.kind is PrepareKind.INSTALL:
            await stage_again(session.state, session.rollout.id, node.name, differing, session.row)
            return None
        session.change(text=differing.get(stage.name, session.row.text if stage.is_compared else ""))
        if checkpoint is not None and is_done and not differing:
            # Its own checkpoint is of a try whose answer was lost: it did bring what is there.
            is_own = is_resumed or checkpoint.rollout == session.rollout.id
            when = f"done by {checkpoint.rollout} at {format_rfc3339(checkpoint.at)}"
            session.row = prepare_try.done_before(session.row, session.state.now(), "" if is_own else when)
            await session.record()
            return None
        if not is_resumed or session.row.before is None:
            measured = await self._measure()
            if earlier is not None and (changed := differences(earlier, measured, stage.may_change)):
                await session.disturbed(changed)
                return None
            session.change(before=measured)
        if stage.playbook:
            session.change(handle=session.run_handle)
            # One that was lost on the node since the decision is ended by the next decision.
            if not session.is_under_way and await session.state.has_unfinished_run(node.name):
                return None
        # Also a row that has not changed: if another daemon has taken over, the write fails.
        if not await session.begin():
            return None
        self._artifacts = stage.artifacts_for(node)
        previous = await previous_generation(session.state, node, stage, session.rollout.id, checkpoint)
        acted = self._act(checkpoint, previous, checkpoints.values())
        return await self._finish(await capture_errors(session.state, node.name, acted), previous)

    async def _compare(self, node: Node, *, is_done: bool) -> Mapping[str, str]:
        """Return how files differ that a stage has staged already, or that an install is about to read."""
        session, stage = self._session, self._session.stage
        compared: Iterable[PrepareStage] = ()
        if is_done and stage.is_compared:
            compared = (stage,)
        elif not is_done and not await session.has_run_begun():
            # Also for a resumed row: its run may begin hours after the files were compared.
            compared = (each for each in stage.reads if each.is_compared and each.applies_to(node))
        return await compare_stages(session.preparation_adapters.staged_files, session.host, node, compared)

    async def _act(
        self, replaced: Checkpoint | None, previous: Collection[str], checkpoints: Collection[Checkpoint]
    ) -> StepResult:
        """Do the stage; `previous` are the digests that stay on the node for a rollback."""
        session, stage = self._session, self._session.stage
        if stage.playbook:
            given = await self._given_artifacts() if stage.kind is PrepareKind.COPY else {}
            return await session.run(stage.playbook, {**stage.variables, **given}, stage.timeout_s)
        stager = session.preparation_adapters.stagers.get(stage.method)
        if stager is None:
            return Failed(f"{stage.method}: no such stager is installed; change the stage's `method`")
        result = await self._stage_artifacts(stager)
        if isinstance(result, Ok) and replaced is not None:
            others = (each for each in checkpoints if each is not replaced)
            await self._remove_replaced(replaced, {*previous, *remembered_digests(others)}, stager)
        return result

    async def _given_artifacts(self) -> Mapping[str, object]:
        """Return the variables of a playbook that brings the artifacts itself: what, from where, to where."""
        directory, to = await self._manifest_directory(), self._session.rendered(self._session.stage.to)
        artifacts = []
        for each in self._artifacts:
            staged = staged_artifact(to, each)
            source = str(directory / each.path) if each.path else ""
            places = {"src": source, "path": staged.path, "unpacked": staged.unpacked}
            artifacts.append({**entry_record(each), "select": "", **places})
        return {ARTIFACTS_VARIABLE: artifacts}

    async def _stage_artifacts(self, stager: Stager) -> StepResult:
        """Bring the node's artifacts; the row has the bytes that were sent."""
        session, stage, text = self._session, self._session.stage, ""
        session.change(bytes=0)
        directory = await self._manifest_directory()
        to, url, take = session.rendered(stage.to), session.rendered(stage.url), self._take()
        for artifact in self._artifacts:
            if session.row.bytes:  # for people; and it fails if another daemon has taken over
                await session.record()
            request = StagingRequest(session.host, artifact, to, directory, url)
            staged = await stager.stage(request, take=take, timeout_s=stage.timeout_s)
            if isinstance(staged, Failed):
                return staged
            session.change(bytes=session.row.bytes + staged.bytes)
            text = text or staged.replaced
        return Ok(text)

    async def _remove_replaced(self, replaced: Checkpoint, kept: Collection[str], stager: Stager) -> None:
        """Remove the artifacts before the previous ones, which stay so that a rollback fetches nothing."""
        session = self._session
        rollouts = (each for each in session.state.index.rollouts.values() if not each.closed)
        if old := remembered_digests([replaced]) - wanted_digests(rollouts) - set(kept):
            to = session.rendered(session.stage.to)
            removal = stager.remove(session.host, to, old, timeout_s=NODE_TIMEOUT_S)
            await capture_errors(session.state, session.host.name, removal)

    async def _finish(self, result: StepResult, previous: tuple[str, ...]) -> StepResult | None:
        """Compare the node with its snapshot, and leave a checkpoint; None if it was disturbed."""
        session = self._session
        measured = await capture_errors(session.state, session.host.name, self._measure())
        if isinstance(measured, Failed | Unknown):
            # The row keeps its snapshot: the next try compares with it first.
            return measured if isinstance(result, Ok) else result
        if changed := differences(session.row.before or {}, measured, session.stage.may_change):
            await session.disturbed(changed)
            return None
        if isinstance(result, Ok):
            # It fails if another daemon has taken over, and then nothing is written.
            await session.record()
            written = await capture_errors(session.state, session.host.name, self._write_checkpoint(previous))
            result = result if written is None else written
        # Only a run that is lost can still disturb the node.
        if not session.row.handle:
            session.change(before=None)
        return result

    async def _write_checkpoint(self, previous: tuple[str, ...]) -> None:
        session = self._session
        to = session.rendered(session.stage.to)
        checkpoint = Checkpoint(
            plan=session.rollout.plan.name,
            stage=session.stage.name,
            content=session.row.content,
            change=session.rollout.digest.change,
            rollout=session.rollout.id,
            at=session.state.now(),
            artifacts={each.name: staged_artifact(to, each) for each in self._artifacts},
            previous=previous,
        )
        await session.preparation_adapters.checkpoints.write(
            session.host, checkpoint, timeout_s=NODE_TIMEOUT_S
        )

    async def _measure(self) -> Mapping[str, str]:
        session = self._session
        return await session.preparation_adapters.snapshots.snapshot(session.host, timeout_s=NODE_TIMEOUT_S)

    async def _manifest_directory(self) -> Path:
        """Return the directory of the stage's manifest: in the source, or where its build made it."""
        session, stage = self._session, self._session.stage
        if stage.built_by:
            await session.preparation_adapters.built.find(
                built_name(session.rollout.id, stage.built_by)
            )  # or another machine's
            return built_directory(session.state, session.rollout.id, stage.built_by)
        tree = session.preparation_adapters.find_tree(await session.adapters.source(session.rollout.id))
        return (tree / stage.manifest_file).parent

    def _take(self) -> TakeBytes:
        session, stage = self._session, self._session.stage
        limit = self._limits.limit(session.rollout.id, stage, session.state.index.rollouts)
        share = session.host.labels.get(stage.rate_by, "") if stage.rate_by else ""
        return lambda size: limit.take(size, share)


def _is_done(checkpoint: Checkpoint, session: StageSession, *, is_resumed: bool) -> bool:
    """Return whether the checkpoint says that the stage is done; a forced one only by this rollout."""
    if checkpoint.content != session.row.content:
        return False
    by_this_rollout = checkpoint.rollout == session.rollout.id
    return by_this_rollout if session.stage.is_forced_on(session.row.node) or is_resumed else True
