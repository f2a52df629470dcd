"""The steps of one node as data, and when each is tried again.

A plan compiles to an ordered list of Step rows, and a step record refers to its row by id.  The purpose of a
row says why the step is done; RULES has one line per purpose: what is recorded, in which phase the step is
due, and which results are tried again.  next_try() applies it.  next_action.py walks the list, and adds what
a rule cannot say: when a stage starts again, and what a cordon leaves to do (NextAction.try_of()).

A new kind of step is a purpose, its rule, its rows in compile_steps(), and in next_action.py its action.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from machines.model.actions import Wait, retry_wait
from machines.model.plan import Capability, Guard, MaintainStage, Plan, StepDef
from machines.model.rollout import FailureCode, Target
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.states import Phase

NOT_ISOLATED_RETRY_S = 20.0
"""Shortest time between two starts of an isolator that answers "busy", also to a return to service.

It counts from the start, so a drain that worked for its whole pass continues without a pause.
"""

UNKNOWN_RETRY_S = 5.0
"""Delay before a retry after a lost answer: most connections are back within seconds."""

UNKNOWN_MAX_TRIES = 3
"""Tries of a step whose answer was lost; after the last one, unknown traffic counts as busy."""

RETURN_MAX_TRIES = 45
"""Tries of a return to service whose isolator answers "busy", some 15 minutes; then a person decides."""

FIRST_BACKOFF_S = 60.0
"""Delay after the first aborted isolation or failed prepare stage; it doubles with each further one."""

MAX_BACKOFF_S = 3600.0
"""Longest such delay: a node that is tried every hour still meets most windows."""


class Purpose(StrEnum):
    BASELINE = "baseline"
    """Find out which checks fail before anything is done."""
    CORDON = "cordon"
    """Keep new work away, before the traffic probes."""
    ISOLATE = "isolate"
    CLEAN_UP = "clean-up"
    """End what older runs left on the node."""
    ARM_GUARD = "arm-guard"
    MAINTAIN = "maintain"
    JUDGE_RUN = "judge-run"
    """Find out whether a run whose result is unknown made its change."""
    JUDGE_OTHER = "judge-other"
    """Check again after a change of another rollout that shares the outage."""
    CONFIRM = "confirm"
    """Find out whether the node can be reached after the change, from here and from the node itself."""
    DISARM_GUARD = "disarm-guard"
    VERIFY = "verify"
    REPAIR = "repair"
    """Run the playbook that a failed check names, once."""
    RETURN = "return"
    VERIFY_IN_SERVICE = "verify-in-service"
    WATCH = "watch"
    """Let the node serve for the time of the probation."""
    PROBATION = "probation"
    CONFIRM_RETURN = "confirm-return"
    """Check a node that a person ordered back to service."""


@dataclass(frozen=True, slots=True)
class Retry:
    """A result after which a step is tried again; `tries` None: without limit."""

    delay_s: float = 0.0
    tries: int | None = None
    from_start: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """What holds for all steps of one purpose.

    `phase`: when they are due; None means on demand.  A step with the result OK is done, and any other result
    is final, unless `retries` has it.  `in_service`: the node takes traffic meanwhile.
    `repeated_by_order`: a person's order makes a final result void.
    """

    action: StepAction
    phase: Phase | None = None
    retries: Mapping[StepState, Retry] = field(default_factory=dict)
    in_service: bool = False
    repeated_by_order: bool = False

    @property
    def recorded_actions(self) -> tuple[StepAction, ...]:
        """The actions of its records: an inspection that fails is recorded in the place of its APPLY."""
        return (self.action, StepAction.INSPECT) if self.action is StepAction.APPLY else (self.action,)


_LOST_CHECK = {StepState.UNKNOWN: Retry(tries=UNKNOWN_MAX_TRIES)}
_LOST_ISOLATION = {
    StepState.BUSY: Retry(NOT_ISOLATED_RETRY_S, from_start=True),
    StepState.UNKNOWN: Retry(UNKNOWN_RETRY_S, tries=UNKNOWN_MAX_TRIES),
}
_LOST_RETURN = {
    # The isolation was undone, and is in effect again.
    StepState.OK: Retry(),
    StepState.BUSY: Retry(NOT_ISOLATED_RETRY_S, tries=RETURN_MAX_TRIES, from_start=True),
    StepState.UNKNOWN: Retry(UNKNOWN_RETRY_S, tries=UNKNOWN_MAX_TRIES + 1),
}

_LOST_GUARD = {StepState.UNKNOWN: Retry(UNKNOWN_RETRY_S, tries=UNKNOWN_MAX_TRIES)}

RULES: Mapping[Purpose, Rule] = {
    Purpose.BASELINE: Rule(StepAction.CHECK, Phase.ISOLATING, _LOST_CHECK),
    Purpose.CORDON: Rule(StepAction.APPLY, Phase.ISOLATING, _LOST_ISOLATION),
    Purpose.ISOLATE: Rule(StepAction.APPLY, Phase.ISOLATING, _LOST_ISOLATION),
    Purpose.CLEAN_UP: Rule(StepAction.CLEAN_UP, retries={StepState.OK: Retry()}, repeated_by_order=True),
    Purpose.ARM_GUARD: Rule(StepAction.ARM, Phase.MAINTAINING, _LOST_GUARD),
    Purpose.MAINTAIN: Rule(StepAction.RUN, Phase.MAINTAINING),
    Purpose.JUDGE_RUN: Rule(StepAction.CHECK),
    Purpose.JUDGE_OTHER: Rule(StepAction.CHECK, retries=_LOST_CHECK),
    Purpose.CONFIRM: Rule(StepAction.CHECK, Phase.MAINTAINING, _LOST_CHECK),
    Purpose.DISARM_GUARD: Rule(StepAction.DISARM, Phase.MAINTAINING, _LOST_GUARD),
    Purpose.VERIFY: Rule(StepAction.CHECK, Phase.VERIFYING, _LOST_CHECK),
    Purpose.REPAIR: Rule(StepAction.RUN),
    Purpose.RETURN: Rule(StepAction.REVERT, Phase.VERIFYING, _LOST_RETURN, repeated_by_order=True),
    Purpose.VERIFY_IN_SERVICE: Rule(StepAction.CHECK, Phase.VERIFYING, _LOST_CHECK, in_service=True),
    Purpose.WATCH: Rule(StepAction.CHECK, Phase.VERIFYING),
    Purpose.PROBATION: Rule(StepAction.CHECK, Phase.VERIFYING, _LOST_CHECK, in_service=True),
    Purpose.CONFIRM_RETURN: Rule(StepAction.CHECK, in_service=True, repeated_by_order=True),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One row; its records carry `id` and the action of its rule."""

    id: str
    purpose: Purpose
    spec: StepDef | MaintainStage | None = None

    @property
    def rule(self) -> Rule:
        return RULES[self.purpose]


