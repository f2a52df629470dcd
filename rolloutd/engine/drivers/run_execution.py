"""Runs of one node, of playbooks or changes: start or find a run, follow it, clean up after older ones.

A run outlives the daemon, so the driver first asks the runner whether a run with this id exists.  A run that
the daemon cannot follow continues and is found again.  The core decides from the records what a run's end
means.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from machines.model import actions
from machines.model.plan import PLAYBOOK_RUN
from machines.model.rollout import FailureCode
from machines.model.step_record import StepRecord, StepState
from machines.model.target_plan import plan_with_values
from machines.states import IN_FLIGHT_PHASES
from machines.workflow.recording import record_of
from rolloutd.configuration.documents import Configuration, configuration_hash, intended_configuration
from rolloutd.configuration.target_values import params_for
from rolloutd.engine.drivers.guard_steps import GuardSteps
from rolloutd.engine.drivers.isolation import Isolation
from rolloutd.engine.drivers.node_session import NodeSession, end_runs_on_node
from rolloutd.engine.drivers.step_journal import StepJournal
from rolloutd.engine.runners import FOLLOW_RETRY_S, follow_with_retries
from rolloutd.engine.tasks import Wakeup, running_in_background
from rolloutd.ports import MAX_PREVIOUS_BYTES, Failed, Ok, RunRequest, RunState, StepResult, Unknown, id_of
from rolloutd.texts.cause_text import describe_causes

ELSEWHERE_RETRY_S = 15.0
"""Pause before a node is tried again on which a run of another machine may be under way."""

ELSEWHERE_MARGIN_S = 300.0
"""Time after its own limit in which a run of another machine has ended: its wait for a slot, and its end."""


class RunExecution:
    def __init__(
        self,
        session: NodeSession,
        journal: StepJournal,
        isolation: Isolation,
        guard: GuardSteps,
        wakeup: Wakeup,
    ) -> None:
        self._session = session
        self._state = session.state
        self._runners = session.adapters.runners
        self._journal = journal
        self._isolation = isolation
        self._guard = guard
        self._wakeup = wakeup

    async def clean_up_stale_runs(self, action: actions.CleanUpStaleRuns) -> None:
        """End all processes that older runs left on the node."""
        record = self._journal.begin(action)
        await self._journal.write(record)
        result = await self._end_runs_on_node(action.timeout_s)
        await self._journal.finish(record, result)
        if isinstance(result, Ok):
            self._journal.has_unfinished_run = False

    async def _end_runs_on_node(self, timeout_s: float) -> StepResult:
        session = self._session
        ending = end_runs_on_node(session.state, session.adapters, session.node, timeout_s)
        return await session.capture_errors(ending)

    async def run(self, action: actions.RunPlaybook) -> None:
        """Start or find the run of a stage, and follow it to its end."""
        stage, session = action.stage, self._session
        run = f"{session.rollout}.{session.node}.{session.target.attempt}.{stage.name}.{action.number}"
        record = self._journal.begin(action, handle=self._runners.run_id_for(run, session.node, stage.kind))
        if action.is_started:
            handle = self._journal.recorded_version(record).handle
            if self._runners.is_elsewhere(handle):
                await self._supersede(action, replace(record, handle=handle))
                return
            record = replace(record, handle=id_of(handle))
        run_in_progress = action.is_started and await self._was_started(
            self._journal.recorded_version(record).handle
        )
        if not await self._isolation.ensure_isolated(self._session.plan, run_in_progress=run_in_progress):
            return
        if not run_in_progress and not await self._guard.wait_until_heard():
            return
        if not run_in_progress:
            record = await self._with_previous(action, self._journal.recorded_version(record))
            if record.state is not StepState.INTENDED:
                await self._journal.write(record)
            if record.state is not StepState.INTENDED or not self._is_in_flight():
                return
        # Write even an unchanged record: if another daemon took over, the write fails and no run starts.
        configuration = None if run_in_progress else self._configuration(action)
        await self._journal.write(self._journal.recorded_version(record), configuration=configuration)
        # From here on a run may exist on the node, even if its start is never answered.
        self._journal.has_unfinished_run = True
        result = await self._follow_with_retries(action, record)
        if result is None:
            return
        if not isinstance(result, Failed):
            await self._guard.renew()  # the checks that confirm the change have the guard's whole time
        await self._journal.finish(self._with_wait(self._journal.recorded_version(record)), result)
        await self._journal.update_unfinished_run()

    async def _with_previous(self, action: actions.RunPlaybook, record: StepRecord) -> StepRecord:
        """Return the record with what the run replaces, or as failed; as it is if its kind records nothing.

        What was recorded before stays: the run may have begun since.
        """
        if action.stage.kind == PLAYBOOK_RUN or record.prior is not None:
            return record
        request = await self._build_request(action, record.handle)
        async with running_in_background(
            self._session.capture_errors(self._runners.read_previous(request))
        ) as reading:
            reading.add_done_callback(lambda _: self._wakeup.trigger())
            while not reading.done() and self._is_in_flight():
                await self._wakeup.wait_for(asyncio.wait((reading,)))
        if reading.cancelled():
            return record
        previous = reading.result()
        if previous is None:
            return record
        if isinstance(previous, str) and len(previous.encode()) <= MAX_PREVIOUS_BYTES:
            return replace(record, prior=previous)
        detail = f"over {MAX_PREVIOUS_BYTES} bytes" if isinstance(previous, str) else previous.text
        text = f"{record.node}: the state before the change could not be recorded: {detail}"
        failed = Failed(text, code=FailureCode.NEVER_STARTED)
        # Without a handle: nothing was begun that could have left anything.
        return record_of(replace(record, handle=""), failed, self._state.now())

    async def _supersede(self, action: actions.RunPlaybook, record: StepRecord) -> None:
        """End a run that another machine began, and record that its outcome is unknown.

        No second run may start meanwhile.  A node that does not answer is tried until the run must have
        passed its own limit; what runs next on the node cleans up first all the same.
        """
        record = self._journal.recorded_version(record)
        self._journal.has_unfinished_run = True
        until = record.began_at + action.stage.timeout_s + ELSEWHERE_MARGIN_S
        while True:
            # If another daemon has taken over, this write fails: the run is that daemon's to end.
            await self._journal.write(record)
            ended = await self._end_runs_on_node(actions.STALE_RUN_TIMEOUT_S)
            if isinstance(ended, Ok) or self._state.now() >= until:
                break
            await self._wakeup.wait_for(self._state.clock.sleep(ELSEWHERE_RETRY_S))
            if not self._is_in_flight():
                return
        text = f"the run on {record.node} was begun by another machine, which no longer leads"
        left = "" if isinstance(ended, Ok) else f"; something of it may be left: {ended.text}"
        await self._journal.finish(record, Unknown(f"{text}; its commands are refused from now on{left}"))
        await self._journal.update_unfinished_run()

    def _with_wait(self, record: StepRecord) -> StepRecord:
        """Return the record with how long the run waited for its slot, as the runner knows it."""
        started_at = self._session.progress.run.started_at
        if started_at is None:
            return record
        return replace(record, waited_s=max(0.0, started_at - record.began_at))

    def _configuration(self, action: actions.RunPlaybook) -> Configuration | None:
        """Return what this run gives to the node; None for a rollback and a repair."""
        session, state = self._session, self._state
        if session.target.rolling_back or action.stage not in session.plan.stages:
            return None
        source = state.index.rollout(session.rollout).source
        variables = state.connections.get(session.node, {})
        given = plan_with_values(session.plan, session.node), source, variables, state.redaction_key
        document = intended_configuration(*given, state.settings.show_vars)
        return Configuration(configuration_hash(*given), document)

    async def stop(self, action: actions.StopRun) -> None:
        """Cancel a run by a user's order, and record it."""
        handle = action.record.handle
        failure: StepResult | None
        if self._runners.is_elsewhere(handle):
            ended = await self._end_runs_on_node(actions.FAILED_RUN_TIMEOUT_S)
            failure = None if isinstance(ended, Ok) else ended
        else:
            failure = await self._session.capture_errors(self._runners.cancel(handle))
        text = describe_causes(action.causes)
        text += "" if failure is None else f"; the run may continue: {failure.text}"
        await self._journal.finish(action.record, Failed(text, code=FailureCode.INTERFERENCE))
        # A cancelled run may have left processes, which the next run must not meet.
        self._journal.has_unfinished_run = True

    async def _build_request(self, action: actions.RunPlaybook, run: str) -> RunRequest:
        stage, session = action.stage, self._session
        host = self._state.host(session.node)
        return RunRequest(
            run_id=run,
            host=host,
            source=await session.adapters.source(session.rollout),
            playbook=stage.playbook,
            variables=dict(stage.variables),
            timeout_s=stage.timeout_s,
            fencing_token=await self._state.fence_token(),
            rollout=session.rollout,
            attempt=session.target.attempt,
            step=stage.step,
            kind=stage.kind,
            params=params_for(session.plan, stage, host),
            previous=action.previous,
        )

    async def _follow_with_retries(
        self, action: actions.RunPlaybook, record: StepRecord
    ) -> StepResult | None:
        """Follow the run to its end; None when the node left, restored itself or could not be isolated again.

        After the last try the run is cancelled: no second run may start on the node while it runs.
        """
        outcome = await follow_with_retries(
            lambda: self._session.capture_errors(self._follow(action, record)),
            lambda: self._may_follow_again(record),
        )
        if outcome is None or isinstance(outcome, RunState):
            return None if outcome is None else outcome.result
        await self._cancel(record)
        return outcome

    async def _may_follow_again(self, record: StepRecord) -> bool:
        """Wait, then return whether the run may be followed again, which may start it."""
        await self._wakeup.wait_for(self._state.clock.sleep(FOLLOW_RETRY_S))
        if not self._is_in_flight():
            await self._cancel(record)
            return False
        run_in_progress = await self._was_started(self._journal.recorded_version(record).handle)
        if not await self._isolation.ensure_isolated(self._session.plan, run_in_progress=run_in_progress):
            return False
        if not run_in_progress and not await self._guard.wait_until_heard():
            return False
        await self._journal.write(self._journal.recorded_version(record))
        return True

    async def _cancel(self, record: StepRecord) -> None:
        await self._session.capture_errors(
            self._runners.cancel(self._journal.recorded_version(record).handle)
        )

    async def _follow(self, action: actions.RunPlaybook, record: StepRecord) -> RunState | None:
        """Start or find the run and wait for its end; None when the node left, or must not continue it."""
        async with running_in_background(self._guard.keep_armed()) as guard_ended:
            guard_ended.add_done_callback(self._wake_at_end)
            request = await self._build_request(action, record.handle)
            async with running_in_background(self._runners.start(request)) as starting:
                # A run that waits for its runner must not begin once its guard has ended or its node left.
                starting.add_done_callback(self._wake_at_end)
                while not starting.done() and not guard_ended.done() and self._is_in_flight():
                    await self._wakeup.wait_for(asyncio.wait((starting,)))
            if starting.cancelled() and not guard_ended.done():
                await self._session.capture_errors(self._runners.cancel(record.handle))
                return None
            if starting.cancelled():
                await self._guard.record_end(guard_ended.result())
                if await self._was_started(record.handle):
                    return None
                text = "its guard ended before the run began"
                return RunState(Failed(text, code=FailureCode.NEVER_STARTED))
            handle = starting.result()
            if handle != self._journal.recorded_version(record).handle:
                await self._journal.write(replace(record, handle=handle))
            while True:
                async with running_in_background(self._isolation.wait_until_lost(self._session.plan)) as lost:
                    lost.add_done_callback(self._wake_at_end)
                    while not lost.done() and not guard_ended.done():
                        run_state = await self._runners.get_state(handle)
                        self._publish_progress(run_state)
                        if run_state.result is not None:
                            return run_state
                        if not self._is_in_flight():
                            await self._runners.cancel(handle)
                            return None
                        await self._wakeup.wait_for(self._runners.wait_for_change(handle))
                if guard_ended.done():
                    await self._guard.record_end(guard_ended.result())
                    return None
                if not await self._isolation.ensure_isolated(self._session.plan, run_in_progress=True):
                    return None

    def _wake_at_end(self, task: asyncio.Task[Any]) -> None:
        # One that is cancelled at the end of its wait would end the next wait, such as the pause of a retry.
        if not task.cancelled():
            self._wakeup.trigger()

    async def _was_started(self, handle: str) -> bool:
        """Return whether the runner may have started the run: a timeout counts as yes, an error as no."""
        state = await self._session.capture_errors(self._runners.get_state(handle))
        return state.has_begun if isinstance(state, RunState) else not isinstance(state, Failed)

    def _is_in_flight(self) -> bool:
        return self._session.target.phase in IN_FLIGHT_PHASES

    def _publish_progress(self, run_state: RunState) -> None:
        progress = self._session.progress
        if progress.run != run_state:
            progress.run = run_state
            self._state.changes.notify_progress()
