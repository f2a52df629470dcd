"""The next action for one node, derived from its step records.

How it works.  The driver of a node repeats one loop: read the records, ask next_action(), record the intent,
act, record the result.  The function is level-based: it looks at the phase and at what is recorded, never at
what the driver did before.  Three properties follow, and every change here must keep them:

- A restart needs no code of its own: a daemon that was killed at any point gets the same answer from the same
  records.  After an INTENDED record, the action may or may not have happened; the answer is the same action
  with the same number, and the adapter finds out.
- Repeating is bounded: each retry has a record with the next number, so the limits hold across restarts.
- A clock that was set back delays nothing: retry_wait() and _is_ordered_after() treat a record from the
  future as due.

What is done, in which order and how often is data: steps.py compiles the plan to a list of steps, and this
file walks the steps of the phase until one is not done.  What a step needs before it starts, and what follows
when it fails, is decided here, by its purpose.  This file does not know what an adapter does with a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from machines.model.actions import (
    Action,
    CleanUpStaleRuns,
    CompleteOrder,
    Isolate,
    NoAction,
    Revert,
    RunCheck,
    RunPlaybook,
    Transition,
    UseGuard,
    Wait,
)
from machines.model.causes import Cause, CauseCode, Causes, said
from machines.model.plan import MaintainStage, OnUnknownPolicy, StepDef
from machines.model.rollout import FailureCode, NodeOrder
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.model.train import OutageProgress
from machines.states import IN_FLIGHT_PHASES, Outcome, Phase, Trigger
from machines.workflow.failing import (
    clean_up_before_failure,
    end_guard_before,
    may_be_armed,
    next_stop_action,
    on_isolation_lost,
    stop_unguarded_run,
)
from machines.workflow.isolation_plan import IsolationPlan
from machines.workflow.records import (
    active_isolations,
    first_change,
    has_begun_run,
    in_service_since,
    isolated_in_earlier_attempt,
)
from machines.workflow.shared_verification import SharedVerification
from machines.workflow.situation import Situation
from machines.workflow.steps import (
    CLEAN_UP,
    RULES,
    Purpose,
    Step,
    backoff_s,
    compile_steps,
    is_excused,
    judging_steps,
    latest_record,
    needs_clean_node,
    next_start,
    next_try,
    repair_step,
    stages_for,
)

SLOT_STEP = "slot"
"""Step of an isolated node that waits until its pools have a slot for it."""


def next_action(situation: Situation) -> Action:
    plan, target, records, now = situation.plan, situation.target, situation.records, situation.now
    reconciler = _reconciler(situation)
    if target.order is NodeOrder.RETURN and target.phase not in IN_FLIGHT_PHASES:
        return reconciler.reconcile_return()
    is_stopped = target.order is NodeOrder.STOP
    action = next_stop_action(target, records) if is_stopped else reconciler.reconcile_phase()
    attempt_records = reconciler.attempt_records
    is_guarded = plan.guard is not None and may_be_armed(attempt_records)
    action = clean_up_before_failure(
        action, attempt_records, has_unfinished_run=situation.has_unfinished_run, is_guarded=is_guarded
    )
    # A stopped node too must not keep a half-made change under an armed guard.
    return end_guard_before(action, plan.guard, attempt_records, now, elapsed_s=situation.elapsed_s)


def outage_progress(situation: Situation, action: Action | None = None) -> OutageProgress:
    """Return how far a verifying attempt is in the node's outage; `action` is its next one."""
    return _reconciler(situation)._shared.progress(action)


def _reconciler(situation: Situation) -> _Reconciler:
    plan, target, records = situation.plan, situation.target, situation.records
    isolation_plan = IsolationPlan.from_records(plan, target, records, situation.now)
    return _Reconciler(situation, isolation_plan, compile_steps(plan, target))


