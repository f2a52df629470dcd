"""The three records of a node after each transition: current, previous, invalid."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machines.facts.apply import apply_to_target
from machines.model.configuration import NodeConfiguration
from machines.model.events import StepRecorded
from machines.model.rollout import FailureCode, Target
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.states import Outcome, Phase, Trigger
from machines.workflow.phase_transitions import transition

PASSED = (Trigger.VERIFIED, Outcome.CHANGED)
ROLLED_BACK = (Trigger.VERIFIED, Outcome.ROLLED_BACK)


class Node:
    """One node on its way through rollouts, and its records."""

    def __init__(self) -> None:
        self.records = NodeConfiguration()
        self.at = 0.0

    def begin(self, rollout: str, content: str) -> None:
        """Admit the node and begin its run."""
        self.target = Target(rollout, "n1", None, (), "fleet", 0)
        self.move(Trigger.ADMITTED)
        self.give(content)

    def give(self, content: str) -> None:
        """Isolate the node, and let a run give it this content; "" for a rollback."""
        self.move(Trigger.ISOLATED)
        record = StepRecord(
            self.target.rollout, "n1", 1, "run.a", StepAction.RUN, 1, StepState.INTENDED, self.at, self.at
        )
        self.target = apply_to_target(self.target, StepRecorded(record, content=content))
        self.move(Trigger.MAINTAINED)

    def move(
        self, trigger: Trigger, outcome: Outcome | None = None, code: FailureCode = FailureCode.FAILED
    ) -> None:
        self.at += 1
        event = transition(
            self.target, trigger, self.at, outcome=outcome, step="verify.0", text="no", code=code
        )
        self.records = self.records.after(self.target, event)
        self.target = apply_to_target(self.target, event)

    def contents(self) -> tuple[str | None, str | None, str | None]:
        records = (self.records.current, self.records.previous, self.records.invalid)
        current, previous, invalid = (None if each is None else each.content for each in records)
        return current, previous, invalid


@pytest.fixture
def node() -> Node:
    """Return a node on which A and then B have passed."""
    node = Node()
    for rollout, content in (("r1", "A"), ("r2", "B")):
        node.begin(rollout, content)
        node.move(*PASSED)
    return node


def test_next_content_pushes_the_current_one_back(node: Node) -> None:
    assert node.contents() == ("B", "A", None)
    node.begin("r3", "C")
    assert node.contents() == ("B", "A", None)
    node.move(*PASSED)
    assert node.contents() == ("C", "B", None)
    assert node.records.current is not None
    assert (node.records.current.rollout, node.records.current.at) == ("r3", node.at)


def test_same_content_again_keeps_the_previous_one(node: Node) -> None:
    node.begin("r3", "B")
    node.move(*PASSED)
    assert node.contents() == ("B", "A", None)


def test_failed_content_is_invalid_until_it_passes(node: Node) -> None:
    node.begin("r3", "C")
    node.move(Trigger.FAILED)
    assert node.contents() == ("B", "A", "C")
    assert node.records.invalid is not None
    assert (node.records.invalid.step, node.records.invalid.text) == ("verify.0", "no")
    node.move(Trigger.RETRIED)
    node.move(Trigger.ADMITTED)
    assert node.target.content == ""
    node.give("C")
    node.move(*PASSED)
    assert node.contents() == ("C", "B", None)


@pytest.mark.parametrize("code", sorted(set(FailureCode) - {FailureCode.FAILED, FailureCode.RESTORED_ITSELF}))
def test_failure_of_the_surroundings_marks_nothing_invalid(node: Node, code: FailureCode) -> None:
    node.begin("r3", "C")
    node.move(Trigger.FAILED, code=code)
    assert node.contents() == ("B", "A", None)


def test_failure_before_the_run_marks_nothing_invalid(node: Node) -> None:
    node.target = Target("r3", "n1", None, (), "fleet", 0)
    node.move(Trigger.ADMITTED)
    node.move(Trigger.FAILED)
    assert node.contents() == ("B", "A", None)


def test_rollback_of_a_failed_node_keeps_the_current_one(node: Node) -> None:
    node.begin("r3", "C")
    node.move(Trigger.FAILED)
    node.move(Trigger.ROLLBACK_ORDERED)
    node.give("")
    node.move(*ROLLED_BACK)
    assert node.contents() == ("B", "A", "C")


def test_rollback_of_a_done_node_restores_the_previous_record(node: Node) -> None:
    node.move(Trigger.ROLLBACK_ORDERED)
    node.give("")
    node.move(*ROLLED_BACK)
    assert node.contents() == ("A", None, None)


@pytest.mark.parametrize("order", [(("r2", "A"), ("r1", None)), (("r1", "B"), ("r2", None))])
def test_rollback_of_two_rollouts_restores_nothing_that_was_taken_off(
    node: Node, order: tuple[tuple[str, str | None], ...]
) -> None:
    for rollout, left in order:
        node.target = replace(node.target, rollout=rollout, phase=Phase.DONE, outcome=Outcome.CHANGED)
        node.move(Trigger.ROLLBACK_ORDERED)
        node.give("")
        node.move(*ROLLED_BACK)
        assert node.contents() == (left, None, None)


def test_rollback_removes_every_content_of_its_rollout(node: Node) -> None:
    node.begin("r2", "C")
    node.move(*PASSED)
    node.move(Trigger.ROLLBACK_ORDERED)
    node.give("")
    node.move(*ROLLED_BACK)
    assert node.contents() == (None, None, None), "what the rollout replaced is not known any more"


def test_failed_soak_makes_the_previous_one_current(node: Node) -> None:
    node.move(Trigger.SOAK_CHECK_FAILED)
    assert node.contents() == ("A", None, "B")
    node.move(Trigger.ROLLBACK_ORDERED)
    node.give("")
    node.move(*ROLLED_BACK)
    assert node.contents() == ("A", None, "B")
