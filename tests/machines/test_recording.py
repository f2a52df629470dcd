"""What is recorded of an action: its intent, its result, and whether the node is isolated then."""

import pytest

from machines.model.actions import Isolate, Revert, RunCheck, RunPlaybook
from machines.model.plan import MaintainStage, StepDef
from machines.model.rollout import FailureCode, Target
from machines.model.step_record import Busy, Failed, Ok, StepAction, StepResult, StepState, Unknown
from machines.workflow.recording import intent_of, is_isolated_after, record_of
from tests.machines.builders import T0

TARGET = Target("R", "n1", "a", ("team/a",), "fleet", 0, attempt=2)
ISOLATOR = StepDef("isolate.0.command", "command")


def test_intent_recorded_before_its_action() -> None:
    intent = intent_of(
        RunPlaybook(MaintainStage("configure", "site.yml"), 3, False), TARGET, T0, handle="r.1"
    )
    assert (intent.step, intent.action, intent.number, intent.attempt) == (
        "run.configure",
        StepAction.RUN,
        3,
        2,
    )
    assert (intent.state, intent.at, intent.began_at, intent.handle) == (StepState.INTENDED, T0, T0, "r.1")
    team_check = RunCheck(StepDef("team.a.0.ssh", "ssh", team="a"), "team.a.0.ssh", 1)
    assert intent_of(team_check, TARGET, T0).visible_to == "a"


@pytest.mark.parametrize(
    ("result", "state"),
    [
        (Ok("fine", value=7), StepState.OK),
        (Failed("broken", "a" * 99_999, FailureCode.LOST), StepState.FAILED),
        (Busy("later"), StepState.BUSY),
        (Unknown("silent"), StepState.UNKNOWN),
    ],
)
def test_result_recorded_with_state_and_evidence(result: StepResult, state: StepState) -> None:
    record = record_of(intent_of(Isolate(ISOLATOR, 1, prior={"up": True}), TARGET, T0), result, T0 + 9.0)
    assert (record.state, record.at, record.began_at, record.text) == (state, T0 + 9.0, T0, result.text)
    assert record.prior == (7 if state is StepState.OK else {"up": True})
    assert len(record.output) == (65_536 if state is StepState.FAILED else 0)
    assert record.code is (FailureCode.LOST if state is StepState.FAILED else FailureCode.FAILED)


def test_isolation_follows_intent_and_last_return() -> None:
    assert is_isolated_after(Isolate(ISOLATOR, 1), None) is True
    assert is_isolated_after(Isolate(ISOLATOR, 1), Failed("no")) is None
    last, other = Revert(ISOLATOR, 1, None, is_last=True), Revert(ISOLATOR, 1, None, is_last=False)
    assert is_isolated_after(last, Ok()) is False
    assert [is_isolated_after(other, Ok()), is_isolated_after(last, Busy("pods"))] == [None, None]
