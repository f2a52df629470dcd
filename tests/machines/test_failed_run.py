"""What a failed run left on its node is ended before the node fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from machines.model.actions import FAILED_RUN_TIMEOUT_S, Action, CleanUpStaleRuns, Transition
from machines.model.causes import said
from machines.model.rollout import FailureCode, Target
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.states import Phase, Trigger
from machines.workflow.next_action import next_action
from machines.workflow.situation import Situation
from machines.workflow.steps import CLEAN_UP
from rolloutd.texts.cause_text import describe_causes
from tests.machines.builders import T0, plan_of

PLAN = plan_of(isolate=())
TARGET = Target("R", "n1", "t1", (), "fleet", 1, phase=Phase.MAINTAINING, attempt=1, since=T0)
RUN = StepRecord(
    "R",
    "n1",
    1,
    "run.configure",
    StepAction.RUN,
    1,
    StepState.FAILED,
    T0,
    T0,
    text="time limit of 4s passed",
    handle="r1",
)
CLEANED = replace(RUN, step=CLEAN_UP.id, action=StepAction.CLEAN_UP, state=StepState.OK, text="", handle="")


def after(*records: StepRecord, unfinished: bool = True) -> Action:
    return next_action(Situation(PLAN, TARGET, records, T0 + 9, elapsed_s=9, has_unfinished_run=unfinished))


def test_failed_run_is_cleaned_up_before_failure() -> None:
    assert after(RUN) == CleanUpStaleRuns(1, FAILED_RUN_TIMEOUT_S)
    begun = replace(CLEANED, state=StepState.INTENDED)
    assert after(RUN, begun) == CleanUpStaleRuns(1, FAILED_RUN_TIMEOUT_S)
    failed = after(RUN, CLEANED, unfinished=False)
    assert failed == Transition(Trigger.FAILED, step=RUN.step, causes=said(RUN.text))


def test_earlier_clean_up_is_not_the_runs() -> None:
    assert after(CLEANED, RUN) == CleanUpStaleRuns(2, FAILED_RUN_TIMEOUT_S)


@pytest.mark.parametrize("state", [StepState.FAILED, StepState.UNKNOWN])
def test_failure_names_what_may_be_left(state: StepState) -> None:
    left = replace(CLEANED, state=state, text="n1 does not answer")
    failed = after(RUN, left)
    assert isinstance(failed, Transition)
    assert (
        describe_causes(failed.causes) == f"{RUN.text}; processes of its run may be left: n1 does not answer"
    )


@pytest.mark.parametrize(
    "code", [FailureCode.UNREACHABLE, FailureCode.LOST, FailureCode.NEVER_STARTED, FailureCode.INTERFERENCE]
)
def test_node_without_run_or_answer_fails_at_once(code: FailureCode) -> None:
    assert isinstance(after(replace(RUN, code=code)), Transition)


def test_failed_check_after_successful_run_cleans_nothing() -> None:
    checking: Sequence[StepRecord] = [replace(RUN, state=StepState.OK)]
    assert after(*checking) == Transition(Trigger.MAINTAINED)
