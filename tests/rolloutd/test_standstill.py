"""What is said of a node that is at work and does not get on."""

from __future__ import annotations

from machines.events import StepAction, StepRecord, StepState
from machines.node import Observation, Sight
from machines.states import Trigger
from rolloutd.control.standstill import standstill
from rolloutd.state import Live
from tests.machines.worlds import T0, admit, index_of, move, nodes_of, submit

HELD = "payments/api-7d9 is held by budget payments/api: needs 3 healthy, has 3"
WAITS = StepRecord(
    "R", "n1", 1, "isolate.0.kubernetes", StepAction.DO, 1, StepState.BUSY, at=T0, began_at=T0, text=HELD
)


def test_a_node_at_work_says_what_it_waits_for_and_what_ends_that() -> None:
    index = index_of(nodes_of({"a": ["n1"]}))
    submit(index)
    admit(index, "n1")
    assert standstill(index, index.target("R", "n1"), None, Live()) is None

    isolating = standstill(index, index.target("R", "n1"), None, Live(waits=WAITS))
    assert isolating is not None
    assert isolating.text == HELD
    assert "it is put back and tried later" in isolating.lifted_by

    move(index, "n1", Trigger.ISOLATED)
    maintaining = standstill(index, index.target("R", "n1"), None, Live(waits=WAITS))
    assert maintaining is not None
    assert maintaining.lifted_by == ""


def test_a_node_whose_check_is_asked_again_says_what_it_said_and_how_long_it_may_take() -> None:
    index = index_of(nodes_of({"a": ["n1"]}))
    submit(index)
    admit(index, "n1")
    move(index, "n1", Trigger.ISOLATED)
    move(index, "n1", Trigger.MAINTAINED)
    live = Live(step="verify.0.kubernetes", red="the pod of DaemonSet a/b is not back", red_until=T0 + 60.0)
    found = standstill(index, index.target("R", "n1"), None, live)
    assert found is not None
    assert found.text == "verify.0.kubernetes has not passed yet: the pod of DaemonSet a/b is not back"
    assert "it may take until" in found.lifted_by


def test_a_node_at_work_that_nobody_can_see_says_why() -> None:
    index = index_of(nodes_of({"a": ["n1"]}))
    submit(index)
    admit(index, "n1")
    index.observed([Observation("n1", Sight.UNKNOWN, T0 + 1.0, "cluster ams does not answer")], T0 + 1.0)
    found = standstill(index, index.target("R", "n1"), None, Live())
    assert found is not None
    assert found.text == "n1 could not be judged: cluster ams does not answer"
