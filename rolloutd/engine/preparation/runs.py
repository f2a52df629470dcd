"""Playbook runs of prepare stages: on nodes in service, or on the machine that builds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

from machines.model.events import PreparationRecorded
from machines.model.preparation import Preparation
from machines.model.rollout import FailureCode
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.engine.outcomes import capture_errors
from rolloutd.engine.preparation.journal import LOCALHOST, run_id
from rolloutd.engine.state import State
from rolloutd.ports import Failed, Host, RunRequest, RunState, StepResult, Unknown, wait_for_end

LOCAL_CONNECTION = {
    "ansible_connection": "local",
    # As for Ansible's own localhost: what discovery finds first may be a stub that does not run.
    "ansible_python_interpreter": sys.executable,
}


class PrepareRuns:
    """Starts or finds the runs, and follows them to their ends."""

    def __init__(self, state: State, adapters: AdapterSet) -> None:
        self._state = state
        self._adapters = adapters

    def handle_of(self, row: Preparation) -> str:
        """Return the handle of the row's run, or the id with which it begins."""
        return row.handle or self._adapters.runner.run_id_for(run_id(row), row.node or LOCALHOST)

    async def has_begun(self, row: Preparation) -> bool:
        """Return whether the row's run has begun; False if that is unknown."""
        if not row.handle:
            return False
        state = await capture_errors(row.rollout, self._adapters.runner.get_state(row.handle))
        return isinstance(state, RunState) and state.has_begun

    async def request(
        self, row: Preparation, node: str, playbook: str, variables: Mapping[str, object], timeout_s: float
    ) -> RunRequest:
        is_local = node == LOCALHOST
        return RunRequest(
            run_id=self.handle_of(row).partition("~")[
                0
            ],  # start() returns the handle of the run that has begun
            host=Host(node, connection=LOCAL_CONNECTION) if is_local else self._state.host(node),
            source=await self._adapters.source(row.rollout),
            playbook=playbook,
            variables=dict(variables),
            timeout_s=timeout_s,
            fencing_token=await self._state.fence_token(),
            rollout=row.rollout,
            attempt=row.attempt,
            step=row.stage,
        )

    async def run(self, row: Preparation, request: RunRequest) -> tuple[StepResult, Preparation]:
        """Start or find the run, and follow it to its end.

        The row that is returned has the handle of a run that may have left processes on the node, else none.
        """
        runner = self._adapters.runner
        if runner.is_elsewhere(row.handle):
            # The row keeps the handle: the next try first ends what the run left on the node.
            return Unknown("another machine, which no longer leads, began this run; it is repeated"), row
        started = await capture_errors(row.rollout, runner.start(request))
        if isinstance(started, str):
            if started != row.handle:
                row = replace(row, handle=started)
                cause = f"the run of prepare stage {row.stage} has another handle"
                await self._state.commit([PreparationRecorded(row)], cause=cause)
            followed = await capture_errors(row.rollout, wait_for_end(runner, started))
            if isinstance(followed, RunState) and followed.result is not None:
                return followed.result, row if _may_continue(followed.result) else replace(row, handle="")
            started = followed if isinstance(followed, Failed | Unknown) else Unknown("the run has no result")
        # The row keeps the handle: the next try makes sure that nothing of this run is left on the node.
        await self.cancel(row)
        return started, row

    async def cancel(self, row: Preparation) -> None:
        """Cancel the run of a stage that runs; something of it may be left on the node."""
        # If another daemon has taken over, this write fails: the run is that daemon's now.
        await self._state.commit([PreparationRecorded(row)], cause=f"prepare stage {row.stage} is cancelled")
        await capture_errors(row.handle, self._adapters.runner.cancel(row.handle))


def _may_continue(result: StepResult) -> bool:
    """Return whether processes of the run may still be on the node, and change it after the comparison."""
    # Cancelling ends the processes of this machine for certain, those of a node only if it answers.
    lost = (FailureCode.DISTURBED, FailureCode.LOST, FailureCode.UNKNOWN, FailureCode.UNREACHABLE)
    return isinstance(result, Unknown) or (isinstance(result, Failed) and result.code in lost)