@dataclass(frozen=True, slots=True)
class _Reconciler:
    situation: Situation
    isolation_plan: IsolationPlan
    steps: tuple[Step, ...]

    def reconcile_phase(self) -> Action:
        match self.situation.target.phase:
            case Phase.ISOLATING:
                return self._reconcile_isolating()
            case Phase.MAINTAINING:
                # The guard goes first: no further step may run on a node that has restored itself.
                return (
                    stop_unguarded_run(self.attempt_records)
                    or self._walk_phase()
                    or Transition(Trigger.MAINTAINED)
                )
            case Phase.VERIFYING:
                outcome = Outcome.ROLLED_BACK if self.situation.target.rolling_back else Outcome.CHANGED
                # A node that failed in service goes out of service before anything else is tried.
                return (
                    self._reisolate_failed_in_service()
                    or (self._shared.walk() if self.situation.outage.is_shared else self._walk_phase())
                    or Transition(Trigger.VERIFIED, outcome)
                )
            case Phase.PENDING | Phase.DONE | Phase.FAILED:
                return NoAction()

    def reconcile_return(self) -> Action:
        """Return a node to service by a person's order, then check that it is alive."""
        returned = CompleteOrder(succeeded=True, causes=(Cause(CauseCode.RETURNED),))
        return self.walk(Purpose.RETURN, Purpose.CONFIRM_RETURN) or returned

    @property
    def _shared(self) -> SharedVerification:
        return SharedVerification(self.situation, self)

    # the walk

    def _walk_phase(self) -> Action | None:
        return self.walk(
            *(purpose for purpose, rule in RULES.items() if rule.phase is self.situation.target.phase)
        )

    def walk(self, *purposes: Purpose) -> Action | None:
        """Return what the first unfinished step of these purposes needs, None when all are done."""
        actions = (self.next_of(step) for step in self.steps if step.purpose in purposes)
        return next((action for action in actions if action is not None), None)

    def next_of(self, step: Step) -> Action | None:
        """Return what one step needs now, None when it is done or not needed."""
        match step.purpose:
            case Purpose.BASELINE if self._has_begun_before():
                return None
            case Purpose.CORDON if not self.isolation_plan.is_cordon_due():
                return None
            case Purpose.RETURN if step.id not in self.active():
                return None
            case Purpose.WATCH:
                return self._watch(step)
            case Purpose.MAINTAIN if self._has_nothing_to_undo(step):
                return None
        latest = self.latest(step)
        # Processes that a run left could change the node during the next run, or in service.
        if self.situation.has_unfinished_run and needs_clean_node(step, latest):
            return self.next_of(CLEAN_UP)
        match self.try_of(step, latest):
            case StepState.OK:
                return None
            case StepState():
                assert latest is not None
                return self._give_up(step, latest)
            case Wait() as wait:
                return wait
            case number:
                return self._required_before(step) or self.start(step, number)

    def _has_nothing_to_undo(self, step: Step) -> bool:
        """Return whether a stage restores what a change replaced that never began on this node."""
        undoes = step.spec.undoes if isinstance(step.spec, MaintainStage) else ""
        return bool(undoes) and first_change(undoes, self.situation.records) is None

    def try_of(self, step: Step, latest: StepRecord | None) -> int | Wait | StepState:
        first = 1
        if step.purpose is Purpose.RETURN:
            applied = self.latest(step, StepAction.APPLY)
            first = 1 if applied is None else applied.number
            # A REVERT starts at the number of its APPLY, so a lower one belongs to an earlier APPLY.
            latest = None if latest is None or latest.number < first else latest
        is_ordered = latest is not None and step.rule.repeated_by_order and self._is_ordered_after(latest)
        answer = next_try(step.rule, latest, self.situation.now, first=first, is_ordered=is_ordered)
        if step.purpose is Purpose.MAINTAIN and answer is StepState.FAILED:
            limit_s, elapsed_s = self.situation.plan.start_timeout_s, self.situation.elapsed_s
            again = next_start(
                step, self.attempt_records, self.situation.now, elapsed_s=elapsed_s, limit_s=limit_s
            )
            return again or answer
        # The record of a cordon says OK too; the full isolation is then still to be done.
        if step.purpose is Purpose.ISOLATE and answer is StepState.OK and latest is not None:
            return latest.number + 1 if self.isolation_plan.is_cordon_only(latest) else answer
        return answer

    def _required_before(self, step: Step) -> Action | None:
        """Return what must come before a step starts, or instead of it."""
        match step.purpose, step.spec:
            case Purpose.ISOLATE, StepDef() as spec if self.situation.target.phase is Phase.ISOLATING:
                return self.isolation_plan.required_probe(spec)
            case Purpose.MAINTAIN | Purpose.REPAIR, _:
                run_record = self.latest(step)
                is_started = run_record is not None and run_record.state is StepState.INTENDED
                return self._ensure_isolated(run_record if is_started else None)
            case _:
                return None

    def start(self, step: Step, number: int) -> Action:
        match step.rule.action, step.spec:
            case StepAction.APPLY, StepDef() as spec:
                isolate = self._apply_isolator(spec, number)
                return replace(isolate, cordon_only=True) if step.purpose is Purpose.CORDON else isolate
            case StepAction.REVERT, StepDef() as spec:
                active = self.active()
                return Revert(spec, number, active[step.id], is_last=len(active) == 1)
            case StepAction.RUN, MaintainStage() as stage:
                latest = self.latest(step)
                is_started = latest is not None and latest.state is StepState.INTENDED
                undone = first_change(stage.undoes, self.situation.records) if stage.undoes else None
                return RunPlaybook(stage, number, is_started, "" if undone is None else undone.prior)
            case (StepAction.ARM | StepAction.DISARM) as action, StepDef() as spec:
                return UseGuard(spec, number, action)
            case StepAction.CHECK, StepDef() as spec:
                return RunCheck(spec, step.id, number, is_baseline=step.purpose is Purpose.BASELINE)
            case _:
                return CleanUpStaleRuns(number)

    def _give_up(self, step: Step, latest: StepRecord) -> Action | None:
        """Return what follows from a result that is final and not OK."""
        match step.purpose, step.spec:
            case Purpose.MAINTAIN, MaintainStage() as stage if latest.state is StepState.UNKNOWN:
                return self._resolve_unknown_run(step, stage, latest)
            case Purpose.BASELINE, _:
                return None  # what fails before need not pass after
            case Purpose.VERIFY | Purpose.VERIFY_IN_SERVICE | Purpose.PROBATION, _ if self.excuses(
                step, latest
            ):
                return None
            case Purpose.VERIFY, StepDef() as spec if spec.repair and latest.state is StepState.FAILED:
                return self._repair(step, spec, latest)
            case Purpose.RETURN | Purpose.CLEAN_UP, _ if self.situation.target.order is NodeOrder.RETURN:
                params = {"step": step.id, "text": latest.text}
                return CompleteOrder(succeeded=False, causes=(Cause(CauseCode.NOT_REVERTED, params),))
            case Purpose.RETURN | Purpose.CLEAN_UP, _:
                # What keeps the node out of service is not the change that passed its checks.
                causes = (Cause(CauseCode.NOT_RETURNED, {"text": latest.text}),)
                return Transition(Trigger.FAILED, step=step.id, causes=causes, code=FailureCode.UNKNOWN)
            case Purpose.CONFIRM_RETURN, StepDef() as spec:
                params = {"check": spec.name, "text": latest.text}
                return CompleteOrder(succeeded=False, causes=(Cause(CauseCode.CHECK_FAILED, params),))
            case Purpose.ARM_GUARD, _:
                # Nothing was done to the node yet.
                is_silent = latest.state is StepState.UNKNOWN
                code = FailureCode.UNREACHABLE if is_silent else FailureCode.NEVER_STARTED
                return Transition(Trigger.FAILED, step=step.id, causes=said(latest.text), code=code)
            case _:
                code = latest.failure_code
                if code is FailureCode.UNREACHABLE and has_begun_run(self.attempt_records):
                    code = FailureCode.LOST
                return Transition(Trigger.FAILED, step=step.id, causes=said(latest.text), code=code)

    # isolating

    def _reconcile_isolating(self) -> Action:
        # An abort that has begun is finished, also by a daemon that does not know its reason.
        abort_begun = any(r.action is StepAction.REVERT for r in self.attempt_records)
        step = None if abort_begun else self._walk_phase()
        causes = self._abort_causes(is_complete=step is None and not abort_begun)
        if causes or abort_begun:
            if self._had_failed() and not abort_begun:
                # It has passed no check since: only a person may return it to service.
                return Transition(Trigger.FAILED, step="isolate", causes=causes)
            step = self.walk(Purpose.RETURN)
            if isinstance(step, Revert):
                return replace(step, causes=causes)
            return step or Transition(
                Trigger.ISOLATION_ABORTED,
                outcome=Outcome.CHANGED if self.situation.target.rolling_back else None,
                causes=causes or (Cause(CauseCode.ABORT_CONTINUED),),
                not_before=self.situation.now + backoff_s(self.situation.target.aborted_isolations),
            )
        deadline = self.situation.now + max(
            0.0, self.situation.plan.isolate_timeout_s - self.situation.elapsed_s
        )
        if step is None and self.situation.over_budget is not None:
            return Wait(deadline, SLOT_STEP)
        action = step or self.isolation_plan.final_probe() or Transition(Trigger.ISOLATED)
        # The wait ends at the isolation deadline, because the slot then belongs to another node.
        return replace(action, until=min(action.until, deadline)) if isinstance(action, Wait) else action

    def _had_failed(self) -> bool:
        """Return whether the node had failed when it was admitted, so that it must not return to service."""
        is_rollback_of_failure = self.situation.target.rolling_back and self.situation.failed_before
        return is_rollback_of_failure or isolated_in_earlier_attempt(
            self.situation.plan.isolate, self.situation.target, self.situation.records
        )

    def _abort_causes(self, *, is_complete: bool) -> Causes:
        """Return why the isolation is aborted, if it is; complete means that all isolators did it."""
        over_budget = self.situation.over_budget
        causes = self.situation.abort or self.isolation_plan.traffic_found()
        if not is_complete:
            gives_way = () if over_budget is None else (Cause(CauseCode.REASON, reason=over_budget),)
            return causes or gives_way or self._timeout()
        # What is isolated already is finished, past the deadline too, unless it would wait still longer.
        must_wait = over_budget is not None or isinstance(self.isolation_plan.final_probe(), Wait)
        return causes or (self._timeout() if must_wait else ())

    def _timeout(self) -> Causes:
        limit_s = self.situation.plan.isolate_timeout_s
        if self.situation.elapsed_s < limit_s:
            return ()
        if self.situation.over_budget is not None:
            return (Cause(CauseCode.NO_SLOT, {"limit_s": limit_s}, self.situation.over_budget),)
        unfinished = (StepState.BUSY, StepState.UNKNOWN)
        answers = [record.text for record in self.attempt_records if record.state in unfinished]
        answer = {"text": answers[-1]} if answers else {}
        return (Cause(CauseCode.NOT_ISOLATED, {"limit_s": limit_s, **answer}),)

    def _apply_isolator(self, spec: StepDef, number: int) -> Isolate:
        for _, prior in active_isolations([spec], self.situation.records):
            return Isolate(spec, number, is_prior_known=True, prior=prior)
        # To join: the node is isolated by us already, so what it was before another attempt knows.
        if spec.name in self.situation.outage.held:
            return Isolate(spec, number, is_prior_known=True, prior=self.situation.outage.held[spec.name])
        return Isolate(spec, number)

    # maintaining

    def _ensure_isolated(self, run_record: StepRecord | None) -> Action | None:
        """Return what must come before a run, or instead of it, when an isolator is not in effect.

        `run_record` is the run that is in progress, None before a run.
        """
        for step in self.steps:
            isolator_records = [r for r in self.attempt_records if r.step == step.id]
            if step.purpose is Purpose.ISOLATE and isolator_records:
                next_step = self.next_of(step)
                if next_step is not None:
                    times = (
                        self.situation.now,
                        self.situation.elapsed_s,
                        self.situation.plan.isolate_timeout_s,
                    )
                    return on_isolation_lost(
                        self.situation.target, next_step, isolator_records, run_record, *times
                    )
        return None

    def _resolve_unknown_run(self, step: Step, stage: MaintainStage, latest: StepRecord) -> Action | None:
        """Decide about a run whose result is unknown, by the stage's `on_unknown`."""
        if stage.on_unknown is OnUnknownPolicy.PAUSE:
            return Transition(
                Trigger.FAILED, step=stage.step, causes=said(latest.text), code=FailureCode.UNKNOWN
            )
        # Checks during a run would judge a node that still changes.
        if self.situation.has_unfinished_run:
            return self.next_of(CLEAN_UP)
        # The checks judge the whole change, so they can speak for the last stage only.
        if (
            stage.on_unknown is OnUnknownPolicy.VERIFY
            and stage is stages_for(self.situation.plan, self.situation.target)[-1]
        ):
            judged = self._judge_run(latest.number)
            if judged is not False:
                return None if judged is True else judged
        # Twice without a result: a third run would most likely end so too, so people inspect the node.
        if latest.number > 1:
            causes = (*said(latest.text), Cause(CauseCode.RERUN_ENDED_ALIKE))
            return Transition(Trigger.FAILED, step=stage.step, causes=causes, code=FailureCode.UNKNOWN)
        return self._required_before(step) or self.start(step, latest.number + 1)

    def _judge_run(self, run: int) -> Action | bool:
        """Return the next check of a run whose result is unknown, or whether all checks passed."""
        # By the number of the run: a rerun is judged by checks of its own, not by those of the first.
        for step in judging_steps(self.situation.plan, run):
            match self.try_of(step, self.latest(step)):
                case int() as number:
                    return self.start(step, number)
                case state if state is not StepState.OK:
                    return False
        return True

    # verifying

    def _repair(self, step: Step, spec: StepDef, failed: StepRecord) -> Action:
        """Return the run that repairs the node, the check after it, or the failure."""
        repair = repair_step(self.situation.plan, spec)
        latest = self.latest(repair)
        if latest is None or latest.state is StepState.INTENDED:
            action = self.next_of(repair)
            assert action is not None
            return action
        if latest.state is not StepState.OK:
            causes = (*said(failed.text), Cause(CauseCode.REPAIR_FAILED, {"text": latest.text}))
            return Transition(Trigger.FAILED, step=step.id, causes=causes, code=failed.code)
        # Only a check that failed before the repair is repeated; one after it has judged the repair.
        if self.situation.records.index(failed) < self.situation.records.index(latest):
            return self.start(step, failed.number + 1)
        causes = (*said(failed.text), Cause(CauseCode.REPAIR_USELESS))
        return Transition(Trigger.FAILED, step=step.id, causes=causes, code=failed.code)

    def _has_begun_before(self) -> bool:
        """Return whether an earlier attempt changed or isolated the node, so that its baseline stays."""
        has_run = any(
            r.action is StepAction.RUN and r.attempt < self.situation.target.attempt
            for r in self.situation.records
        )
        return has_run or isolated_in_earlier_attempt(
            self.situation.plan.isolate, self.situation.target, self.situation.records
        )

    def _watch(self, step: Step) -> Wait | None:
        """Wait until the node has served for the time of the probation."""
        during = {each.id for each in self.steps if each.purpose is Purpose.PROBATION}
        since = in_service_since(self.situation.target, self.situation.records, during)
        # Records of the future are from before the clock was set back: then the time in the phase counts.
        watched_s = self.situation.elapsed_s if self.situation.now < since else self.situation.now - since
        left_s = self.situation.plan.probation_s - watched_s
        return Wait(self.situation.now + left_s, step.id) if left_s > 0 else None

    def _reisolate_failed_in_service(self) -> Action | None:
        """Isolate a node again whose check failed in service, then fail it; None when no check failed."""
        for step in self.steps:
            if step.rule.in_service and step.rule.phase is Phase.VERIFYING:
                latest = self.latest(step)
                answer = self.try_of(step, latest)
                is_final = latest is not None and answer is latest.state and answer is not StepState.OK
                if latest is not None and is_final and not self.excuses(step, latest):
                    return self._reisolate(
                        latest, self.situation.records[self.situation.records.index(latest) :]
                    )
        return None

    # Cordon only: a failed check is no reason to evict the work that runs there.
    def _reisolate(self, failed_check: StepRecord, later: Sequence[StepRecord]) -> Action:
        causes = said(failed_check.text)
        for step in self.steps:
            if step.purpose is not Purpose.ISOLATE or not isinstance(step.spec, StepDef):
                continue
            # Among the records after the failed check: the isolation before the change proves nothing now.
            latest = latest_record(step, later, self.situation.target.attempt)
            if latest is None or latest.state is StepState.INTENDED:
                applied = self.latest(step, StepAction.APPLY)
                number = latest.number if latest else 1 if applied is None else applied.number + 1
                return replace(self._apply_isolator(step.spec, number), cordon_only=True)
            if latest.state is not StepState.OK:
                causes += (Cause(CauseCode.NOT_ISOLATED_AGAIN, {"text": latest.text}),)
        code = failed_check.failure_code
        return Transition(Trigger.FAILED, step=failed_check.step, causes=causes, code=code)

    def excuses(self, step: Step, latest: StepRecord) -> bool:
        return isinstance(step.spec, StepDef) and is_excused(step.spec, latest.state, self.situation.records)

    # the records

    @property
    def attempt_records(self) -> Sequence[StepRecord]:
        return [
            record for record in self.situation.records if record.attempt == self.situation.target.attempt
        ]

    def active(self) -> Mapping[str, Any]:
        """Return the isolators that are in effect, each with the state that it found."""
        return {
            spec.name: prior
            for spec, prior in active_isolations(self.situation.plan.isolate, self.situation.records)
        }

    def latest(self, step: Step, *actions: StepAction) -> StepRecord | None:
        return latest_record(step, self.situation.records, self.situation.target.attempt, *actions)

    def _is_ordered_after(self, record: StepRecord) -> bool:
        """Return whether a person ordered the node's return after this record was made."""
        # An instant in the future is from before the clock was set back, so a record that is not came later.
        tried_before = (
            record.at < self.situation.target.ordered_at <= self.situation.now
            or self.situation.now < record.at
        )
        return self.situation.target.order is NodeOrder.RETURN and tried_before
