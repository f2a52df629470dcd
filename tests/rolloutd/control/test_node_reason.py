"""What is said of a node that is at work and does not get on."""

from __future__ import annotations

from dataclasses import replace

from machines.model.events import StepAction, StepRecord, StepState
from machines.model.node import NodeHealth, Observation
from machines.states import Trigger
from rolloutd.control.serializers import node_reason
from rolloutd.engine.state import StepProgress
from rolloutd.reason_text import describe, lifted_by
from tests.machines.builders import T0, admit, index_of, nodes_of, submit, transition

HELD = "payments/api-7d9 is held by budget payments/api: needs 3 healthy, has 3"
WAITS = StepRecord(
    "R", "n1", 1, "isolate.0.kubernetes", StepAction.APPLY, 1, StepState.BUSY, at=T0, began_at=T0, text=HELD
)


def test_a_node_at_work_says_what_it_waits_for_and_what_ends_that() -> None:
    index = index_of(nodes_of({"a": ["n1"]}))
    submit(index)
    admit(index, "n1")
    assert node_reason(index, index.target("R", "n1"), None, StepProgress()) is None

    isolating = node_reason(index, index.target("R", "n1"), None, StepProgress(first_busy=WAITS))
    assert isolating is not None
    assert describe(isolating) == HELD
    assert "the isolation is aborted and tried later" in lifted_by(isolating)

    transition(index, "n1", Trigger.ISOLATED)
    maintaining = node_reason(index, index.target("R", "n1"), None, StepProgress(first_busy=WAITS))
    assert maintaining is not None
    assert lifted_by(maintaining) == ""


def test_node_that_cannot_return_says_why() -> None:
    index = index_of(nodes_of({"a": ["n1"]}))
    submit(index)
    admit(index, "n1")
    waits = replace(WAITS, action=StepAction.REVERT, text="lb1 does not answer")
    found = node_reason(index, index.target("R", "n1"), None, StepProgress(first_busy=waits))
    assert found is not None
    assert (found.code, found.remedy) == ("not-returned-yet", None)
    assert describe(found) == "n1 cannot return to service yet: lb1 does not answer"


def test_repeated_check_shows_result_and_deadline() -> None:
    index = index_of(nodes_of({"a": ["n1"]}))
    submit(index)
    admit(index, "n1")
    transition(index, "n1", Trigger.ISOLATED)
    transition(index, "n1", Trigger.MAINTAINED)
    live = StepProgress(
        step="verify.0.kubernetes",
        failing_check="the pod of DaemonSet a/b is not back",
        failing_check_until=T0 + 60.0,
    )
    found = node_reason(index, index.target("R", "n1"), None, live)
    assert found is not None
    assert describe(found) == "verify.0.kubernetes has not passed yet: the pod of DaemonSet a/b is not back"
    assert "it may take until" in lifted_by(found)


def test_a_node_at_work_that_nobody_can_see_says_why() -> None:
    index = index_of(nodes_of({"a": ["n1"]}))
    submit(index)
    admit(index, "n1")
    index.record_observations(
        [Observation("n1", NodeHealth.UNKNOWN, T0 + 1.0, "cluster ams does not answer")], T0 + 1.0
    )
    found = node_reason(index, index.target("R", "n1"), None, StepProgress())
    assert found is not None
    assert describe(found) == "n1 could not be observed: cluster ams does not answer"
