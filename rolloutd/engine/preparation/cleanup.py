"""Removal of what a cancelled rollout brought to a node."""

from __future__ import annotations

from rolloutd.engine.preparation.kept_artifacts import remembered_digests, wanted_digests
from rolloutd.engine.preparation.session import NODE_TIMEOUT_S, StageSession
from rolloutd.ports import Ok, StepResult, without_rollout


async def remove(session: StageSession) -> StepResult | None:
    """Remove from a node what a cancelled rollout brought, by its playbook or by digest; None if it may not.

    Raises NodeUnreachable, TimeoutError and AdapterFailed.
    """
    rollout, cleanup, node = session.rollout.id, session.rollout.plan.prepare_cleanup, session.host.name
    # A node that has drifted waits like one that only has the files, and may run them.
    if (await session.state.store.find_changes_in_effect(node, [rollout]))[rollout]:
        return Ok("nothing was removed: the node has its change, or had it")
    # A row with content is not taken for one that may have lost a run: its run is found again.
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
