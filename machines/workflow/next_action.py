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

The order within the phases:

- isolating: all isolators in the plan's order, with the traffic probes between them (isolation_plan.py);
- maintaining: no process of an older run is left, every isolator is in effect; then each stage's playbook;
- verifying: the infra team's checks, the node's team's checks, return to service (last isolator first),
  in-service checks, probation.

A step is a name, a kind and parameters here; this file does not know what an adapter does with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
    Wait,
    retry_wait,
)
from machines.model.events import StepAction, StepRecord, StepState
from machines.model.plan import Capability, OnUnknownPolicy, Plan, Stage, StepDef
from machines.model.rollout import NodeOrder, Target
from machines.states import IN_FLIGHT_PHASES, Outcome, Phase, Trigger
from machines.workflow.isolation_plan import UNKNOWN_MAX_TRIES, UNKNOWN_RETRY_S, IsolationPlan
from machines.workflow.records import (
    active_isolations,
    in_service_since,
    isolated_in_earlier_attempt,
    liveness_checks,
)
from machines.workflow.stopping import next_stop_action, on_isolation_lost

NOT_ISOLATED_RETRY_S = 20.0
"""Shortest time between two starts of an isolator that answers "busy".

It counts from the start, so a drain that worked for its whole pass continues without a pause.
"""

RESUMED_ABORT_REASON = "the daemon stopped while the isolation was being aborted; the reason was not recorded"
"""Reason of an abort that an earlier daemon process began."""

ABORT_BACKOFF_S = 60.0
"""Delay after the first aborted isolation; it doubles with each further one."""

ABORT_BACKOFF_MAX_S = 3600.0
"""Longest delay after an aborted isolation: a node that is tried every hour still meets most windows."""


def next_action(
    plan: Plan,
    target: Target,
    records: Sequence[StepRecord],
    now: float,
    *,
    elapsed_s: float,
    has_unfinished_run: bool,
    abort_reason: str = "",
) -> Action:
    """Return what comes next for one node.

    `plan` is the plan as it applies to this node (plan_for_target).  `records` are the node's step records in
    this rollout, oldest first.  `elapsed_s` is the time in its phase during which a daemon was running.
    `has_unfinished_run`: processes of an older run may still be on the node.  `abort_reason`: why its
    isolation should be aborted, "" for no reason.
    """
    isolation_plan = IsolationPlan.from_records(plan, target, records, now)
    reconciler = _Reconciler(
        plan, target, tuple(records), now, elapsed_s, has_unfinished_run, abort_reason, isolation_plan
    )
    if target.order is NodeOrder.STOP:
        return next_stop_action(target, records)
    if target.order is NodeOrder.RETURN and target.phase not in IN_FLIGHT_PHASES:
        return reconciler.reconcile_return()
    match target.phase:
        case Phase.ISOLATING:
            return reconciler.reconcile_isolating()
        case Phase.MAINTAINING:
            return reconciler.reconcile_maintaining()
        case Phase.VERIFYING:
            return reconciler.reconcile_verifying()
        case Phase.PENDING | Phase.DONE | Phase.FAILED:
            return NoAction()


def backoff_s(aborted_isolations: int) -> float:
    return float(min(ABORT_BACKOFF_S * 2 ** min(aborted_isolations, 10), ABORT_BACKOFF_MAX_S))


