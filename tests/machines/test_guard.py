"""The guard's steps: armed before the run, disarmed after the checks, restored before a failure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machines.model.actions import (
    FAILED_RUN_TIMEOUT_S,
    Action,
    CleanUpStaleRuns,
    RunCheck,
    RunPlaybook,
    StopRun,
    Transition,
    UseGuard,
    Wait,
)
from machines.model.causes import Cause, CauseCode, said
from machines.model.plan import Guard, StepDef
from machines.model.rollout import BLAMES_CHANGE, Failure, FailureCode, NodeOrder, Target
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.states import Phase, Trigger
from machines.workflow.failing import ANSWER_S
from machines.workflow.next_action import next_action
from machines.workflow.situation import Situation
from machines.workflow.steps import UNKNOWN_MAX_TRIES, UNKNOWN_RETRY_S
from rolloutd.texts.cause_text import describe_causes
from tests.machines.builders import T0, plan_of

GUARD = StepDef("guard", "guard")
REACHABLE = StepDef("confirm.0.reachable", "reachable")
PLAN = plan_of(guard=Guard(GUARD, 120.0, (REACHABLE,)))
MAINTAINING = Target("R", "n1", "t1", (), "fleet", 1, phase=Phase.MAINTAINING, attempt=1, since=T0)
RESTORE = UseGuard(GUARD, 1, StepAction.RESTORE)


def step(
    action: StepAction, state: StepState, number: int = 1, *, prior: object = None, at: float = 0.0
) -> StepRecord:
    names = {StepAction.RUN: "run.configure", StepAction.CHECK: REACHABLE.name, StepAction.CLEAN_UP: "clear"}
    name = names.get(action, GUARD.name)
    handle = "run" if action is StepAction.RUN else ""
    times = {"at": T0 + at, "began_at": T0 + at}
    return StepRecord(
        "R",
        "n1",
        1,
        name,
        action,
        number,
        state,
        **times,
        handle=handle,
        prior=prior,
        text=f"{action} {state}",
    )


ARMED = step(StepAction.ARM, StepState.OK)
RAN = step(StepAction.RUN, StepState.OK)
CONFIRMED = step(StepAction.CHECK, StepState.OK)
RUNNING = step(StepAction.RUN, StepState.INTENDED)
RUN_FAILED = step(StepAction.RUN, StepState.FAILED)
GUARD_ENDED = step(StepAction.DISARM, StepState.FAILED)
RESTORED = step(StepAction.RESTORE, StepState.OK, prior={"restored": ["/etc/net"]})


def after(*records: StepRecord, at: float = 0.0, target: Target = MAINTAINING) -> Action:
    return next_action(Situation(PLAN, target, records, T0 + at, elapsed_s=at, has_unfinished_run=False))


def failure(*records: StepRecord, at: float = 0.0, target: Target = MAINTAINING) -> Transition:
    action = after(*records, at=at, target=target)
    assert isinstance(action, Transition)
    assert action.trigger is Trigger.FAILED
    return action


def test_guard_is_armed_before_run_and_disarmed_after_checks() -> None:
    assert after() == UseGuard(GUARD, 1, StepAction.ARM)
    assert after(step(StepAction.ARM, StepState.INTENDED)) == UseGuard(GUARD, 1, StepAction.ARM)
    assert after(ARMED) == RunPlaybook(PLAN.stages[0], 1, is_started=False)
    assert after(ARMED, RAN) == RunCheck(REACHABLE, REACHABLE.name, 1)
    assert after(ARMED, RAN, CONFIRMED) == UseGuard(GUARD, 1, StepAction.DISARM)
    disarming = step(StepAction.DISARM, StepState.INTENDED)
    assert after(ARMED, RAN, CONFIRMED, disarming) == UseGuard(GUARD, 1, StepAction.DISARM)
    disarmed = step(StepAction.DISARM, StepState.OK)
    assert after(ARMED, RAN, CONFIRMED, disarmed) == Transition(Trigger.MAINTAINED)


def test_node_that_cannot_arm_fails_untouched() -> None:
    refused = failure(step(StepAction.ARM, StepState.FAILED))
    assert (refused.step, refused.code) == ("guard", FailureCode.NEVER_STARTED)


def test_lost_answer_of_arm_is_restored_before_failure() -> None:
    lost = [step(StepAction.ARM, StepState.UNKNOWN, n) for n in range(1, UNKNOWN_MAX_TRIES + 1)]
    assert after(lost[0]) == Wait(T0 + UNKNOWN_RETRY_S, "guard")
    assert after(*lost) == RESTORE
    nothing_armed = step(StepAction.RESTORE, StepState.OK)
    assert failure(*lost, nothing_armed).code is FailureCode.UNREACHABLE


def test_failed_run_is_restored_then_fails() -> None:
    assert after(ARMED, RUN_FAILED) == RESTORE
    failed = failure(ARMED, RUN_FAILED, RESTORED)
    assert (failed.step, failed.code) == ("run.configure", FailureCode.RESTORED_ITSELF)
    assert describe_causes(failed.causes) == "run failed; restore ok"


def test_run_is_cleaned_up_before_restore() -> None:
    def after_run(*records: StepRecord) -> Action:
        return next_action(
            Situation(
                PLAN, MAINTAINING, [ARMED, RUN_FAILED, *records], T0, elapsed_s=0.0, has_unfinished_run=True
            )
        )

    clean_up = CleanUpStaleRuns(1, FAILED_RUN_TIMEOUT_S)
    assert after_run() == clean_up
    assert after_run(step(StepAction.CLEAN_UP, StepState.INTENDED)) == clean_up
    assert after_run(step(StepAction.CLEAN_UP, StepState.FAILED)) == RESTORE


def test_failed_confirmation_is_restored() -> None:
    assert after(ARMED, RAN, step(StepAction.CHECK, StepState.FAILED)) == UseGuard(
        GUARD, 1, StepAction.RESTORE
    )


def test_node_that_restored_itself_is_not_confirmed() -> None:
    assert after(ARMED, RAN, CONFIRMED, GUARD_ENDED) == RESTORE
    failed = failure(ARMED, RAN, CONFIRMED, GUARD_ENDED, RESTORED)
    assert (failed.step, failed.code) == ("guard", FailureCode.RESTORED_ITSELF)


def test_run_of_restored_node_is_stopped() -> None:
    action = after(ARMED, RUNNING, GUARD_ENDED)
    assert action == StopRun(RUNNING, (*said("disarm failed"), Cause(CauseCode.RUN_STOPPED)))
    assert after(ARMED, GUARD_ENDED) == RESTORE


def test_stop_order_restores_first() -> None:
    stopped = replace(MAINTAINING, order=NodeOrder.STOP)
    assert isinstance(after(ARMED, RUNNING, target=stopped), StopRun)
    assert after(ARMED, RUN_FAILED, target=stopped) == RESTORE
    assert failure(ARMED, RUN_FAILED, RESTORED, target=stopped).code is FailureCode.INTERFERENCE


def test_node_that_was_lost_and_restored_itself_says_so() -> None:
    lost = replace(RUN_FAILED, code=FailureCode.LOST)
    assert failure(ARMED, lost, RESTORED).code is FailureCode.RESTORED_ITSELF


@pytest.mark.parametrize("code", sorted(set(FailureCode) - BLAMES_CHANGE - {FailureCode.LOST}))
def test_failure_of_surroundings_keeps_its_code_after_restore(code: FailureCode) -> None:
    assert failure(ARMED, replace(RUN_FAILED, code=code), RESTORED).code is code


def test_guard_that_ended_before_run_blames_nothing() -> None:
    assert failure(ARMED, GUARD_ENDED, RESTORED).code is FailureCode.NEVER_STARTED
    waited = replace(RUN_FAILED, code=FailureCode.NEVER_STARTED)
    assert failure(ARMED, waited, GUARD_ENDED, RESTORED).code is FailureCode.NEVER_STARTED


@pytest.mark.parametrize(
    ("by", "elapsed_s", "is_blamed"),
    [("timer", 5.0, False), ("boot", 5.0, False), ("daemon", 5.0, True), ("timer", 60.0, True)],
)
def test_restore_while_daemon_was_down_does_not_blame_change(
    by: str, elapsed_s: float, is_blamed: bool
) -> None:
    restored = step(StepAction.RESTORE, StepState.OK, prior={"by": by, "restored": []}, at=60.0)
    records = [ARMED, RUN_FAILED, GUARD_ENDED, restored]
    failed = next_action(
        Situation(PLAN, MAINTAINING, records, T0 + 60, elapsed_s=elapsed_s, has_unfinished_run=False)
    )
    assert isinstance(failed, Transition)
    assert failed.code is FailureCode.RESTORED_ITSELF
    assert Failure("n1#1", "n1", 1, failed.step, "", T0, failed.code).blames_change is is_blamed


def test_silent_node_is_asked_until_its_restore_is_overdue() -> None:
    silent = step(StepAction.RESTORE, StepState.UNKNOWN)
    assert after(ARMED, RUN_FAILED, silent) == Wait(T0 + UNKNOWN_RETRY_S, "guard")
    assert after(ARMED, RUN_FAILED, silent, at=UNKNOWN_RETRY_S) == UseGuard(GUARD, 2, StepAction.RESTORE)
    late = 120.0 + ANSWER_S + 1
    restarted = next_action(
        Situation(
            PLAN, MAINTAINING, [ARMED, RUN_FAILED, silent], T0 + late, elapsed_s=1.0, has_unfinished_run=False
        )
    )
    assert restarted == UseGuard(GUARD, 2, StepAction.RESTORE)
    overdue = failure(ARMED, RUN_FAILED, silent, at=late)
    assert overdue.code is FailureCode.FAILED
    assert describe_causes(overdue.causes) == "run failed; restore unknown"


def test_rollback_is_guarded_too() -> None:
    undo = replace(PLAN, rollback=PLAN.stages[:1])
    rolling_back = replace(MAINTAINING, rolling_back=True)
    action = next_action(Situation(undo, rolling_back, [], T0, elapsed_s=0.0, has_unfinished_run=False))
    assert action == UseGuard(GUARD, 1, StepAction.ARM)
