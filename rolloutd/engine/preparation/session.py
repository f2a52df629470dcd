"""One try of a prepare stage: what is recorded of it, and its run.

It may be killed between any two lines: the next daemon reads the same row, and finds the run by its claim.
Each write of the row fails if another daemon has taken over.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from machines.facts.preparations import BUILD_NODE
from machines.model.events import Event, PreparationRecorded
from machines.model.preparation import CLEANUP, LOCALHOST, Preparation, PreparationState, PrepareStage
from machines.model.rollout import FailureCode, Rollout
from machines.scheduler.stage_admission import is_to_be_cleaned, may_begin
from machines.states import Phase, Trigger
from machines.workflow import prepare_try
from machines.workflow.phase_transitions import transition
from machines.workflow.steps import StepPrefix, step_id
from rolloutd.engine.drivers.node_session import AdapterSet, PreparationAdapters, end_runs_on_node
from rolloutd.engine.outcomes import capture_errors
from rolloutd.engine.runners import FOLLOW_RETRY_S, follow_with_retries
from rolloutd.engine.state import State
from rolloutd.plugin.templates import render
from rolloutd.ports import Failed, Host, Ok, RunRequest, RunState, StepResult, Unknown, id_of, wait_for_end

LOCAL_CONNECTION = {
    "ansible_connection": "local",
    # As for Ansible's own localhost: what discovery finds first may be a stub that does not run.
    "ansible_python_interpreter": sys.executable,
}

NODE_TIMEOUT_S = 60.0
"""Limit of one command on a node: a checkpoint or a snapshot is some hundred kilobytes."""


def render_for_host(text: str, host: Host) -> str:
    """Return a path or a URL of a stage with the node's name, address and labels."""
    rendered = render({"text": text}, node=host.name, address=host.address, labels=host.labels, variables={})
    return str(rendered["text"])