class StepPrefix(StrEnum):
    """What stands before the name of a check or a stage in the id of a step that the plan does not name.

    The runs of its stages are `run.NAME` (MaintainStage.step).
    """

    BASELINE = "baseline"
    PROBATION = "probation"
    RETURN = "return"
    PROBE = "probe"
    """With the number of the run whose result is unknown."""
    AFTER = "after"
    """With the change of another rollout, after which the check is made again."""
    SOAK = "soak"
    """Outside an attempt: while the node soaks, or before an attempt."""
    PREPARE = "prepare"


def step_id(prefix: StepPrefix, *names: str) -> str:
    return ".".join((prefix, *names))


def names_after(prefix: StepPrefix, step: str) -> str:
    """Return a step's id without this prefix; empty if it has another one."""
    return step.removeprefix(f"{prefix}.") if step.startswith(f"{prefix}.") else ""


CLEAN_UP = Step("clear", Purpose.CLEAN_UP)
"""Its id is in the records that stores have."""


def compile_steps(plan: Plan, target: Target) -> tuple[Step, ...]:
    """Return the steps of one node in the order in which they are due, then those on demand.

    `plan` is the plan as it applies to this node (plan_for_target).
    """
    isolated = [spec for spec in plan.verify if not spec.in_service]
    in_service = [spec for spec in plan.verify if spec.in_service]
    # These hold whatever change the node carries.
    liveness = [s for s in plan.verify if Capability.JUDGES_LIVENESS in s.capabilities and s.team is None]
    cordons = [spec for spec in plan.isolate if Capability.CORDON_ONLY in spec.capabilities]
    baseline = [] if target.rolling_back else [spec for spec in plan.verify if spec.baseline]
    rows = [
        *_rows(Purpose.BASELINE, baseline, StepPrefix.BASELINE),
        *_rows(Purpose.CORDON, cordons),
        *_rows(Purpose.ISOLATE, plan.isolate),
        *_guarded(
            plan.guard, [Step(stage.step, Purpose.MAINTAIN, stage) for stage in stages_for(plan, target)]
        ),
        *_rows(Purpose.VERIFY, isolated),
        # In reverse: the isolator that came last found the state that the ones before it had made.
        *_rows(Purpose.RETURN, reversed(plan.isolate)),
        *_rows(Purpose.VERIFY_IN_SERVICE, in_service),
    ]
    if plan.probation_s > 0:
        rows.append(Step(StepPrefix.PROBATION.value, Purpose.WATCH))
        rows += _rows(Purpose.PROBATION, in_service or liveness, StepPrefix.PROBATION)
    return (*rows, *_rows(Purpose.CONFIRM_RETURN, liveness, StepPrefix.RETURN))


def judging_steps(plan: Plan, run: int) -> list[Step]:
    """Return the checks that find out whether this run, whose result is unknown, made its change."""
    isolated = (spec for spec in plan.verify if not spec.in_service)
    return _rows(Purpose.JUDGE_RUN, isolated, StepPrefix.PROBE, str(run))


