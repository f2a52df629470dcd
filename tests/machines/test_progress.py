"""Progress: counts, states and ETA."""

from __future__ import annotations

from machines.facts.projection import Projection
from machines.model.events import FreezeStarted, GateOpened, NodesRemoved, RolloutCancelled, RolloutEnded
from machines.model.plan import GateName, VoteRequirement
from machines.model.windows import Freeze
from machines.scheduler.checks import soaking_targets
from machines.scheduler.progress import RolloutProgress, RolloutState, rollout_progress
from machines.scheduler.why import why
from machines.states import Outcome, Trigger
from rolloutd.texts.reason_text import describe, lifted_by
from tests.machines.builders import (
    ALICE,
    CANARY_THEN_FLEET,
    T0,
    admit,
    fail,
    finish,
    index_of,
    nodes_of,
    submit,
    transition,
    vote,
)

NODES = nodes_of({"a": ("n1", "n2", "n3"), "b": ("n4", "n5", "n6")})


def progress_of(index: Projection, now: float = T0) -> RolloutProgress:
    return rollout_progress(index, "R", now)


def test_left_excluded_and_rolled_back_counted_among_skipped() -> None:
    index = index_of(NODES)
    submit(index, rollback=())
    finish(index, "n1")
    transition(index, "n2", Trigger.FOUND_CURRENT, Outcome.ALREADY_CURRENT)
    transition(index, "n3", Trigger.SKIPPED, Outcome.SKIPPED)
    transition(index, "n4", Trigger.LEFT, Outcome.LEFT)
    fail(index, "n5")
    for trigger in (Trigger.ROLLBACK_ORDERED, Trigger.ISOLATED, Trigger.MAINTAINED):
        transition(index, "n5", trigger, rolling_back=True)
    transition(index, "n5", Trigger.VERIFIED, Outcome.ROLLED_BACK, isolated=False)
    seen = progress_of(index)
    assert (seen.total, seen.done, seen.failed, seen.skipped, seen.pending) == (5, 2, 0, 2, 1)
    assert seen.rolled_back == sum(pool.rolled_back for pool in index.counters("R").pools.values()) == 1
    assert seen.percent == 100.0 * 2 / 3
    in_flight = len(index.counters("R").in_flight)
    assert seen.total == seen.done + seen.failed + seen.skipped + seen.pending + in_flight


def test_states_from_submit_to_done() -> None:
    index = index_of(nodes_of({"a": ("n1", "n2")}))
    gates = {GateName.START: VoteRequirement(owner=1), GateName.CONTINUE: VoteRequirement(owner=1)}
    submit(index, opened=False, waves=CANARY_THEN_FLEET, gates=gates)
    assert progress_of(index).state is RolloutState.AWAITING_APPROVAL
    vote(index, GateName.START)
    index.apply(GateOpened("R", GateName.START, "", T0))
    assert (progress_of(index).state, progress_of(index).wave) == (RolloutState.RUNNING, "canary")
    admit(index, "n1")
    assert index.counters("R").in_flight == {"n1"}
    transition(index, "n1", Trigger.ISOLATED)
    transition(index, "n1", Trigger.MAINTAINED)
    transition(index, "n1", Trigger.VERIFIED, Outcome.CHANGED)
    assert (progress_of(index).state, progress_of(index).wave) == (RolloutState.SOAKING, "canary")
    assert [target.node for target in soaking_targets(index, index.rollout("R"), T0)] == ["n1"]
    assert progress_of(index, T0 + 600.0).state is RolloutState.AWAITING_APPROVAL
    assert soaking_targets(index, index.rollout("R"), T0 + 600.0) == ()
    vote(index, GateName.CONTINUE, wave="canary")
    index.apply(GateOpened("R", GateName.CONTINUE, "canary", T0))
    assert (progress_of(index, T0 + 600.0).state, progress_of(index, T0 + 600.0).wave) == (
        RolloutState.RUNNING,
        "fleet",
    )
    finish(index, "n2", at=T0 + 700.0)
    index.apply(RolloutEnded("R", T0 + 701.0))
    seen = progress_of(index, T0 + 701.0)
    assert (seen.state, seen.percent, seen.reason) == (RolloutState.DONE, 100.0, None)


