"""Removal of what a cancelled rollout brought to a node."""

from __future__ import annotations

from dataclasses import replace

from machines.model.preparation import PreparationState
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.engine.outcomes import capture_errors
from rolloutd.engine.preparation.journal import NODE_TIMEOUT_S, PrepareJob, PrepareJournal
from rolloutd.engine.preparation.kept_artifacts import remembered_digests, wanted_digests
from rolloutd.engine.preparation.runs import PrepareRuns
from rolloutd.engine.state import State
from rolloutd.ports import Failed, Ok, StepResult, Unknown, without_rollout


class Cleanup:
    """Cleans up nodes by the plan's playbook, or by the digests of the artifacts."""

    def __init__(
        self, state: State, adapters: AdapterSet, journal: PrepareJournal, runs: PrepareRuns
    ) -> None:
        self._state = state
        self._adapters = adapters
        self._journal = journal
        self._runs = runs

    async def remove(self, job: PrepareJob) -> None:
        """Remove from a node what a cancelled rollout brought, by its playbook or by digest."""
        cleanup, row, node = job.rollout.plan.prepare_cleanup, job.row, job.host.name
        # A node that has drifted waits like one that only has the files, and may run them.
        if (await self._state.store.find_changes_in_effect(node, [row.rollout]))[row.rollout]:
            text = "nothing was removed: the node has its change, or had it"
            await self._journal.record(replace(row, state=PreparationState.DONE, text=text))
            return
        if cleanup is not None:
            row = replace(row, handle=self._runs.handle_of(row))
        # The handle first: a daemon that is killed after the start must find the run.
        await self._journal.record(row)
        job = replace(job, row=row)
        if cleanup is not None:
            request = await self._runs.request(
                row, node, cleanup.playbook, cleanup.variables, cleanup.timeout_s
            )
            result, row = await self._runs.run(row, request)
        else:
            result = await self._remove_artifacts(job)
        if isinstance(result, Ok):
            await self._journal.record(replace(row, state=PreparationState.DONE, text=result.text))
        else:
            await self._journal.fail(row, result.text)

    async def _remove_artifacts(self, job: PrepareJob) -> StepResult:
        """Remove only what this rollout brought, and nothing that another may need."""
        adapters = self._adapters.preparation_adapters
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
                to = job.rendered(stage.to)
                removal = stager.remove(job.host, to, digests, timeout_s=NODE_TIMEOUT_S)
                failure = await capture_errors(job.rollout.id, removal)
                if failure is not None:
                    return failure
        if left != found:
            await self._journal.record(job.row)  # it fails if another daemon has taken over
            removal = adapters.checkpoints.remove(job.host, job.rollout.id, timeout_s=NODE_TIMEOUT_S)
            failure = await capture_errors(job.rollout.id, removal)
            if failure is not None:
                return failure
        return Ok("the staged artifacts are removed")