def steps_after(plan: Plan, change: str) -> list[Step]:
    """Return the checks that this change passes, again after the change of another rollout."""
    isolated = (spec for spec in plan.verify if not spec.in_service)
    return _rows(Purpose.JUDGE_OTHER, isolated, StepPrefix.AFTER, change)


def repair_step(plan: Plan, spec: StepDef) -> Step:
    """Return the run of the playbook that repairs a node on which this check failed."""
    variables = {key: value for stage in reversed(plan.stages) for key, value in stage.variables.items()}
    stage = MaintainStage(f"repair.{spec.name}", spec.repair, variables)
    return Step(stage.step, Purpose.REPAIR, stage)


def baseline_record(spec: StepDef, records: Sequence[StepRecord]) -> StepRecord | None:
    """Return the result of a check before the change, None if it has none."""
    step = step_id(StepPrefix.BASELINE, spec.name)
    ended = (r for r in reversed(records) if r.step == step and r.state is not StepState.INTENDED)
    return next(ended, None)


def is_excused(spec: StepDef, state: StepState, records: Sequence[StepRecord]) -> bool:
    """Return whether a check may end like this: it failed before the change too, or may stay unknown."""
    if state is StepState.UNKNOWN:
        return spec.accepts_unknown
    before = baseline_record(spec, records) if spec.baseline else None
    return state is StepState.FAILED and before is not None and before.state is StepState.FAILED


def stages_for(plan: Plan, target: Target) -> tuple[MaintainStage, ...]:
    return plan.rollback if target.rolling_back else plan.stages


def latest_record(
    step: Step, records: Sequence[StepRecord], attempt: int, *only: StepAction
) -> StepRecord | None:
    """Return the last record of a step in this attempt, of all its actions or of `only` some."""
    actions = only or step.rule.recorded_actions
    for record in reversed(records):
        if record.step == step.id and record.action in actions and record.attempt == attempt:
            return record
    return None


def next_start(
    step: Step, records: Sequence[StepRecord], now: float, *, elapsed_s: float, limit_s: float | None
) -> int | Wait | None:
    """Return the next try of a run that could not begin because its node was unreachable; None for none.

    `records` are those of the attempt.  Time without a daemon does not count, nor a clock that was set back.
    """
    tries = [r for r in records if r.step == step.id and r.code is FailureCode.UNREACHABLE]
    if limit_s is None or not tries or tries[-1].state is not StepState.FAILED:
        return None
    # Both clocks, because the daemon may have been down, and the clock may have been set back.
    if min(max(0.0, now - tries[0].began_at), elapsed_s) >= limit_s:
        return None
    wait = retry_wait(tries[-1], NOT_ISOLATED_RETRY_S, now, since=tries[-1].began_at)
    return wait or tries[-1].number + 1


def next_try(
    rule: Rule, latest: StepRecord | None, now: float, *, first: int = 1, is_ordered: bool = False
) -> int | Wait | StepState:
    """Return the number of a step's next try, the wait before it, or the result that is final.

    `latest` is its last record; tries count from `first`.  `is_ordered`: a person ordered it since.  After an
    INTENDED record the same try is due again, because it may or may not have happened.
    """
    if latest is None:
        return first
    # It may have happened: the adapter finds out, and a new number would make it happen twice.
    if latest.state is StepState.INTENDED:
        return latest.number
    # Tries are counted by number, not by records: a try repeated after a daemon's end keeps its number.
    retry = rule.retries.get(latest.state)
    if retry is not None and (retry.tries is None or latest.number < first + retry.tries - 1):
        since = latest.began_at if retry.from_start else latest.at
        return retry_wait(latest, retry.delay_s, now, since=since) or latest.number + 1
    if is_ordered:
        return latest.number + 1
    return latest.state


def needs_clean_node(step: Step, latest: StepRecord | None) -> bool:
    """Return whether no process of an older run may be on the node for the next try of this step."""
    match step.rule.action, step.spec:
        case StepAction.REVERT, _:
            return True
        case StepAction.RUN, _:
            return latest is None
        case StepAction.CHECK, StepDef() as spec:
            is_new_run = latest is None or latest.state is StepState.UNKNOWN
            return is_new_run and Capability.STARTS_RUN in spec.capabilities
        case _:
            return False


def _guarded(guard: Guard | None, runs: list[Step]) -> list[Step]:
    """Return the runs, between the arming of the guard and its end."""
    if guard is None:
        return runs
    confirm = _rows(Purpose.CONFIRM, guard.confirm)
    arm, disarm = (
        Step(guard.step.name, purpose, guard.step) for purpose in (Purpose.ARM_GUARD, Purpose.DISARM_GUARD)
    )
    return [arm, *runs, *confirm, disarm]


def _rows(purpose: Purpose, specs: Iterable[StepDef], *prefix: str) -> list[Step]:
    return [Step(".".join((*prefix, spec.name)), purpose, spec) for spec in specs]


def backoff_s(failed_before: int) -> float:
    """Return the delay before the next try of what failed once more than this."""
    return float(min(FIRST_BACKOFF_S * 2 ** min(failed_before, 10), MAX_BACKOFF_S))