@dataclass(frozen=True, slots=True)
class _Reconciler:
    plan: Plan
    target: Target
    records: tuple[StepRecord, ...]
    now: float
    elapsed_s: float
    has_unfinished_run: bool
    abort_reason: str
    isolation_plan: IsolationPlan

    # isolating

    def reconcile_isolating(self) -> Action:
        abort_begun = any(r.action is StepAction.REVERT for r in self._attempt_records)
        reason = self.abort_reason or self.isolation_plan.traffic_found() or self._timeout_reason()
        if reason or abort_begun:
            if isolated_in_earlier_attempt(self.plan.isolate, self.target, self.records) and not abort_begun:
                # It failed then and has passed no check since: only a person may return it to service.
                return Transition(Trigger.FAILED, step="isolate", text=reason)
            return self._return_to_service() or Transition(
                Trigger.ISOLATION_ABORTED,
                text=reason or RESUMED_ABORT_REASON,
                not_before=self.now + backoff_s(self.target.aborted_isolations),
            )
        action = self._next_isolation_step() or Transition(Trigger.ISOLATED)
        if not isinstance(action, Wait):
            return action
        # The wait ends at the isolation deadline, because the slot then belongs to another node.
        left_s = max(0.0, self.plan.isolate_timeout_s - self.elapsed_s)
        return replace(action, until=min(action.until, self.now + left_s))

    def _next_isolation_step(self) -> Action | None:
        """Return what is left to do until the node is isolated, None when it is."""
        for spec in self.isolation_plan.cordon_only_isolators():
            action = self._next_isolator_action(spec, cordon_only=True)
            if action is not None:
                return replace(action, cordon_only=True) if isinstance(action, Isolate) else action
        for spec in self.plan.isolate:
            action = self._next_isolator_action(spec)
            if action is not None:
                probe = self.isolation_plan.required_probe(spec) if isinstance(action, Isolate) else None
                return probe or action
        # Without an isolator it is the playbook that disturbs traffic, so the probes come before it.
        return None if self.plan.isolate else self.isolation_plan.required_probe(None)

    def _timeout_reason(self) -> str:
        if self.elapsed_s < self.plan.isolate_timeout_s:
            return ""
        busy = [f": {r.text}" for r in self._attempt_records if r.state is StepState.BUSY]
        return f"not isolated within {self.plan.isolate_timeout_s:.0f} s" + "".join(busy[-1:])

    def _next_isolator_action(self, spec: StepDef, *, cordon_only: bool = False) -> Action | None:
        """Return what one isolator still needs in this attempt, None when it is in effect."""
        latest = self._latest_record(spec.name, StepAction.APPLY, StepAction.INSPECT)
        if latest is None:
            return self._apply_isolator(spec, 1)
        again = self._apply_isolator(spec, latest.number + 1)
        match latest.state:
            case StepState.OK:
                is_sufficient = cordon_only or not self.isolation_plan.is_cordon_only(latest)
                return None if is_sufficient else again
            case StepState.INTENDED:
                return self._apply_isolator(spec, latest.number)
            case StepState.BUSY:
                return retry_wait(latest, NOT_ISOLATED_RETRY_S, self.now, since=latest.began_at) or again
            case StepState.UNKNOWN if latest.number < UNKNOWN_MAX_TRIES:
                return retry_wait(latest, UNKNOWN_RETRY_S, self.now) or again
            case StepState.UNKNOWN | StepState.FAILED:
                return Transition(Trigger.FAILED, step=spec.name, text=latest.text)

    def _apply_isolator(self, spec: StepDef, number: int) -> Isolate:
        for _, prior in active_isolations([spec], self.records):
            return Isolate(spec, number, is_prior_known=True, prior=prior)
        return Isolate(spec, number)

    def _return_to_service(self) -> Action | None:
        """Return the next step of the return to service, None when no isolator is in effect."""
        active = active_isolations(self.plan.isolate, self.records)
        if not active:
            return None
        if self.has_unfinished_run:
            return self._clean_up_stale_runs()
        spec, prior = active[-1]
        applied = self._latest_record(spec.name, StepAction.APPLY)
        latest = self._latest_record(spec.name, StepAction.REVERT)
        first_number = 1 if applied is None else applied.number
        is_last = len(active) == 1
        # A REVERT starts at the number of its APPLY, so a lower one belongs to an earlier APPLY.
        if latest is None or latest.number < first_number:
            return Revert(spec, first_number, prior, is_last)
        again = Revert(spec, latest.number + 1, prior, is_last)
        match latest.state:
            case StepState.INTENDED:
                return replace(again, number=latest.number)
            case StepState.UNKNOWN | StepState.BUSY if latest.number < first_number + UNKNOWN_MAX_TRIES:
                return retry_wait(latest, UNKNOWN_RETRY_S, self.now) or again
            case _ if self._is_ordered_after(latest):
                return again
            case _:
                return self._restore_failed(spec.name, latest.text)

    def _is_ordered_after(self, record: StepRecord) -> bool:
        """Return whether a person ordered the node's return after this record was made."""
        # An instant in the future is from before the clock was set back, so a record that is not came later.
        tried_before = record.at < self.target.ordered_at <= self.now or self.now < record.at
        return self.target.order is not None and tried_before

    def _restore_failed(self, step: str, text: str) -> Action:
        if self.target.order is not None:
            return CompleteOrder(succeeded=False, text=f"{step} could not be reverted: {text}")
        return Transition(Trigger.FAILED, step=step, text=f"could not be returned to service: {text}")

    def _clean_up_stale_runs(self) -> Action:
        latest = self._latest_record("clear", StepAction.CLEAN_UP)
        if latest is None or latest.state is StepState.INTENDED:
            return CleanUpStaleRuns(1 if latest is None else latest.number)
        if latest.state is StepState.OK or self._is_ordered_after(latest):
            return CleanUpStaleRuns(latest.number + 1)
        return self._restore_failed("clear", latest.text)

    # maintaining

    def reconcile_maintaining(self) -> Action:
        for stage in self._stages():
            action = self._next_run_action(stage)
            if isinstance(action, RunPlaybook):
                if self.has_unfinished_run and not action.is_started:
                    return self._clean_up_stale_runs()
                return self._ensure_isolated(action) or action
            if action is not None:
                return action
        return Transition(Trigger.MAINTAINED)

    def _ensure_isolated(self, run: RunPlaybook) -> Action | None:
        """Return what must come before a run, or instead of it, when an isolator is not in effect."""
        run_record = self._latest_record(run.stage.step, StepAction.RUN) if run.is_started else None
        for spec in self.plan.isolate:
            next_step = self._next_isolator_action(spec)
            isolator_records = [r for r in self._attempt_records if r.step == spec.name]
            if next_step is not None and isolator_records:
                times = (self.now, self.elapsed_s, self.plan.isolate_timeout_s)
                return on_isolation_lost(self.target, next_step, isolator_records, run_record, *times)
        return None

    def _stages(self) -> tuple[Stage, ...]:
        if not self.target.rolling_back:
            return self.plan.stages
        return () if self.plan.rollback is None else (self.plan.rollback,)

    def _next_run_action(self, stage: Stage) -> Action | None:
        latest = self._latest_record(stage.step, StepAction.RUN)
        if latest is None:
            return RunPlaybook(stage, 1, is_started=False)
        match latest.state:
            case StepState.OK:
                return None
            case StepState.INTENDED:
                return RunPlaybook(stage, latest.number, is_started=True)
            case StepState.FAILED | StepState.BUSY:
                return Transition(Trigger.FAILED, step=stage.step, text=latest.text)
            case StepState.UNKNOWN:
                return self._resolve_unknown_run(stage, latest)

    def _resolve_unknown_run(self, stage: Stage, latest: StepRecord) -> Action | None:
        """Decide about a run whose result is unknown, by the stage's `on_unknown`."""
        if stage.on_unknown is OnUnknownPolicy.PAUSE:
            return Transition(Trigger.FAILED, step=stage.step, text=latest.text)
        if self.has_unfinished_run:
            return self._clean_up_stale_runs()
        # The checks judge the whole change, so they can speak for the last stage only.
        if stage.on_unknown is OnUnknownPolicy.VERIFY and stage is self._stages()[-1]:
            verdict = self._check_unknown_run(latest.number)
            if verdict is not False:
                return None if verdict is True else verdict
        if latest.number > 1:
            text = f"{latest.text}; the rerun ended the same way"
            return Transition(Trigger.FAILED, step=stage.step, text=text)
        return RunPlaybook(stage, latest.number + 1, is_started=False)

    def _check_unknown_run(self, run: int) -> Action | bool:
        """Return the next check of a run whose result is unknown, or the verdict of all checks."""
        for spec in self._checks(in_service=False):
            step = f"probe.{run}.{spec.name}"
            record = self._latest_record(step, StepAction.CHECK)
            if record is None:
                return RunCheck(spec, step, 1)
            if record.state is not StepState.OK:
                return False
        return True

    # verifying

    def reconcile_verifying(self) -> Action:
        outcome = Outcome.ROLLED_BACK if self.target.rolling_back else Outcome.CHANGED
        return (
            self._reisolate_failed_in_service()
            or self._next_of_checks(self._checks(in_service=False))
            or self._return_to_service()
            or self._next_of_checks(self._checks(in_service=True))
            or self._next_probation_action()
            or Transition(Trigger.VERIFIED, outcome)
        )

    def _checks(self, *, in_service: bool) -> tuple[StepDef, ...]:
        return tuple(spec for spec in self.plan.verify if spec.in_service is in_service)

    def _next_of_checks(self, specs: Iterable[StepDef], prefix: str = "") -> Action | None:
        actions = (self._next_check_action(spec, prefix + spec.name) for spec in specs)
        return next((action for action in actions if action is not None), None)

    def _next_check_action(self, spec: StepDef, step: str) -> Action | None:
        record = self._latest_record(step, StepAction.CHECK)
        is_new_run = record is None or record.state is StepState.UNKNOWN
        if Capability.STARTS_RUN in spec.capabilities and self.has_unfinished_run and is_new_run:
            return self._clean_up_stale_runs()
        if record is None:
            return RunCheck(spec, step, 1)
        match record.state:
            case StepState.OK:
                return None
            case StepState.UNKNOWN if record.number < UNKNOWN_MAX_TRIES:
                return RunCheck(spec, step, record.number + 1)
            case StepState.INTENDED:
                return RunCheck(spec, step, record.number)
            case StepState.FAILED | StepState.BUSY | StepState.UNKNOWN:
                return Transition(Trigger.FAILED, step=step, text=record.text)

    def _next_probation_action(self) -> Action | None:
        """Wait until the probation is over, then repeat the in-service checks."""
        if self.plan.probation_s <= 0:
            return None
        until = in_service_since(self.target, self.records) + self.plan.probation_s
        if self.now < until:
            return Wait(until, "probation")
        specs = self._checks(in_service=True) or liveness_checks(self.plan.verify)
        return self._next_of_checks(specs, "probation.")

    def _reisolate_failed_in_service(self) -> Action | None:
        """Isolate a node again whose check failed in service, then fail it; None when no check failed."""
        in_service = {spec.name for spec in self._checks(in_service=True)}
        for position, record in enumerate(self._attempt_records):
            if record.action is not StepAction.CHECK:
                continue
            if record.step not in in_service and not record.step.startswith("probation."):
                continue
            retries_exhausted = record.state is StepState.UNKNOWN and record.number >= UNKNOWN_MAX_TRIES
            if record.state is StepState.FAILED or retries_exhausted:
                return self._reisolate(record, self._attempt_records[position:])
        return None

    # Cordon only: a failed check is no reason to evict the work that runs there.
    def _reisolate(self, failed_check: StepRecord, later: Sequence[StepRecord]) -> Action:
        text = failed_check.text
        for spec in self.plan.isolate:
            attempts = [
                r for r in later if r.step == spec.name and r.action in (StepAction.APPLY, StepAction.INSPECT)
            ]
            if not attempts:
                latest = self._latest_record(spec.name, StepAction.APPLY)
                number = 1 if latest is None else latest.number + 1
                return replace(self._apply_isolator(spec, number), cordon_only=True)
            if attempts[-1].state is StepState.INTENDED:
                return replace(self._apply_isolator(spec, attempts[-1].number), cordon_only=True)
            if attempts[-1].state is not StepState.OK:
                text += f"; and it could not be isolated again: {attempts[-1].text}"
        return Transition(Trigger.FAILED, step=failed_check.step, text=text)

    # returning, by a person's order

    def reconcile_return(self) -> Action:
        """Return a node to service by a person's order: revert the isolators, then check that it is alive."""
        if (action := self._return_to_service()) is not None:
            return action
        for spec in liveness_checks(self.plan.verify):
            step = f"return.{spec.name}"
            record = self._latest_record(step, StepAction.CHECK)
            if record is None or self._is_ordered_after(record):
                return RunCheck(spec, step, 1 if record is None else record.number + 1)
            if record.state is not StepState.OK:
                return CompleteOrder(succeeded=False, text=f"{spec.name}: {record.text}")
        return CompleteOrder(succeeded=True, text="returned")

    @property
    def _attempt_records(self) -> Sequence[StepRecord]:
        return [record for record in self.records if record.attempt == self.target.attempt]

    def _latest_record(self, step: str, *actions: StepAction) -> StepRecord | None:
        """Return the last record of a step in this attempt."""
        for record in reversed(self.records):
            if record.step == step and record.action in actions and record.attempt == self.target.attempt:
                return record
        return None
