"""Rollbacks that the plan or a person ordered: which nodes, in which order, within which budgets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from machines.facts.availability import failure_remedy
from machines.facts.projection import Projection
from machines.invariants.violations import violation
from machines.model.decision import Admit, EndRollout, Observe, Requeue, RollBack
from machines.model.events import (
    DriftRecorded,
    NodeOrdered,
    NodesDiscovered,
    NodesRemoved,
    RolloutCancelled,
    RolloutEnded,
    RolloutPaused,
)
from machines.model.limits import DiskShortage, Limits, PoolRule
from machines.model.node import Conflict, ConflictKind
from machines.model.plan import GateName, MaintainStage, OnFailure, WaveDef
from machines.model.reasons import ReasonCode, RemedyKind
from machines.model.rollout import FailureCode, NodeOrder
from machines.rules.rollbacks import due_rollbacks
from machines.scheduler.decide import decide
from machines.scheduler.decision_builder import DecisionBuilder
from machines.scheduler.membership import membership_events
from machines.scheduler.rollback_admission import admit_rollbacks
from machines.scheduler.why import why
from machines.states import Outcome, Phase, Trigger
from machines.workflow.phase_transitions import transition as moved
from rolloutd.texts.cause_text import describe_causes
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
    vote,
)

UNDO = (MaintainStage("rollback", "undo.yml"),)
WAVES = (WaveDef("canary", gate=GateName.CONTINUE), WaveDef("fleet"))


def fleet(on_failure: OnFailure = OnFailure.ROLLBACK_WAVE, *, done: int = 4, **changed: Any) -> Projection:
    """Return six nodes without a shared pool; `done` of them are changed, one instant after the other."""
    index = index_of(nodes_of({"t": [f"n{number}" for number in range(1, 7)]}), Limits(pools={}))
    values = {"rollback": UNDO, "on_failure": on_failure, "max_parallel": 10} | changed
    submit(index, **values)
    for number in range(1, done + 1):
        finish(index, f"n{number}", at=T0 + number)
    return index


def begun(index: Projection, at: float = T0 + 60.0) -> list[str]:
    index.record_observations(observed_up(index.nodes, at), at)
    return [each.node for each in decide(index, at).of(RollBack)]


def due(index: Projection) -> list[str]:
    return [each.node for each in due_rollbacks(index, index.rollout("R")).targets]


def roll_back(index: Projection, node: str, at: float = T0 + 70.0) -> None:
    if index.target("R", node).phase in (Phase.DONE, Phase.FAILED):
        transition(index, node, Trigger.ROLLBACK_ORDERED, at=at, rolling_back=True)
    for trigger in (Trigger.ISOLATED, Trigger.MAINTAINED):
        transition(index, node, trigger, at=at, rolling_back=True)
    transition(index, node, Trigger.VERIFIED, Outcome.ROLLED_BACK, at=at, isolated=False)


def order(index: Projection, *nodes: str) -> None:
    for node in nodes:
        index.apply(NodeOrdered("R", node, NodeOrder.ROLLBACK, ALICE, "because", T0 + 50.0))


def test_changed_nodes_of_wave_rolled_back_newest_first() -> None:
    index = fleet()
    fail(index, "n5", at=T0 + 5)
    assert begun(index) == ["n5", "n4", "n3", "n2", "n1"]


def test_plan_that_pauses_rolls_nothing_back() -> None:
    index = fleet(OnFailure.PAUSE)
    fail(index, "n5", at=T0 + 5)
    assert begun(index) == []
    assert why(index, index.rollout("R"), T0 + 60.0).code is ReasonCode.NODE_FAILED  # type: ignore[union-attr]


def test_rollback_node_takes_back_only_failed_node() -> None:
    index = fleet(OnFailure.ROLLBACK_NODE)
    fail(index, "n5", at=T0 + 5)
    assert begun(index) == ["n5"]
    roll_back(index, "n5")
    assert begun(index, T0 + 80.0) == []
    assert why(index, index.rollout("R"), T0 + 80.0).code is ReasonCode.NODE_FAILED  # type: ignore[union-attr]


def test_rollback_all_takes_canaries_last() -> None:
    index = fleet(OnFailure.ROLLBACK_ALL, waves=WAVES, done=0)
    assert index.target("R", "n1").wave == "canary"
    finish(index, "n2", at=T0 + 1)
    finish(index, "n1", at=T0 + 5)
    fail(index, "n3", at=T0 + 9)
    assert begun(index) == ["n3", "n2", "n1"]


def test_rollout_admits_nothing_while_rollback_begins() -> None:
    index = fleet()
    assert decide(index, T0 + 60.0).of(Admit) == ()
    index.record_observations(observed_up(index.nodes, T0 + 60.0), T0 + 60.0)
    assert [each.node for each in decide(index, T0 + 60.0).of(Admit)] == ["n5", "n6"]
    order(index, "n1")
    decision = decide(index, T0 + 60.0)
    assert [each.node for each in decision.of(RollBack)] == ["n1"]
    # Of a canary, it would be decided as if its wave were still done.
    assert decision.of(Admit) == ()


@pytest.mark.parametrize(
    "code", [FailureCode.NEVER_STARTED, FailureCode.UNREACHABLE, FailureCode.INTERFERENCE]
)
def test_failure_that_blames_no_change_rolls_nothing_back(code: FailureCode) -> None:
    index = fleet()
    fail(index, "n5", at=T0 + 5)
    rollout = index.rollout("R")
    index._rollouts["R"] = replace(rollout, failures=(replace(rollout.failures[0], code=code),))
    index._unresolved_failures.clear()
    index.due_rollbacks.clear()
    assert begun(index) == []


def test_budget_of_pool_limits_rollbacks_in_order() -> None:
    index = index_of(
        nodes_of({"t": ["n1", "n2", "n3"], "u": ["m1", "m2"]}), Limits(pools={"team": PoolRule()})
    )
    submit(index, rollback=UNDO, on_failure=OnFailure.ROLLBACK_ALL, max_parallel=9)
    for number, node in enumerate(("n1", "m1", "n2", "m2"), 1):
        finish(index, node, at=T0 + number)
    fail(index, "n3", at=T0 + 5)
    assert begun(index) == ["n3", "m2"], "n3 holds the slot of its pool"
    for node in ("n3", "m2"):
        roll_back(index, node)
    assert begun(index, T0 + 80.0) == ["n2", "m1"]
    assert reason_of(index, "R", "n1", T0 + 80.0).code is ReasonCode.ROLLBACK_QUEUED


def test_unobserved_node_without_slot_names_who_has_the_slot() -> None:
    index = index_of(nodes_of({"t": ["n1", "n2"]}), Limits(pools={"team": PoolRule()}))
    submit(index, rollback=UNDO, on_failure=OnFailure.PAUSE, max_parallel=9)
    finish(index, "n1", at=T0 + 1)
    fail(index, "n2", at=T0 + 2)
    order(index, "n1")
    later = T0 + 4 * index.limits.observe_within_s
    assert decide(index, later).of(Observe) == ()
    assert reason_of(index, "R", "n1", later).code is ReasonCode.POOL_FULL


def test_node_without_capacity_says_so() -> None:
    index = fleet(max_parallel=1)
    fail(index, "n5", at=T0 + 5)
    transition(index, "n5", Trigger.ROLLBACK_ORDERED, at=T0 + 60.0, rolling_back=True)
    assert begun(index, T0 + 61.0) == []
    assert reason_of(index, "R", "n4", T0 + 61.0).code is ReasonCode.MAX_PARALLEL
    index.record_disk_shortage(DiskShortage(1, 2, T0 + 62.0))
    assert reason_of(index, "R", "n4", T0 + 62.0).code is ReasonCode.DISK_FULL


def test_work_on_nodes_in_flight_keeps_what_is_due() -> None:
    index = fleet()
    fail(index, "n5", at=T0 + 5)
    transition(index, "n5", Trigger.ROLLBACK_ORDERED, at=T0 + 60.0, rolling_back=True)
    found = due_rollbacks(index, index.rollout("R"))
    for trigger in (Trigger.ISOLATED, Trigger.MAINTAINED):
        transition(index, "n5", trigger, at=T0 + 61.0, rolling_back=True)
    assert due_rollbacks(index, index.rollout("R")) is found
    transition(index, "n4", Trigger.ROLLBACK_ORDERED, at=T0 + 62.0, rolling_back=True)
    assert due(index) == ["n3", "n2", "n1"]


def test_full_rollout_asks_nothing_of_its_nodes() -> None:
    index = fleet(max_parallel=1)
    fail(index, "n5", at=T0 + 5)
    transition(index, "n5", Trigger.ROLLBACK_ORDERED, at=T0 + 60.0, rolling_back=True)
    builder = DecisionBuilder()
    admit_rollbacks(index, index.rollout("R"), T0 + 61.0, builder)
    assert (builder.nodes_to_observe, index.due_rollbacks) == ({}, {})


def test_at_most_leaves_rest_to_people() -> None:
    index = fleet(at_most=2)
    fail(index, "n5", at=T0 + 5)
    assert begun(index) == ["n5", "n4"]
    roll_back(index, "n5")
    roll_back(index, "n4")
    assert begun(index, T0 + 80.0) == []
    reason = why(index, index.rollout("R"), T0 + 80.0)
    assert reason is not None
    assert (reason.code, reason.params["left"], reason.remedy.args["nodes"]) == (  # type: ignore[union-attr]
        ReasonCode.ROLLBACK_LIMIT,
        3,
        "n3 n2 n1",
    )
    order(index, "n3")
    assert begun(index, T0 + 80.0) == ["n3"]


@pytest.mark.parametrize(
    ("on_failure", "suggested"),
    [
        (OnFailure.ROLLBACK_WAVE, (RemedyKind.ROLL_BACK, "n4 n3 n2")),
        (OnFailure.ROLLBACK_NODE, (RemedyKind.PIN_IDENTITY, None)),
    ],
)
def test_refused_rollback_of_quarantined_node_is_not_suggested(
    on_failure: OnFailure, suggested: tuple[RemedyKind, str | None]
) -> None:
    index = fleet(on_failure, at_most=1)
    for node in ("n5", "n6"):
        fail(index, node, at=T0 + 5)
    roll_back(index, "n6")
    conflict = Conflict(ConflictKind.REMOVED_IN_FLIGHT, "hosts", {"hosts": "n5"}, T0)
    index.apply(NodesDiscovered((replace(index.nodes["n5"], conflicts=(conflict,)),)))
    assert "n5" in [each.node for each in due_rollbacks(index, index.rollout("R")).beyond_limit]
    reason = why(index, index.rollout("R"), T0 + 80.0)
    assert reason is not None
    assert reason.remedy is not None
    assert (reason.remedy.kind, reason.remedy.args.get("nodes")) == suggested


def test_drifted_node_beyond_at_most_is_left_to_people() -> None:
    index = fleet(at_most=1, keep=True)
    fail(index, "n5", at=T0 + 5)
    index.apply(DriftRecorded("R", "n1", T0 + 6, ("set the limit",)))
    assert "n1" in [each.node for each in due_rollbacks(index, index.rollout("R")).beyond_limit]
    assert decide(index, T0 + 60.0).of(Requeue) == (), "a rollback of a requeued node is refused"


def test_node_that_leaves_in_rollback_counts_to_at_most() -> None:
    index = fleet(at_most=1)
    fail(index, "n5", at=T0 + 5)
    index.apply(moved(index.target("R", "n5"), Trigger.ROLLBACK_ORDERED, T0 + 61.0))
    index.apply(NodesRemoved(("n5",)))
    index.apply(membership_events(index, T0 + 62.0, describe_causes)[0])
    assert begun(index, T0 + 80.0) == []
    reason = why(index, index.rollout("R"), T0 + 80.0)
    assert reason is not None
    assert reason.code is ReasonCode.ROLLBACK_LIMIT


def test_failed_rollback_stops_automatic_ones_after_its_node_left() -> None:
    index = fleet()
    fail(index, "n5", at=T0 + 5)
    index.apply(moved(index.target("R", "n5"), Trigger.ROLLBACK_ORDERED, T0 + 61.0))
    index.apply(moved(index.target("R", "n5"), Trigger.FAILED, T0 + 62.0, step="run.rollback", text="exit 2"))
    index.apply(NodesRemoved(("n5",)))
    index.apply(membership_events(index, T0 + 63.0, describe_causes)[0])
    assert begun(index, T0 + 80.0) == []
    reason = why(index, index.rollout("R"), T0 + 80.0)
    assert reason is not None
    assert (reason.code, reason.remedy.kind) == (ReasonCode.NODE_FAILED, RemedyKind.APPROVE)  # type: ignore[union-attr]
    order(index, "n2")
    assert begun(index, T0 + 80.0) == ["n2"], "people decide about each"


def test_failed_rollback_stops_all_others() -> None:
    index = fleet(max_parallel=1)
    fail(index, "n5", at=T0 + 5)
    order(index, "n1")
    transition(index, "n5", Trigger.ROLLBACK_ORDERED, at=T0 + 61.0, rolling_back=True)
    failed = moved(index.target("R", "n5"), Trigger.FAILED, T0 + 62.0, step="run.rollback", text="exit 2")
    index.apply(failed)
    assert begun(index, T0 + 70.0) == []
    reason = why(index, index.rollout("R"), T0 + 70.0)
    assert reason is not None
    assert (reason.code, reason.subject) == (ReasonCode.ROLLBACK_FAILED, "n5")
    assert reason_of(index, "R", "n1", T0 + 70.0).code is ReasonCode.ROLLBACK_FAILED
    assert reason.remedy.kind is RemedyKind.RETRY
    index.apply(NodeOrdered("R", "n5", NodeOrder.RETURN, ALICE, "because", T0 + 70.5))
    reason = why(index, index.rollout("R"), T0 + 70.6)
    assert reason is not None
    assert reason.remedy.kind is RemedyKind.WAIT_FOR_RETURN, "a retry would be refused"
    transition(index, "n5", Trigger.SKIPPED, Outcome.SKIPPED, at=T0 + 71.0, isolated=False)
    assert begun(index, T0 + 80.0) == ["n4"], "people have settled it"


def fail_rollback(index: Projection, node: str, code: FailureCode) -> None:
    """Let the rollback of a failed node begin and fail."""
    index.apply(moved(index.target("R", node), Trigger.ROLLBACK_ORDERED, T0 + 61.0))
    step, text = "run.rollback", f"{node} was unreachable"
    index.apply(moved(index.target("R", node), Trigger.FAILED, T0 + 62.0, step=step, text=text, code=code))


def test_rollback_that_never_reached_its_node_stops_no_other() -> None:
    index = fleet()
    fail(index, "n5", at=T0 + 5)
    fail_rollback(index, "n5", FailureCode.UNREACHABLE)
    assert begun(index, T0 + 70.0) == ["n4", "n3", "n2", "n1"]
    assert reason_of(index, "R", "n1", T0 + 70.0).code is ReasonCode.ROLLBACK_QUEUED
    index.apply(NodesRemoved(("n5",)))
    index.apply(membership_events(index, T0 + 71.0, describe_causes)[0])
    assert begun(index, T0 + 80.0) == ["n4", "n3", "n2", "n1"], "its node was replaced"


@pytest.mark.parametrize("code", sorted(set(FailureCode) - {FailureCode.UNREACHABLE}))
def test_any_other_failed_rollback_stops_all(code: FailureCode) -> None:
    index = fleet()
    fail(index, "n5", at=T0 + 5)
    fail_rollback(index, "n5", code)
    assert begun(index, T0 + 70.0) == []


def test_unreached_node_keeps_its_slot_from_other_rollbacks() -> None:
    index = index_of(nodes_of({"t": ["n1", "n2"]}), Limits(pools={"team": PoolRule()}))
    submit(index, rollback=UNDO, on_failure=OnFailure.ROLLBACK_WAVE, max_parallel=9)
    finish(index, "n1", at=T0 + 1)
    fail(index, "n2", at=T0 + 5)
    fail_rollback(index, "n2", FailureCode.UNREACHABLE)
    assert begun(index, T0 + 70.0) == []
    assert reason_of(index, "R", "n1", T0 + 70.0).code is ReasonCode.POOL_FULL


def test_failed_node_with_ordered_rollback_is_waited_for() -> None:
    index = fleet(done=1)
    fail(index, "n2", at=T0 + 5)
    order(index, "n2")
    remedy = failure_remedy(index.target("R", "n2"), index.rollout("R"))
    assert remedy.kind is RemedyKind.WAIT_FOR_ROLLOUT, "a retry and a skip would be refused"


def test_vote_that_covers_failure_ends_rollbacks() -> None:
    index = fleet()
    failure = fail(index, "n5", at=T0 + 5)
    vote(index, GateName.PROCEED, shown=(failure,), at=T0 + 6)
    assert begun(index) == []


def test_paused_rollout_begins_only_ordered_rollbacks() -> None:
    index = fleet()
    fail(index, "n5", at=T0 + 5)
    index.apply(RolloutPaused("R", ALICE, "why", T0 + 6))
    assert begun(index) == []
    order(index, "n2")
    assert begun(index) == ["n2"]


def test_ordered_rollback_begins_in_closed_rollout() -> None:
    index = fleet(done=6)
    index.apply(RolloutEnded("R", T0 + 7))
    order(index, "n2", "n3")
    assert begun(index) == ["n3", "n2"]
    roll_back(index, "n3")
    target = index.target("R", "n3")
    assert (target.outcome, target.order) == (Outcome.ROLLED_BACK, None)


def test_rollout_does_not_end_while_nodes_wait_for_rollback() -> None:
    index = fleet(OnFailure.ROLLBACK_ALL, done=5, max_parallel=1)
    fail(index, "n6", at=T0 + 6)
    roll_back(index, "n6")
    at = T0 + 80.0
    index.record_observations(observed_up(index.nodes, at), at)
    decision = decide(index, at)
    assert (decision.of(EndRollout), [each.node for each in decision.of(RollBack)]) == ((), ["n5"])


def abort_rollback(index: Projection, node: str) -> None:
    """Let the rollback of a changed node begin, and its isolation be aborted until T0 + 122."""
    transition(index, node, Trigger.ROLLBACK_ORDERED, at=T0 + 61.0, rolling_back=True)
    aborted = {"at": T0 + 62.0, "isolated": False, "not_before": T0 + 122.0}
    transition(index, node, Trigger.ISOLATION_ABORTED, Outcome.CHANGED, **aborted)


def test_aborted_rollback_ordered_by_person_begins_again_or_is_withdrawn() -> None:
    index = fleet(OnFailure.PAUSE)
    order(index, "n4")
    abort_rollback(index, "n4")
    target = index.target("R", "n4")
    assert (target.phase, target.outcome, target.order_by) == (Phase.DONE, Outcome.CHANGED, ALICE)
    index.apply(RolloutCancelled("R", ALICE, "why", T0 + 63.0))
    assert reason_of(index, "R", "n4", T0 + 65.0).code is ReasonCode.BACKOFF
    assert begun(index, T0 + 65.0) == []
    assert begun(index, T0 + 200.0) == ["n4"]
    index.apply(NodeOrdered("R", "n4", None, ALICE, "withdrawn", T0 + 201.0))
    assert begun(index, T0 + 300.0) == []
    assert index.target("R", "n4").outcome is Outcome.CHANGED


def test_proceed_vote_ends_aborted_rollback_that_plan_ordered() -> None:
    index = fleet()
    failure = fail(index, "n5", at=T0 + 5)
    abort_rollback(index, "n4")
    assert "n4" in begun(index, T0 + 200.0)
    event = moved(index.target("R", "n4"), Trigger.ROLLBACK_ORDERED, T0 + 200.0)
    assert violation(index, event, T0 + 200.0) is None
    vote(index, GateName.PROCEED, at=T0 + 201.0, shown=(failure,))
    assert begun(index, T0 + 202.0) == []
    assert "no person ordered it" in (violation(index, event, T0 + 202.0) or "")
    assert index.target("R", "n4").outcome is Outcome.CHANGED


def test_second_abort_of_rollback_waits_longer() -> None:
    index = fleet()
    fail(index, "n5", at=T0 + 5)
    abort_rollback(index, "n4")
    abort_rollback(index, "n4")
    assert index.target("R", "n4").aborted_isolations == 2
    assert index.expected_s("R") == fleet().expected_s("R"), "an abort is no duration of the change"


def test_invariants_refuse_abort_that_loses_the_change() -> None:
    index = fleet()
    transition(index, "n4", Trigger.ROLLBACK_ORDERED, at=T0 + 61.0, rolling_back=True)
    event = moved(index.target("R", "n4"), Trigger.ISOLATION_ABORTED, T0 + 62.0)
    assert "cannot be pending again" in (violation(index, event, T0 + 62.0) or "")


def test_invariants_refuse_rollback_that_nothing_orders() -> None:
    index = fleet()
    event = moved(index.target("R", "n4"), Trigger.ROLLBACK_ORDERED, T0 + 60.0)
    assert "no person ordered it" in (violation(index, event, T0 + 60.0) or "")
    order(index, "n4")
    index.record_observations(observed_up(index.nodes, T0 + 60.0), T0 + 60.0)
    event = moved(index.target("R", "n4"), Trigger.ROLLBACK_ORDERED, T0 + 60.0)
    assert violation(index, event, T0 + 60.0) is None
