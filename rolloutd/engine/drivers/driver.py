"""Driver of one node through one rollout: inspect, decide, record the intent, act, record the outcome.

The driver decides nothing: machines.workflow.next_action derives the next action from the records; the
driver carries it out and records how it ended.  It may be killed between any two lines, because the next
driver reads the same records.  An unexpected exception in a step becomes its recorded outcome.
It knows ports, never an adapter.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from machines.facts.dry_runs import DryRunResult
from machines.facts.fleet_facts import IsolationProgress
from machines.model import actions
from machines.model.causes import Cause, CauseCode, said
from machines.model.events import Event, HoldReleased, NodeOrdered, PhaseMoved
from machines.model.node import NodeHealth, NodeKind
from machines.model.reasons import Reason, ReasonCode
from machines.model.rollout import BLAMES_CHANGE, FailureCode, NodeOrder, Target
from machines.model.target_plan import lacks_isolator
from machines.scheduler.membership import carry_over
from machines.scheduler.shared_outage import next_shared_action
from machines.states import IN_FLIGHT_PHASES, Outcome, Phase, Trigger
from machines.workflow.next_action import SLOT_STEP
from machines.workflow.outage import OUTAGE_STEP
from machines.workflow.phase_transitions import transition
from machines.workflow.records import active_isolations, repeated_try
from machines.workflow.situation import Situation
from rolloutd.engine.drivers.check_execution import CheckExecution
from rolloutd.engine.drivers.guard_steps import GuardSteps
from rolloutd.engine.drivers.isolation import Isolation, OtherAttempts
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession
from rolloutd.engine.drivers.run_execution import RunExecution
from rolloutd.engine.drivers.step_journal import StepJournal
from rolloutd.engine.outcomes import verdict_events
from rolloutd.engine.state import NO_RUN, STORE_RETRY_S, InvariantViolation, State
from rolloutd.engine.tasks import CancellableTask, Wakeup
from rolloutd.errors import NotFound, StoreFailed
from rolloutd.ports import Busy, StepResult
from rolloutd.texts.cause_text import describe_action, describe_causes

log = logging.getLogger(__name__)

STUCK_RETRY_S = 60.0
"""Pause before a stuck node is tried again: only a user or a new version can fix it."""

REMOVED_NODE_RETRY_S = 5.0
"""Pause after the inventory lost a node: the commit that moves its target out of flight follows soon."""

INVENTORY_RETRY_S = 1.0
"""Pause before a node whose secrets are not known yet is tried again: most sources answer within seconds."""

OUTAGE_POLL_S = 5.0
"""Longest pause of an attempt that waits for another one: what changes by time alone wakes no driver."""


class Driver:
    """One node of one rollout, from its admission until it needs no driver."""

    def __init__(
        self, state: State, adapters: AdapterSet, rollout: str, node: str, *, daemon_started_at: float
    ) -> None:
        self.rollout = rollout
        self.node = node
        self._state = state
        self._session = session = NodeSession(state, adapters, rollout, node)
        self._started_at = daemon_started_at
        self._awaited_s = 0.0
        self._moved = (0, 0)
        self._wakeup = Wakeup()
        self._journal = StepJournal(session)
        self._others = OtherAttempts(session)
        self._isolation = Isolation(session, self._journal, self._others)
        self._guard = GuardSteps(session, self._journal)
        self._checks = CheckExecution(session, self._journal)
        self._execution = RunExecution(session, self._journal, self._isolation, self._guard, self._wakeup)
        self._current_action = CancellableTask()
        self._stopping = False
        self._clock_set_back = (0.0, 0.0)

    # -- requests of the daemon

    def wake_up(self) -> None:
        """Decide again: what is known of the target has changed."""
        self._wakeup.trigger()

    def recheck_isolation(self) -> None:
        """Inspect the isolation soon, if the node's observation has changed."""
        self._isolation.recheck()

    def stop_current_action(self) -> None:
        """Cancel the current action, because the target has a user's order to stop."""
        self._wakeup.trigger()
        # An action that began after the order carries the order out, so it must not be cancelled.
        if not self._stopping:
            self._current_action.cancel()

    # -- the loop

    async def run(self) -> None:
        """Carry out actions until the node needs no driver."""
        try:
            # A rollout whose node has left may be deleted while the last step ends.
            while self.rollout in self._state.index.rollouts and await self._run_next_action():
                pass
        finally:
            self._state.step_progress.pop((self.rollout, self.node), None)
            self._state.conditions.pop(self._session.subject, None)

    async def _run_next_action(self) -> bool:
        """Carry out one action; return whether there may be more."""
        before = self._session.target
        try:
            await self._journal.load()
            await self._others.load()
            action = self._next_action()
            if isinstance(action, actions.NoAction):
                return False
            self._stopping = self._session.target.order is NodeOrder.STOP
            # A cancelled action may have written a record that it did not note here.
            if not await self._current_action.run(self._execute(action), f"act {self._session.subject}"):
                self._journal.invalidate()
        except InvariantViolation as refusal:
            if (self._session.target.phase, self._session.target.attempt) == (before.phase, before.attempt):
                await self._report_stuck(f"what comes next was refused: {refusal}")
            self._journal.invalidate()  # if the target moved meanwhile, a refusal is normal
        except NotFound as gone:
            if self.node in self._state.index.nodes:
                await self._report_stuck(str(gone))
            self._journal.invalidate()  # a node that left during a step is not stuck
        except StoreFailed as failure:
            log.error("%s: the store could not write: %s", self._session.subject, failure)
            self._state.last_write_error = str(failure)
            self._journal.invalidate()
            await self._pause(STORE_RETRY_S)
        except Exception as error:
            log.exception("%s: unexpected error", self._session.subject)
            await self._report_stuck(f"unexpected {type(error).__name__}: {error}")
        else:
            self._state.conditions.pop(self._session.subject, None)
        return True

    async def _report_stuck(self, reason: str) -> None:
        """Report that this node does not move, and try again later: a user may have fixed the cause."""
        log.critical("%s: stuck: %s", self._session.subject, reason)
        self._state.conditions[self._session.subject] = (
            f"{self.node} of {self.rollout} does not move: {reason}"
        )
        self._journal.invalidate()
        await self._pause(STUCK_RETRY_S)

    def _next_action(self) -> actions.Action:
        target = self._session.target
        now = self._state.now()
        if self.node not in self._state.index.nodes:
            return self._next_action_if_removed(target, now)
        plan = self._session.plan
        in_effect = {spec.name for spec, _ in active_isolations(plan.isolate, self._journal.records)}
        abort = self._state.index.abort_causes(self.rollout, self.node)
        if not in_effect and lacks_isolator(plan, self._state.index.nodes[self.node]):
            abort = (Cause(CauseCode.REASON, reason=Reason(ReasonCode.NO_ISOLATOR, self.node)),)
        node_plan = self._session.node_plan(in_effect)
        elapsed_s = self._elapsed_s(target, now)
        situation = Situation(
            node_plan,
            target,
            self._journal.records,
            now,
            elapsed_s,
            self._journal.has_unfinished_run,
            abort,
            self._state.index.over_budget_reason(self.rollout, self.node),
            self._state.index.has_failed(self.rollout, self.node, target.attempt - 1),
        )
        action, has_moved = next_shared_action(self._state.index, situation, self._others.held())
        if has_moved:
            self._state.wake_up()  # another rollout of its train may join, or go on
        if isinstance(action, actions.Revert) and action.causes:
            # What caused the abort may be over before it has ended.
            self._state.index.record_abort(self.rollout, self.node, action.causes)
        if target.phase is Phase.ISOLATING:
            self._publish_isolation(target, action, now + node_plan.isolate_timeout_s - elapsed_s)
        return action

    def _publish_isolation(self, target: Target, action: actions.Action, deadline: float) -> None:
        """Publish how far the isolation is and when it is aborted."""
        waits = isinstance(action, actions.Wait) and action.step == SLOT_STEP
        self._session.progress.isolation_deadline = deadline
        awaited = self._state.index.over_budget_reason(self.rollout, self.node)
        self._session.progress.awaited_slot = awaited if waits else None
        moved = self._moved[1] if self._moved[0] == target.attempt else 0
        found = IsolationProgress(target.attempt, waits, moved)
        if found != self._state.index.isolation_progress(target):
            self._state.index.record_isolation(self.rollout, self.node, found)
            self._state.wake_up()  # another node of the pool may have cost less now

    def _elapsed_s(self, target: Target, now: float) -> float:
        """Return how much of the time limit of its phase the node has used.

        An isolation's deadline is an instant: each start extends it by the daemon's absence.  The limits
        of other phases begin again with the daemon.  If the clock was set back to before the phase began,
        time counts from when the driver notices it.
        """
        isolating = target.phase is Phase.ISOLATING
        began = target.since + target.downtime_s if isolating else max(target.since, self._started_at)
        began += self._awaited_s
        if now >= began:
            return now - began
        if self._clock_set_back[0] != began or now < self._clock_set_back[1]:
            self._clock_set_back = (began, now)
        return now - self._clock_set_back[1]

    def _next_action_if_removed(self, target: Target, now: float) -> actions.Action:
        """Return the next action of a node that the inventory lost; its target leaves the rollout soon."""
        text = f"the inventory no longer has {self.node}"
        if target.phase in IN_FLIGHT_PHASES:
            return actions.Wait(now + REMOVED_NODE_RETRY_S, text)
        return (
            actions.NoAction()
            if target.order is None
            else actions.CompleteOrder(succeeded=False, causes=said(text))
        )

    async def _execute(self, action: actions.Action) -> None:
        self._publish_step(action)
        if self._session.progress.awaited_sources:
            began = self._state.now()
            await self._pause(INVENTORY_RETRY_S)
            self._awaited_s += max(0.0, self._state.now() - began)
        else:
            await self._take_action(action)

    async def _take_action(self, action: actions.Action) -> None:  # noqa: C901  # one line per kind of action
        match action:
            case actions.Isolate():
                self._on_isolated(action, await self._isolation.isolate(action))
            case actions.Probe():
                await self._isolation.probe(action)
            case actions.Revert():
                await self._isolation.undo(action)
            case actions.CleanUpStaleRuns():
                await self._execution.clean_up_stale_runs(action)
            case actions.RunPlaybook():
                await self._execution.run(action)
            case actions.RunCheck():
                within_s = 0.0 if action.is_baseline else float(action.spec.params.get("within", 0))
                await self._checks.carry_out(action, within_s=within_s)
            case actions.UseGuard():
                await self._guard.carry_out(action)
            case actions.Wait():
                limit_s = OUTAGE_POLL_S if action.step == OUTAGE_STEP else math.inf
                await self._pause(min(max(0.0, action.until - self._state.now()), limit_s))
            case actions.Transition():
                await self._transition(action)
            case actions.StopRun():
                await self._execution.stop(action)
            case actions.CompleteOrder():
                await self._complete_order(action)
            case actions.NoAction():
                pass

    def _on_isolated(self, action: actions.Isolate, result: StepResult) -> None:
        """Count what left the node; abort an isolation that a permanent blocker makes hopeless."""
        if isinstance(result, Busy) and result.moved:
            attempt = self._session.target.attempt
            before = self._moved[1] if self._moved[0] == attempt else 0
            self._moved = attempt, before + result.moved
        if not isinstance(result, Busy) or not result.is_permanent:
            return
        if self._session.target.phase is not Phase.ISOLATING:
            return
        self._state.index.record_dry_run(
            DryRunResult(
                self.rollout,
                self.node,
                succeeds=False,
                at=self._state.now(),
                why=result.text,
                is_permanent=True,
                step=action.spec.name,
            )
        )
        self._state.index.record_abort(self.rollout, self.node, said(result.text))

    # -- transitions

    async def _transition(self, action: actions.Transition) -> None:
        text = describe_causes(action.causes)
        moved = transition(
            self._session.target,
            action.trigger,
            self._state.now(),
            outcome=action.outcome,
            step=action.step,
            text=text,
            not_before=action.not_before,
            code=self._failure_code(action),
        )

        # Under the lock: a submit that is being written opens the rollout that takes the node over.
        # One commit: after a crash between two, the node would have moved without its verdict.
        def decide() -> Sequence[Event]:
            return (
                *self._complete_stop_order(moved),
                moved,
                *verdict_events(self._state, self._session.target, moved),
                *carry_over(self._state.index, moved, describe_causes),
            )

        await self._state.commit_decided(decide, cause=text or action.trigger.value)

    def _failure_code(self, action: actions.Transition) -> FailureCode:
        """Return the code of a failure; one that its cluster reports as not ready has another cause."""
        node, seen = self._state.index.nodes.get(self.node), self._state.index.observation(self.node)
        is_in_cluster = node is not None and node.kind is not NodeKind.HOST
        if action.code not in BLAMES_CHANGE or not is_in_cluster or seen is None:
            return action.code
        return FailureCode.LOST if seen.sight is NodeHealth.DOWN else action.code

    def _complete_stop_order(self, moved: PhaseMoved) -> list[Event]:
        """Return the event that completes a user's stop order, if the transition ends out of flight.

        A transition between phases in flight may have been decided before the order, so the order stays.
        """
        stops = self._session.target.order is NodeOrder.STOP and moved.target not in IN_FLIGHT_PHASES
        by = self._session.target.order_by if stops else None
        return [] if by is None else [NodeOrdered(self.rollout, self.node, None, by, moved.text, moved.at)]

    async def _complete_order(self, action: actions.CompleteOrder) -> None:
        target = self._session.target
        now, text = self._state.now(), describe_causes(action.causes)
        by = target.order_by
        assert by is not None
        events: list[Event] = [NodeOrdered(self.rollout, self.node, None, by, text, now)]
        if action.succeeded and target.phase is Phase.FAILED:
            skipped = f"{text} by {by.name}"
            events.append(transition(target, Trigger.SKIPPED, now, outcome=Outcome.SKIPPED, text=skipped))
        if action.succeeded:
            events += [
                HoldReleased(hold.node, hold.source, hold.id, by, now)
                for hold in self._state.index.holds
                if hold.node == self.node and hold.source == "left" and hold.id.startswith(f"{self.rollout}/")
            ]
        await self._state.commit(events, actor=by, cause=f"{target.order}: {text}")

    # -- progress

    def _publish_step(self, action: actions.Action) -> None:
        progress, step = self._session.progress, describe_action(action)
        reaches_node = step is not None and not isinstance(action, actions.StopRun | actions.Wait)
        progress.awaited_sources = self._state.awaited_sources(self.node) if reaches_node else ()
        if step is None:
            return
        if progress.step != step:
            progress.step, progress.run, progress.since = step, NO_RUN, self._state.now()
            self._state.changes.notify_progress()
        progress.failing_check = ""
        progress.repeated_try = repeated_try(self._journal.records, self._session.target)

    async def _pause(self, seconds: float) -> None:
        await self._wakeup.wait_for(self._state.clock.sleep(seconds))
