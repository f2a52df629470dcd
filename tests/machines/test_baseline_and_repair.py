"""Checks that failed before the change, and the playbook that repairs a node once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from machines.model.actions import Action, CleanUpStaleRuns, Isolate, RunCheck, RunPlaybook, Transition
from machines.model.causes import Cause, CauseCode, said
from machines.model.plan import StepDef
from machines.model.rollout import Target
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.states import Outcome, Phase, Trigger
from machines.workflow.next_action import next_action
from machines.workflow.situation import Situation
from tests.machines.builders import T0, plan_of

HEALTH = StepDef("verify.0.http", "http", baseline=True)
SERVES = StepDef("verify.1.http", "http", in_service=True, baseline=True)
METRIC = StepDef("verify.0.prometheus", "prometheus", accepts_unknown=True)
REPAIRED = StepDef("verify.0.ssh", "ssh", repair="repair.yml")
COMMAND = StepDef("isolate.0.command", "command")
PLAN = plan_of(isolate=(COMMAND,), verify=(HEALTH, SERVES))
TARGET = Target("R", "n1", "t1", (), "fleet", 1, phase=Phase.ISOLATING, attempt=1, since=T0)
VERIFYING = replace(TARGET, phase=Phase.VERIFYING)

Row = tuple[str, StepAction, StepState]
BASELINE_FAILED: Row = ("baseline.verify.0.http", StepAction.CHECK, StepState.FAILED)
BASELINE_OK: Row = ("baseline.verify.0.http", StepAction.CHECK, StepState.OK)
SERVES_FAILED_BEFORE: Row = ("baseline.verify.1.http", StepAction.CHECK, StepState.FAILED)
ISOLATED: Row = (COMMAND.name, StepAction.APPLY, StepState.OK)
RAN: Row = ("run.configure", StepAction.RUN, StepState.OK)
RETURNED: Row = (COMMAND.name, StepAction.REVERT, StepState.OK)


def records(*rows: Row, attempt: int = 1) -> list[StepRecord]:
    found: list[StepRecord] = []
    for position, (step, action, state) in enumerate(rows):
        number = 1 + sum((each.step, each.action) == (step, action) for each in found)
        at = T0 + position
        found.append(StepRecord("R", "n1", attempt, step, action, number, state, at, at, text="red"))
    return found


def after(
    target: Target, *rows: Row, plan: object = PLAN, earlier: Sequence[StepRecord] = (), unclean: bool = False
) -> Action:
    known = [*earlier, *records(*rows, attempt=target.attempt)]
    return next_action(Situation(plan, target, known, T0 + 60.0, elapsed_s=60.0, has_unfinished_run=unclean))  # type: ignore[arg-type]


def test_baseline_checks_run_before_isolation() -> None:
    assert after(TARGET) == RunCheck(HEALTH, "baseline.verify.0.http", 1, is_baseline=True)
    second = RunCheck(SERVES, "baseline.verify.1.http", 1, is_baseline=True)
    assert after(TARGET, BASELINE_FAILED) == second
    assert after(TARGET, BASELINE_FAILED, SERVES_FAILED_BEFORE) == Isolate(COMMAND, 1)


def test_baseline_not_measured_again_after_a_run() -> None:
    earlier = records(BASELINE_OK, ISOLATED, RAN, RETURNED)
    again = replace(TARGET, attempt=2)
    assert isinstance(after(again, earlier=earlier), Isolate)
    assert isinstance(after(again, earlier=records(BASELINE_OK)), RunCheck), "nothing has run yet"


def test_check_that_failed_before_need_not_pass_after() -> None:
    failed = (HEALTH.name, StepAction.CHECK, StepState.FAILED)
    done = (BASELINE_FAILED, SERVES_FAILED_BEFORE, ISOLATED, RAN, failed)
    assert after(VERIFYING, *done).__class__.__name__ == "Revert"
    in_service = (SERVES.name, StepAction.CHECK, StepState.FAILED)
    verified = after(VERIFYING, *done, RETURNED, in_service)
    assert verified == Transition(Trigger.VERIFIED, Outcome.CHANGED)


def test_check_that_passed_before_and_fails_after_fails_node() -> None:
    failed = (HEALTH.name, StepAction.CHECK, StepState.FAILED)
    answer = after(VERIFYING, BASELINE_OK, ISOLATED, RAN, failed)
    assert answer == Transition(Trigger.FAILED, step=HEALTH.name, causes=said("red"))


def test_unknown_before_excuses_nothing() -> None:
    unknown = ("baseline.verify.0.http", StepAction.CHECK, StepState.UNKNOWN)
    failed = (HEALTH.name, StepAction.CHECK, StepState.FAILED)
    answer = after(VERIFYING, unknown, unknown, unknown, ISOLATED, RAN, failed)
    assert isinstance(answer, Transition)
    assert answer.trigger is Trigger.FAILED


def test_inconclusive_check_passes_if_the_plan_says_so() -> None:
    unknown = (METRIC.name, StepAction.CHECK, StepState.UNKNOWN)
    rows = (ISOLATED, RAN, unknown, unknown, unknown)
    lenient = plan_of(isolate=(COMMAND,), verify=(METRIC,))
    assert after(VERIFYING, *rows, plan=lenient).__class__.__name__ == "Revert"
    strict = plan_of(isolate=(COMMAND,), verify=(replace(METRIC, accepts_unknown=False),))
    assert isinstance(after(VERIFYING, *rows, plan=strict), Transition)


# -- repair --------------------------------------------------------------------

REPAIRING = plan_of(isolate=(COMMAND,), verify=(REPAIRED,))
CHECK_FAILED: Row = (REPAIRED.name, StepAction.CHECK, StepState.FAILED)
REPAIR = "run.repair.verify.0.ssh"


def test_repair_runs_once_then_check_again() -> None:
    action = after(VERIFYING, ISOLATED, RAN, CHECK_FAILED, plan=REPAIRING)
    assert isinstance(action, RunPlaybook)
    assert (action.stage.playbook, action.stage.step, action.number) == ("repair.yml", REPAIR, 1)
    repaired = (REPAIR, StepAction.RUN, StepState.OK)
    again = after(VERIFYING, ISOLATED, RAN, CHECK_FAILED, repaired, plan=REPAIRING)
    assert again == RunCheck(REPAIRED, REPAIRED.name, 2)
    failed = after(VERIFYING, ISOLATED, RAN, CHECK_FAILED, repaired, CHECK_FAILED, plan=REPAIRING)
    causes = (*said("red"), Cause(CauseCode.REPAIR_USELESS))
    assert failed == Transition(Trigger.FAILED, step=REPAIRED.name, causes=causes)


def test_begun_repair_is_found_again_after_restart() -> None:
    begun = (REPAIR, StepAction.RUN, StepState.INTENDED)
    action = after(VERIFYING, ISOLATED, RAN, CHECK_FAILED, begun, plan=REPAIRING, unclean=True)
    assert isinstance(action, RunPlaybook)
    assert (action.number, action.is_started) == (1, True)


def test_failed_repair_fails_node_with_both_texts() -> None:
    broken = (REPAIR, StepAction.RUN, StepState.FAILED)
    failed = after(VERIFYING, ISOLATED, RAN, CHECK_FAILED, broken, plan=REPAIRING)
    causes = (*said("red"), Cause(CauseCode.REPAIR_FAILED, {"text": "red"}))
    assert failed == Transition(Trigger.FAILED, step=REPAIRED.name, causes=causes)


def test_repair_waits_for_stale_runs_and_isolation() -> None:
    stale = after(VERIFYING, ISOLATED, RAN, CHECK_FAILED, plan=REPAIRING, unclean=True)
    assert isinstance(stale, CleanUpStaleRuns)
    lost = (COMMAND.name, StepAction.INSPECT, StepState.BUSY)
    assert not isinstance(after(VERIFYING, ISOLATED, RAN, CHECK_FAILED, lost, plan=REPAIRING), RunPlaybook)
