"""Checks of nodes in service: which nodes a decision names, and when their next round begins."""

from __future__ import annotations

import math

import pytest

from machines.facts.projection import Projection
from machines.model.decision import CheckDrift, CheckRounds, CheckSoaking, NextRound, Release
from machines.model.events import HoldTaken
from machines.model.limits import Limits
from machines.model.node import NodeHealth, Observation
from machines.model.reasons import ReasonCode
from machines.model.rollout import Hold
from machines.rules.releases import release_blocker
from machines.scheduler.checks import DRIFT_LOOK_S, SOAK_ROUND_S
from machines.scheduler.decide import decide
from machines.states import Outcome, Trigger
from tests.machines.builders import (
    ALICE,
    CANARY_THEN_FLEET,
    T0,
    admit,
    index_of,
    nodes_of,
    submit,
    transition,
)

EVERY_S = 3600.0


def change(index: Projection, node: str) -> None:
    admit(index, node)
    transition(index, node, Trigger.ISOLATED)
    transition(index, node, Trigger.MAINTAINED)
    transition(index, node, Trigger.VERIFIED, Outcome.CHANGED)


def soaking_fleet() -> Projection:
    index = index_of(nodes_of({"a": ("n1", "n2")}))
    submit(index, waves=CANARY_THEN_FLEET)
    change(index, "n1")
    return index


def test_soaking_node_is_checked_once_in_a_round() -> None:
    index = soaking_fleet()
    decision = decide(index, T0)
    assert decision.of(CheckSoaking) == (CheckSoaking("R", "n1"),)
    assert decision.of(NextRound) == (NextRound("R", CheckRounds.SOAK, T0 + SOAK_ROUND_S),)
    index.record_next_round(decision.of(NextRound)[0])
    between = decide(index, T0 + 1.0)
    assert (between.of(CheckSoaking), between.wake_at) == ((), T0 + SOAK_ROUND_S)
    assert decide(index, T0 + SOAK_ROUND_S).of(CheckSoaking) == (CheckSoaking("R", "n1"),)
    assert decide(index, T0 + 600.0).of(CheckSoaking) == (), "its soak has ended"


@pytest.mark.parametrize(("at", "is_checked"), [(T0 + 86_400.0, True), (math.inf, False)])
def test_round_after_clock_was_set_back_begins_now(at: float, is_checked: bool) -> None:
    index = soaking_fleet()
    index.record_next_round(NextRound("R", CheckRounds.SOAK, at))
    assert bool(decide(index, T0 + 1.0).of(CheckSoaking)) is is_checked


def test_drift_is_checked_of_nodes_changed_long_ago() -> None:
    index = index_of(nodes_of({"a": ("n1", "n2")}))
    submit(index, drift_every_s=EVERY_S)
    change(index, "n1")
    early = decide(index, T0 + 60.0)
    assert early.of(CheckDrift) == ()
    assert early.of(NextRound) == (NextRound("R", CheckRounds.DRIFT, T0 + 60.0 + DRIFT_LOOK_S),)
    due = decide(index, T0 + EVERY_S)
    assert due.of(CheckDrift) == (CheckDrift("R", ("n1",)),)
    index.record_next_round(due.of(NextRound)[0])
    assert decide(index, T0 + EVERY_S + 120.0).of(CheckDrift) == ()
    assert decide(index, T0 + 2 * EVERY_S).of(CheckDrift) == (CheckDrift("R", ("n1",)),)


def left_out_of_service(limits: Limits | None = None) -> tuple[Projection, Observation]:
    index = index_of(nodes_of({"a": ("n1",)}), limits or Limits())
    left = Observation("n1", NodeHealth.UP, T0, cordoned_by_other=True, left_isolated_by="kubernetes")
    index.record_observations([left], T0)
    return index, left


def test_node_left_for_a_hold_returns_after_it() -> None:
    index, left = left_out_of_service()
    assert decide(index, T0).of(Release) == (Release("n1"),)
    index.apply(HoldTaken(Hold("n1", "person", "alice", ALICE, "disk", T0, T0 + 50.0)))
    assert decide(index, T0 + 1.0).of(Release) == ()
    reason = release_blocker(index, left, T0 + 1.0)
    assert reason is not None
    assert reason.code is ReasonCode.HELD
    assert decide(index, T0 + 50.0).of(Release) == (Release("n1"),)


def test_nothing_returns_while_daemon_only_observes() -> None:
    index, left = left_out_of_service(Limits(observe_only=True))
    reason = release_blocker(index, left, T0)
    assert reason is not None
    assert reason.code is ReasonCode.OBSERVE_ONLY
    assert decide(index, T0).of(Release) == ()
