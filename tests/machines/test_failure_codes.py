"""The code of a failure: what parts that do not read its message know of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machines.model.actions import Action, RunPlaybook, Transition
from machines.model.plan import MaintainStage, OnUnknownPolicy
from machines.model.rollout import FailureCode, Target
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.states import Phase, Trigger
from machines.workflow.next_action import next_action
from machines.workflow.phase_transitions import transition
from machines.workflow.situation import Situation
from tests.machines.builders import T0, plan_of

PLAN = plan_of(stages=(MaintainStage("configure", "sysctl.yml", on_unknown=OnUnknownPolicy.PAUSE),))
TARGET = Target("R", "n1", "t1", (), "fleet", 1, phase=Phase.MAINTAINING, attempt=1, since=T0)


@pytest.mark.parametrize(
    ("state", "code"), [(StepState.FAILED, FailureCode.FAILED), (StepState.UNKNOWN, FailureCode.UNKNOWN)]
)
def test_failed_run_has_code_of_its_result(state: StepState, code: FailureCode) -> None:
    record = StepRecord("R", "n1", 1, "run.configure", StepAction.RUN, 1, state, T0, T0, text="why")
    action = next_action(Situation(PLAN, TARGET, [record], T0, elapsed_s=0.0, has_unfinished_run=False))
    assert isinstance(action, Transition)
    assert (action.trigger, action.code) == (Trigger.FAILED, code)


def test_failure_while_isolating_never_started() -> None:
    isolating = replace(TARGET, phase=Phase.ISOLATING)
    failed = transition(isolating, Trigger.FAILED, T0, step="isolate", text="why").failure
    assert failed is not None
    assert failed.code is FailureCode.NEVER_STARTED
    failed = transition(TARGET, Trigger.FAILED, T0, step="run.configure", text="why").failure
    assert failed is not None
    assert failed.code is FailureCode.FAILED


def test_node_that_second_stage_cannot_reach_is_lost() -> None:
    plan = replace(PLAN, stages=(*PLAN.stages, MaintainStage("restart", "restart.yml")))
    common = ("R", "n1", 1)
    done = StepRecord(*common, "run.configure", StepAction.RUN, 1, StepState.OK, T0, T0)
    silent = StepRecord(
        *common,
        "run.restart",
        StepAction.RUN,
        1,
        StepState.FAILED,
        T0,
        T0,
        text="why",
        code=FailureCode.UNREACHABLE,
    )
    failed = next_action(Situation(plan, TARGET, [done, silent], T0, elapsed_s=0.0, has_unfinished_run=False))
    assert isinstance(failed, Transition)
    assert (failed.step, failed.code) == ("run.restart", FailureCode.LOST)


def test_unreachable_node_is_tried_until_its_limit() -> None:
    common = ("R", "n1", 1, "run.configure", StepAction.RUN, 1, StepState.FAILED, T0, T0)
    silent = StepRecord(*common, text="why", code=FailureCode.UNREACHABLE)

    def after(elapsed_s: float, limit_s: float | None) -> Action:
        plan = replace(PLAN, start_timeout_s=limit_s)
        now = T0 + 600.0
        return next_action(
            Situation(plan, TARGET, [silent], now, elapsed_s=elapsed_s, has_unfinished_run=False)
        )

    assert after(599.0, 600.0) == RunPlaybook(PLAN.stages[0], 2, is_started=False)
    assert after(60.0, 300.0) == RunPlaybook(PLAN.stages[0], 2, is_started=False), "the daemon was down"
    for limit_s in (None, 600.0):
        failed = after(600.0, limit_s)
        assert isinstance(failed, Transition)
        assert (failed.trigger, failed.code) == (Trigger.FAILED, FailureCode.UNREACHABLE)
