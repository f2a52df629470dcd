"""Who works on a node: which kinds of work share it, and what every start is told."""

from __future__ import annotations

import itertools
import math

import pytest

from machines.facts.node_work import WAITS_FOR, NodeWork, WorkKind, conflicting_work, conflicts, work_on
from machines.facts.projection import Projection
from machines.invariants.violations import violation
from machines.model.decision import Admit, BackOff
from machines.model.events import HoldTaken, PreparationRecorded
from machines.model.limits import Limits
from machines.model.preparation import Preparation, PreparationState
from machines.model.reasons import RemedyKind
from machines.model.rollout import Hold
from machines.rules.node_claims import work_blocker, work_reason
from machines.scheduler.checks import is_at_work
from machines.scheduler.decide import decide
from machines.states import Trigger
from machines.workflow import phase_transitions
from tests.machines.builders import (
    ALICE,
    T0,
    fail,
    finish,
    index_of,
    nodes_of,
    observed_up,
    reason_of,
    submit,
    transition,
)
from tests.machines.test_preparing import INSTALL, due, prepared_fleet
from tests.support.mutation import Mutant

MAY_SHARE = {
    frozenset(pair)
    for pair in (
        (WorkKind.CHECKS, WorkKind.CHECKS),
        (WorkKind.CHECKS, WorkKind.CHECK_MODE),
        (WorkKind.CHECKS, WorkKind.HOLD),
        (WorkKind.CHECKS, WorkKind.RELEASE),
        (WorkKind.CHECK_MODE, WorkKind.HOLD),
        (WorkKind.CHECK_MODE, WorkKind.RELEASE),
        (WorkKind.STAGE, WorkKind.RELEASE),
        (WorkKind.CLEANING, WorkKind.RELEASE),
        (WorkKind.KEPT_DOWN, WorkKind.HOLD),
    )
}
"""The pairs of which neither waits, whichever came first."""

BESIDE = {
    (WorkKind.ATTEMPT, WorkKind.CHECKS),
    (WorkKind.STAGE, WorkKind.CHECKS),
    (WorkKind.RELEASE, WorkKind.HOLD),
}
"""Work that may begin beside the other, which would have waited for it."""

IN_MEMORY = (WorkKind.CHECKS, WorkKind.CHECK_MODE, WorkKind.CLEANING, WorkKind.RELEASE)


def fleet() -> Projection:
    index = index_of(nodes_of({"t": ["n1", "n2"]}), Limits(pools={}))
    submit(index, max_parallel=9)
    index.record_observations(observed_up(index.nodes, T0), T0)
    return index


def began(rollout: str, node: str) -> PreparationRecorded:
    row = Preparation(rollout, node, "install", 1, PreparationState.RUNNING, "", T0, T0)
    return PreparationRecorded(row)


def begin(index: Projection, kind: WorkKind) -> None:
    """Let work of the kind begin on n1, for another rollout than R."""
    if kind in IN_MEMORY:
        index.record_work(NodeWork(kind, "n1"))
        return
    if kind is WorkKind.HOLD:
        index.apply(HoldTaken(Hold("n1", "kured", "1", ALICE, "reboot", T0)))
        return
    submit(index, "S", prepare=(INSTALL,))
    if kind is WorkKind.STAGE:
        index.apply(began("S", "n1"))
    elif kind is WorkKind.ATTEMPT:
        transition(index, "n1", Trigger.ADMITTED, rollout="S")
    else:
        fail(index, "n1", rollout="S")


@pytest.mark.parametrize("kind", WorkKind)
def test_work_is_listed_while_it_lasts(kind: WorkKind) -> None:
    index = fleet()
    assert list(work_on(index, "n1", T0)) == []
    begin(index, kind)
    (work,) = work_on(index, "n1", T0)
    assert work.kind is kind


@pytest.mark.parametrize(
    ("wanted", "present"), list(itertools.product(WorkKind, WorkKind)), ids=lambda each: each.value
)
def test_pair_shares_a_node_only_where_the_table_says_so(wanted: WorkKind, present: WorkKind) -> None:
    if wanted is WorkKind.KEPT_DOWN:
        assert wanted not in WAITS_FOR, "it begins with the end of an attempt"
        return
    index = fleet()
    begin(index, present)
    shares = frozenset((wanted, present)) in MAY_SHARE or (wanted, present) in BESIDE
    found = conflicting_work(index, wanted, "n1", T0, "R")
    assert (found is None) is shares
    reason = work_blocker(index, wanted, "n1", T0, "R")
    assert (reason is None) is shares
    assert conflicting_work(index, wanted, "n2", T0, "R") is None


