"""The code of a failure: what parts that do not read its message know of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machines.model.actions import Transition
from machines.model.events import StepAction, StepRecord, StepState
from machines.model.plan import OnUnknownPolicy, Stage
from machines.model.rollout import FailureCode, Target
from machines.states import Phase, Trigger
from machines.workflow.next_action import next_action
from machines.workflow.phase_transitions import transition
from tests.machines.builders import T0, plan_of

PLAN = plan_of(stages=(Stage("configure", "sysctl.yml", on_unknown=OnUnknownPolicy.PAUSE),))
TARGET = Target("R", "n1", "t1", (), "fleet", 1, phase=Phase.MAINTAINING, attempt=1, since=T0)


@pytest.mark.parametrize(
    ("state", "code"), [(StepState.FAILED, FailureCode.FAILED), (StepState.UNKNOWN, FailureCode.UNKNOWN)]
)
def test_failed_run_has_code_of_its_result(state: StepState, code: FailureCode) -> None:
    record = StepRecord("R", "n1", 1, "run.configure", StepAction.RUN, 1, state, T0, T0, text="why")
    action = next_action(PLAN, TARGET, [record], T0, elapsed_s=0.0, has_unfinished_run=False)
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