class StageSession:
    """One try of a stage; `row` is its latest row, with what is not recorded yet."""

    def __init__(
        self, state: State, adapters: AdapterSet, rollout: Rollout, stage: PrepareStage, row: Preparation
    ) -> None:
        self.state = state
        self.adapters = adapters
        self.rollout = rollout
        self.stage = stage
        self.row = row

    @cached_property
    def host(self) -> Host:
        """The host as the try began, because it may leave the inventory; raises NotFound."""
        node = self.rollout.node_of_stage(self.row.node, self.row.stage)
        if node in ("", LOCALHOST):
            return Host(LOCALHOST, connection=LOCAL_CONNECTION)
        return self.state.host(node)

    @property
    def is_local(self) -> bool:
        return self.host.name == LOCALHOST

    @property
    def preparation_adapters(self) -> PreparationAdapters:
        return self.adapters.preparation_adapters

    @property
    def recorded_row(self) -> Preparation | None:
        return self.state.index.preparation(self.row.rollout, self.row.node, self.row.stage)

    @property
    def is_under_way(self) -> bool:
        """Whether the stage is recorded as begun and not as ended."""
        return self.recorded_row is not None and self.recorded_row.state is PreparationState.RUNNING

    @property
    def is_wanted(self) -> bool:
        """Whether its rollout is open, or is cleaned up, and the inventory has its node.

        A cleanup that has begun goes to its end.
        """
        index, row = self.state.index, self.row
        rollout = index.rollouts.get(row.rollout)
        if rollout is None or (row.node != BUILD_NODE and row.node not in index.nodes):
            return False
        if row.stage == CLEANUP:
            return prepare_try.is_acting(self.recorded_row) or is_to_be_cleaned(index, rollout)
        return not rollout.closed

    def rendered(self, text: str) -> str:
        return render_for_host(text, self.host)

    # -- records ------------------------------------------------------------------

    def change(self, **changes: Any) -> None:
        """Change the row; the next write records it."""
        self.row = replace(self.row, **changes)

    async def begin(self) -> bool:
        """Record that the stage begins; return False when it may not begin any more."""
        async with self.state.exclusive_commit() as commit:
            row, now = self.row, self.state.now()
            # A stage that has begun goes to its end, whatever may begin now.
            if self.is_under_way:
                may_go_on = prepare_try.is_acting(self.recorded_row) or self.is_wanted
            else:
                may_go_on = may_begin(self.state.index, row.rollout, row.node, row.stage, now)
            if not may_go_on:
                return False
            self.change(at=now)
            await commit([PreparationRecorded(self.row)], f"prepare stage {row.stage} {row.state}")
            return True

    async def record(self, *, cause: str = "", **changes: Any) -> None:
        self.change(**{"at": self.state.now(), **changes})
        cause = cause or f"prepare stage {self.row.stage} {self.row.state}"
        await self.state.commit([PreparationRecorded(self.row)], cause=cause)

    async def finish(self, result: StepResult) -> None:
        """Record how the try ended, unless an end of it is recorded."""
        recorded = self.recorded_row
        has_ended = recorded is not None and recorded.attempt >= self.row.attempt and not self.is_under_way
        if self.rollout.id in self.state.index.rollouts and not has_ended:
            self.row = prepare_try.ended(self.row, result, self.state.now())
            await self.record()

    async def disturbed(self, changed: Sequence[str]) -> None:
        """Record what the stage changed on a node in service; the node fails, and nothing else begins."""
        row, text, now = self.row, "; ".join(changed), self.state.now()
        target = self.state.index.target(row.rollout, row.node)
        if target.phase is not Phase.PENDING:
            await self.finish(Failed(text))  # it was skipped or left meanwhile
            return
        step = step_id(StepPrefix.PREPARE, row.stage)
        moved = transition(
            target,
            Trigger.DISTURBED,
            now,
            step=step,
            text=text,
            code=FailureCode.PREPARE_DISTURBED,
            suffix=f".{row.stage}.{row.attempt}",
        )
        self.row = prepare_try.disturbed(row, text, now)
        events: list[Event] = [moved, PreparationRecorded(self.row)]
        await self.state.commit(events, cause=f"{step} disturbed the node")

    # -- the run of its playbook --------------------------------------------------

    @property
    def run_handle(self) -> str:
        """The handle of the run, or the id with which it begins."""
        node = self.row.node or LOCALHOST
        return self.row.handle or self.adapters.runners.run_id_for(self.row.run_name, node)

    async def has_run_begun(self) -> bool:
        """Return whether the run has begun; False if that is unknown."""
        if not self.row.handle:
            return False
        found = await capture_errors(
            self.state, self.row.rollout, self.adapters.runners.get_state(self.row.handle)
        )
        return isinstance(found, RunState) and found.has_begun

    async def run(self, playbook: str, variables: Mapping[str, object], timeout_s: float) -> StepResult:
        """Start or find the run, and follow it to its end.

        The row keeps the handle of a run that may have left processes: the next try ends them first.
        """
        runners, row = self.adapters.runners, self.row
        if runners.is_elsewhere(row.handle):
            return Unknown("another machine, which no longer leads, began this run; it is repeated")
        request = RunRequest(
            run_id=id_of(row.handle),  # start() returns the handle of the run that has begun
            host=self.host,
            source=await self.adapters.source(row.rollout),
            playbook=playbook,
            variables=dict(variables),
            timeout_s=timeout_s,
            fencing_token=await self.state.fence_token(),
            rollout=row.rollout,
            attempt=row.attempt,
            step=row.stage,
        )
        subject = row.rollout
        followed = await follow_with_retries(
            lambda: capture_errors(self.state, subject, self._follow(request)), self._may_follow_again
        )
        if followed is None:
            return await self.abandon()
        if not isinstance(followed, RunState):
            await self.cancel()
            return followed
        assert followed.result is not None, "the run is over"
        if not _may_continue(followed.result):
            self.change(handle="")
        return followed.result

    async def _may_follow_again(self) -> bool:
        """Wait, then return whether the run may be followed again, which may start it."""
        await self.state.clock.sleep(FOLLOW_RETRY_S)
        if not self.is_wanted:
            return False
        await self.record()
        return True

    async def _follow(self, request: RunRequest) -> RunState:
        handle = await self.adapters.runners.start(request)
        if handle != self.row.handle:
            await self.record(handle=handle)
        return await wait_for_end(self.adapters.runners, handle)

    async def cancel(self) -> None:
        """Cancel the run; something of it may be left on the node."""
        # If another daemon has taken over, this write fails: the run is that daemon's now.
        await self.record(cause=f"prepare stage {self.row.stage} is cancelled")
        await capture_errors(self.state, self.row.handle, self.adapters.runners.cancel(self.row.handle))

    async def abandon(self) -> Failed:
        """End what a stage of a closed rollout, or of a node that is gone, left running."""
        if self.row.handle:
            await self.cancel()
        return Failed("the rollout was closed, or the node left, before the stage ended")

    async def end_lost_run(self) -> Failed | Unknown | None:
        """End the processes of a run that was lost; return why some may be left."""
        if not self.is_local:
            ended = await end_runs_on_node(self.state, self.adapters, self.host.name, NODE_TIMEOUT_S)
            if not isinstance(ended, Ok):
                return ended
        self.change(handle="")
        return None


def _may_continue(result: StepResult) -> bool:
    """Return whether processes of the run may still be on the node, and change it after the comparison."""
    # Cancelling ends the processes of this machine for certain, those of a node only if it answers.
    lost = (FailureCode.INTERFERENCE, FailureCode.LOST, FailureCode.UNKNOWN, FailureCode.UNREACHABLE)
    return isinstance(result, Unknown) or (isinstance(result, Failed) and result.code in lost)
