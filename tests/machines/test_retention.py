"""What rollouts left may go once they decide nothing more."""

from __future__ import annotations

from machines.model.events import RolloutCancelled
from machines.model.rollout import DAEMON, Failure
from machines.rules.retention import is_at_rest, is_forgettable, unfinished_rollout
from machines.states import Trigger
from tests.machines.builders import T0, finish, index_of, nodes_of, submit, transition


def test_rollout_that_only_finds_drift_is_at_rest() -> None:
    index = index_of(nodes_of({"a": ("n1",)}))
    submit(index, drift_every_s=3600.0)
    assert not is_at_rest(index, "R"), "its node is pending"
    finish(index, "n1", at=T0)
    assert is_at_rest(index, "R")
    failure = Failure("n1#1", "n1", 1, "soak.verify", "gone", T0)
    transition(index, "n1", Trigger.SOAK_CHECK_FAILED, failure=failure)
    assert not is_at_rest(index, "R"), "people decide about its failure"


def test_closed_rollout_is_forgotten_and_its_nodes_are_free() -> None:
    index = index_of(nodes_of({"a": ("n1",)}))
    submit(index)
    assert unfinished_rollout(index, "n1") == "R"
    index.apply(RolloutCancelled("R", DAEMON, "because", T0))
    assert unfinished_rollout(index, "n1") is None
    assert (is_forgettable(index, "R", T0 - 1.0), is_forgettable(index, "R", T0)) == (False, True)