def test_node_that_was_left_is_returned_after_other_work() -> None:
    index = fleet()
    left = Hold("n1", "left", "S/n1", ALICE, "examine it", T0)
    reason = work_reason(index, NodeWork(WorkKind.HOLD, "n1", cause=left))
    assert reason.remedy is not None
    assert reason.remedy.kind is RemedyKind.RETURN
    transition(index, "n1", Trigger.ADMITTED)
    reason = work_reason(index, NodeWork(WorkKind.HOLD, "n1", cause=left))
    assert reason.remedy is not None
    assert (reason.remedy.kind, reason.remedy.args["rollout"]) == (RemedyKind.WAIT_FOR_ROLLOUT, "R")


@pytest.mark.parametrize("present", sorted(WAITS_FOR[WorkKind.ATTEMPT]))
def test_node_with_other_work_is_not_admitted(present: WorkKind) -> None:
    index = fleet()
    assert "n1" in [each.node for each in decide(index, T0).of(Admit)]
    begin(index, present)
    assert "n1" not in [each.node for each in decide(index, T0).of(Admit)]
    reason = reason_of(index, "R", "n1", T0)
    assert reason.remedy is not None
    admitted = phase_transitions.transition(index.target("R", "n1"), Trigger.ADMITTED, T0)
    assert violation(index, admitted, T0) is not None


def test_planted_attempt_beside_release_is_detected() -> None:
    planted = Mutant(
        "attempt-begun-beside-release",
        conflicts,
        "work.kind not in WAITS_FOR[wanted]",
        "work.kind not in WAITS_FOR[wanted] or (wanted, work.kind) == ('attempt', 'releasing')",
    )
    with planted.applied(), pytest.raises(AssertionError):
        test_node_with_other_work_is_not_admitted(WorkKind.RELEASE)


@pytest.mark.parametrize("present", sorted(WAITS_FOR[WorkKind.STAGE] & set(IN_MEMORY)))
def test_node_with_other_work_is_not_prepared(present: WorkKind) -> None:
    index = prepared_fleet(INSTALL)
    assert due(index) == [("n1", "install")]
    work = NodeWork(present, "n1")
    index.record_work(work)
    assert ("n1", "install") not in due(index)
    assert present.value in str(violation(index, began("R", "n1"), T0))
    index.end_work(work)
    assert due(index) == [("n1", "install")]


def test_end_of_work_makes_what_waited_ready() -> None:
    index = fleet()
    work = NodeWork(WorkKind.CLEANING, "n1")
    index.record_work(work)
    ready = index.pending_groups.ready("R", "fleet")
    index.record_backoffs([BackOff(group, math.inf) for _, group in ready])
    assert not index.pending_groups.ready("R", "fleet")
    index.end_work(work)
    assert index.pending_groups.ready("R", "fleet")
    assert not list(index.recorded_work("n1"))


def test_one_of_two_equal_checks_ends_alone() -> None:
    index = fleet()
    first, second = NodeWork(WorkKind.CHECKS, "n1"), NodeWork(WorkKind.CHECKS, "n1")
    index.record_work(first)
    index.record_work(second)
    index.end_work(first)
    assert [each is second for each in index.recorded_work("n1")] == [True]


def test_fork_has_its_own_work() -> None:
    index = fleet()
    other = index.fork()
    index.record_work(NodeWork(WorkKind.CLEANING, "n1"))
    assert not list(other.recorded_work("n1"))
    assert list(index.rebuilt(index.snapshot()).recorded_work("n1"))


def test_expired_hold_is_no_work() -> None:
    index = fleet()
    index.apply(HoldTaken(Hold("n1", "kured", "1", ALICE, "reboot", T0, until=T0 + 5.0)))
    assert [each.kind for each in work_on(index, "n1", T0 + 4.0)] == [WorkKind.HOLD]
    assert not list(work_on(index, "n1", T0 + 5.0))


def test_two_rollouts_that_failed_in_service_do_not_wait_for_each_other() -> None:
    index = fleet()
    submit(index, "S")
    for rollout in ("R", "S"):
        finish(index, "n1", rollout=rollout)
    for rollout in ("R", "S"):
        moved = phase_transitions.transition(
            index.target(rollout, "n1"), Trigger.SOAK_CHECK_FAILED, T0, step="verify", text="gone"
        )
        index.apply(moved)
    assert [work.rollout for work in work_on(index, "n1", T0)] == ["R", "S"]
    assert conflicting_work(index, WorkKind.ATTEMPT, "n1", T0, "R") is None
    assert is_at_work(index, "n1")


def test_node_that_failed_isolated_is_waited_for() -> None:
    index = fleet()
    submit(index, "S")
    fail(index, "n1", rollout="R")
    fail(index, "n1", rollout="S")
    found = conflicting_work(index, WorkKind.ATTEMPT, "n1", T0, "R")
    assert found is not None
    assert (found.kind, found.rollout) == (WorkKind.KEPT_DOWN, "S")
