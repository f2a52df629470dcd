"""Prepare stages, each a job of its own.

It may be killed between any two lines: the next daemon reads the same row,
finds the run by its claim and the files by their digests, and compares with the snapshot in the row.
It knows ports, never an adapter.
"""

from __future__ import annotations

from machines.facts.node_work import WorkKind, conflicting_work
from machines.model.decision import Prepare
from machines.model.preparation import CLEANUP, PrepareKind, PrepareStage
from machines.workflow import prepare_try
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.engine.outcomes import capture_errors
from rolloutd.engine.preparation import builds
from rolloutd.engine.preparation.kept_artifacts import remembered_digests, wanted_digests
from rolloutd.engine.preparation.node_stages import NodeStage
from rolloutd.engine.preparation.rate_limit import RateLimits
from rolloutd.engine.preparation.session import NODE_TIMEOUT_S, StageSession
from rolloutd.engine.state import State
from rolloutd.ports import Ok, StepResult, without_rollout


class Preparer:
    """Carries out prepare stages; between them it remembers only the rate limits that they share."""

    def __init__(self, state: State, adapters: AdapterSet) -> None:
        self._state = state
        self._adapters = adapters
        self._limits = RateLimits()

    def node_of(self, wanted: Prepare) -> str:
        """Return the node that the stage works on; empty for a build on the daemon's machine."""
        rollout = self._state.index.rollouts.get(wanted.rollout)
        return wanted.node if rollout is None else rollout.node_of_stage(wanted.node, wanted.stage)

    async def prepare(self, wanted: Prepare) -> None:
        """Carry out a stage, and record how it ended."""
        session = self._open(wanted)
        if session is None:
            return
        subject = f"{wanted.rollout}/{wanted.node}"
        result = await capture_errors(self._state, subject, self._run_stage(session, wanted))
        if result is not None:
            await session.finish(result)

    def _open(self, wanted: Prepare) -> StageSession | None:
        """Return the try that was decided; None if its rollout is gone, or a later one has begun."""
        rollout = self._state.index.rollouts.get(wanted.rollout)
        before = self._state.index.preparation(wanted.rollout, wanted.node, wanted.stage)
        if rollout is None or (before is not None and before.attempt > wanted.attempt):
            return None
        stages = (*rollout.prepare_stages, PrepareStage(CLEANUP, PrepareKind.INSTALL))
        stage = next((each for each in stages if each.name == wanted.stage), None)
        if stage is None:
            return None
        row = prepare_try.intent(wanted, before, self._state.now())
        return StageSession(self._state, self._adapters, rollout, stage, row)

    def _is_occupied(self, wanted: Prepare) -> bool:
        """Return whether work has begun on the node since the decision; begin() judges it once more."""
        node, now = self.node_of(wanted), self._state.now()
        return conflicting_work(self._state.index, WorkKind.STAGE, node, now, wanted.rollout) is not None

    async def _run_stage(self, session: StageSession, wanted: Prepare) -> StepResult | None:
        """Return how the try ended; None if that is recorded, or it may not begin."""
        stage = session.stage
        if session.is_under_way:
            if not session.is_wanted:
                return await session.abandon()
        elif not session.is_wanted or self._is_occupied(wanted):
            return None  # the next decision asks again
        if not prepare_try.is_acting(session.row) and await self._may_have_lost_run(session):
            if not await session.begin():
                return None
            if (failure := await session.end_lost_run()) is not None:
                return failure
        if stage.name == CLEANUP:
            return await remove(session)
        if stage.kind is PrepareKind.BUILD:
            return await builds.build(session)
        return await NodeStage(session, self._limits).prepare()

    async def _may_have_lost_run(self, session: StageSession) -> bool:
        if prepare_try.has_lost_run(session.row):
            return True
        runs = bool(session.stage.playbook) and not session.is_local
        return runs and await self._state.has_unfinished_run(session.host.name)


async def remove(session: StageSession) -> StepResult | None:
    """Remove from a node what a cancelled rollout brought, by its playbook or by digest; None if it may not.

    Raises NodeUnreachable, TimeoutError and AdapterFailed.
    """
    rollout, cleanup, node = session.rollout.id, session.rollout.plan.prepare_cleanup, session.host.name
    # A node that has drifted waits like one that only has the files, and may run them.
    if (await session.state.store.find_changes_in_effect(node, [rollout]))[rollout]:
        return Ok("nothing was removed: the node has its change, or had it")
    # From here on the try acts, so that a restarted daemon finds its run again and does not end it.
    session.change(content=session.rollout.digest.change)
    if cleanup is not None:
        session.change(handle=session.run_handle)
    # The handle first: a daemon that is killed after the start must find the run.
    if not await session.begin():
        return None
    if cleanup is not None:
        return await session.run(cleanup.playbook, cleanup.variables, cleanup.timeout_s)
    return await _remove_artifacts(session)


async def _remove_artifacts(session: StageSession) -> Ok:
    """Remove only what this rollout brought, and nothing that another may need."""
    adapters, host, rollout = session.preparation_adapters, session.host, session.rollout
    checkpoints = await adapters.checkpoints.read(host, timeout_s=NODE_TIMEOUT_S)
    if checkpoints is None:
        return Ok("nothing was removed: the node's checkpoints are not as they were written")
    left = without_rollout(checkpoints, rollout.id)
    others = (each for each in session.state.index.rollouts.values() if each.cancelled is None)
    keep = wanted_digests(others) | remembered_digests(left.values())
    for stage in rollout.prepare_stages:
        stager = adapters.stagers.get(stage.method)
        digests = {each.sha256 for each in stage.manifest} - keep
        if digests and stager is not None:
            await stager.remove(host, session.rendered(stage.to), digests, timeout_s=NODE_TIMEOUT_S)
    if left != checkpoints:
        await session.record()  # it fails if another daemon has taken over
        await adapters.checkpoints.remove(host, rollout.id, timeout_s=NODE_TIMEOUT_S)
    return Ok("the staged artifacts are removed")