def test_failure_pauses_and_cancel_is_reported() -> None:
    index = index_of(NODES)
    submit(index)
    fail(index, "n1")
    assert progress_of(index).state is RolloutState.PAUSED
    index.apply(RolloutCancelled("R", ALICE, "enough", T0))
    assert progress_of(index).state is RolloutState.CANCELLED


def test_rollout_without_remaining_nodes_counts_nothing() -> None:
    index = index_of(nodes_of({"a": ("n1",)}))
    submit(index)
    index.apply(NodesRemoved(("n1",)))
    transition(index, "n1", Trigger.LEFT, Outcome.LEFT)
    assert (progress_of(index).total, progress_of(index).percent) == (0, 0.0)


def test_freeze_is_a_reason_of_a_running_rollout() -> None:
    index = index_of(NODES)
    submit(index)
    index.apply(FreezeStarted(Freeze("f1", "all", "month's end", "alice", T0)))
    seen = progress_of(index)
    assert seen.state is RolloutState.RUNNING
    assert seen.reason is not None
    assert (seen.reason.code, lifted_by(seen.reason)) == ("freeze", "alice: rolloutctl unfreeze --scope f1")


def test_slot_of_a_failed_node_is_the_reason() -> None:
    """A failed node keeps the slot that the last one waits for."""
    index = index_of(nodes_of({"a": ("n1", "n2"), "b": ("n3",)}))
    submit(index)
    vote(index, GateName.PROCEED, shown=(fail(index, "n1"),))
    admit(index, "n3")
    for trigger in (Trigger.ISOLATED, Trigger.MAINTAINED):
        transition(index, "n3", trigger)
    transition(index, "n3", Trigger.VERIFIED, Outcome.CHANGED)
    seen = progress_of(index)
    assert seen.reason is not None
    assert seen.reason.code == "pool-full"


def test_covered_failure_keeps_rollout_open() -> None:
    index = index_of(nodes_of({"a": ("n1",), "b": ("n2",)}))
    submit(index)
    vote(index, GateName.PROCEED, shown=(fail(index, "n1"),))
    finish(index, "n2")
    seen = progress_of(index)
    assert (seen.state, seen.failed) == (RolloutState.RUNNING, 1)
    assert seen.reason is not None
    assert (seen.reason.code, lifted_by(seen.reason)) == (
        "failed",
        "rolloutctl retry R n1 --reason ... (or skip)",
    )


def test_pool_and_rollout_count_skipped_nodes_alike() -> None:
    index = index_of(NODES)
    submit(index)
    finish(index, "n1")
    transition(index, "n2", Trigger.SKIPPED, Outcome.SKIPPED)
    seen = progress_of(index)
    assert sum(pool.done for pool in index.counters("R").pools.values()) == seen.done == 1
    assert sum(pool.skipped for pool in index.counters("R").pools.values()) == seen.skipped == 1
    assert sum(pool.total for pool in index.counters("R").pools.values()) == seen.total == 6


def test_rollout_done_with_exceptions_names_them() -> None:
    index = index_of(nodes_of({"a": ("n1", "n2")}))
    submit(index)
    finish(index, "n1")
    transition(index, "n2", Trigger.SKIPPED, Outcome.SKIPPED, text="by root: its disk is broken")
    index.apply(RolloutEnded("R", T0 + 1.0))
    seen = progress_of(index, T0 + 1.0)
    assert seen.state is RolloutState.DONE
    assert seen.reason is not None
    assert describe(seen.reason) == (
        "done with exceptions: 1 changed, 1 skipped (n2, by root: its disk is broken)"
    )
    assert why(index, index.target("R", "n2"), T0 + 1.0) is None, "it is done"
