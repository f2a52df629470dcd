"""Counting as the design counts."""

from __future__ import annotations

from dataclasses import replace

from machines.events import Frozen, GateOpened, NodesGone, RolloutCancelled, RolloutEnded
from machines.plan import GateName, Need
from machines.progress import Progress, State, progress, soaking
from machines.projection import Projection
from machines.selector import parse
from machines.states import Outcome, Trigger
from machines.windows import Freeze
from tests.machines.worlds import (
    ALICE,
    CANARY,
    CANARY_THEN_FLEET,
    FLEET,
    T0,
    admit,
    fail,
    finish,
    index_of,
    move,
    nodes_of,
    submit,
    vote,
)

NODES = nodes_of({"a": ("n1", "n2", "n3"), "b": ("n4", "n5", "n6")})


def far(index: Projection, now: float = T0) -> Progress:
    return progress(index, "R", now)


def test_left_is_out_of_the_total_and_rolled_back_counts_as_skipped() -> None:
    index = index_of(NODES)
    submit(index, rollback=None)
    finish(index, "n1")
    move(index, "n2", Trigger.FOUND_CURRENT, Outcome.ALREADY_CURRENT)
    move(index, "n3", Trigger.SKIPPED, Outcome.SKIPPED)
    move(index, "n4", Trigger.LEFT, Outcome.LEFT)
    fail(index, "n5")
    move(index, "n5", Trigger.ROLLED_BACK, Outcome.ROLLED_BACK, isolated=False)
    seen = far(index)
    assert (seen.total, seen.done, seen.failed, seen.skipped, seen.pending) == (5, 2, 0, 2, 1)
    assert seen.percent == 100.0 * 2 / 3
    assert seen.total == seen.done + seen.failed + seen.skipped + seen.pending + len(seen.in_flight)


def test_states_from_submit_to_done() -> None:
    index = index_of(nodes_of({"a": ("n1", "n2")}))
    gates = {GateName.START: Need(owner=1), GateName.CONTINUE: Need(owner=1)}
    submit(index, opened=False, waves=CANARY_THEN_FLEET, gates=gates)
    assert far(index).state is State.AWAITING_APPROVAL
    vote(index, GateName.START)
    index.apply(GateOpened("R", GateName.START, "", T0))
    assert (far(index).state, far(index).wave) == (State.RUNNING, "canary")
    admit(index, "n1")
    assert [target.node for target in far(index).in_flight] == ["n1"]
    move(index, "n1", Trigger.ISOLATED)
    move(index, "n1", Trigger.MAINTAINED)
    move(index, "n1", Trigger.VERIFIED, Outcome.CHANGED)
    assert (far(index).state, far(index).wave) == (State.SOAKING, "canary")
    assert [target.node for target in soaking(index, T0)] == ["n1"]
    assert far(index, T0 + 600.0).state is State.AWAITING_APPROVAL
    assert soaking(index, T0 + 600.0) == ()
    vote(index, GateName.CONTINUE, wave="canary")
    index.apply(GateOpened("R", GateName.CONTINUE, "canary", T0))
    assert (far(index, T0 + 600.0).state, far(index, T0 + 600.0).wave) == (State.RUNNING, "fleet")
    finish(index, "n2", at=T0 + 700.0)
    index.apply(RolloutEnded("R", T0 + 701.0))
    seen = far(index, T0 + 701.0)
    assert (seen.state, seen.percent, seen.eta_s, seen.reason) == (State.DONE, 100.0, 0.0, None)


def test_a_failure_is_a_pause_and_a_cancelled_rollout_says_so() -> None:
    index = index_of(NODES)
    submit(index)
    fail(index, "n1")
    assert far(index).state is State.PAUSED
    assert far(index).eta_s is None
    index.apply(RolloutCancelled("R", ALICE, "enough", T0))
    assert far(index).state is State.CANCELLED


def test_pools_are_told_with_what_is_down_in_them_for_whatever_reason() -> None:
    index = index_of(NODES)
    submit(index)
    admit(index, "n1")
    finish(index, "n4")
    first, second = far(index).pools
    assert (first.pool, first.total, first.in_flight, first.down, first.max_unavailable) == (
        "team/a",
        3,
        1,
        1,
        1,
    )
    assert (second.pool, second.done, second.down) == ("team/b", 1, 0)


def test_the_eta_follows_the_slowest_pool_and_what_nodes_took_so_far() -> None:
    index = index_of(NODES)
    submit(index, expected_s=60.0)
    assert far(index).eta_s == 180.0
    admit(index, "n1", at=T0)
    for trigger in (Trigger.ISOLATED, Trigger.MAINTAINED):
        move(index, "n1", trigger, at=T0)
    move(index, "n1", Trigger.VERIFIED, Outcome.CHANGED, at=T0 + 10.0)
    assert far(index, T0 + 10.0).eta_s == 30.0


def test_a_rollout_that_everybody_left_counts_nothing() -> None:
    index = index_of(nodes_of({"a": ("n1",)}))
    submit(index)
    index.apply(NodesGone(("n1",)))
    move(index, "n1", Trigger.LEFT, Outcome.LEFT)
    assert (far(index).total, far(index).percent) == (0, 0.0)


def test_nothing_is_promised_while_a_window_is_closed_or_a_freeze_is_on() -> None:
    index = index_of(NODES)
    submit(index)
    index.apply(Frozen(Freeze("f1", "all", "month's end", "alice", T0)))
    seen = far(index)
    assert (seen.state, seen.eta_s) == (State.RUNNING, None)
    assert seen.reason is not None
    assert (seen.reason.code, seen.reason.lifted_by) == ("freeze", "alice: rolloutctl unfreeze --scope f1")


def test_the_eta_counts_a_wave_whose_nodes_follow_each_other() -> None:
    """Two canaries one by one, ten minutes of soak, then four nodes of two teams."""
    canaries = {"n1": "true", "n4": "true"}
    index = index_of(nodes_of({"a": ("n1", "n2", "n3"), "b": ("n4", "n5", "n6")}, canary=canaries))
    waves = (replace(CANARY, select=parse("canary=true")), *FLEET)
    submit(index, waves=waves, max_parallel=6, expected_s=60.0)
    assert far(index).eta_s == 3 * 60.0 + 600.0


def test_nothing_is_promised_while_only_people_can_make_room() -> None:
    """A failed node keeps the slot that the last one waits for."""
    index = index_of(nodes_of({"a": ("n1", "n2"), "b": ("n3",)}))
    submit(index)
    vote(index, GateName.PROCEED, shown=(fail(index, "n1"),))
    admit(index, "n3")
    assert far(index).eta_s is not None
    for trigger in (Trigger.ISOLATED, Trigger.MAINTAINED):
        move(index, "n3", trigger)
    move(index, "n3", Trigger.VERIFIED, Outcome.CHANGED)
    seen = far(index)
    assert seen.reason is not None
    assert (seen.reason.code, seen.eta_s) == ("pool-full", None)


def test_a_node_that_failed_and_is_covered_keeps_its_rollout_open_and_says_so() -> None:
    index = index_of(nodes_of({"a": ("n1",), "b": ("n2",)}))
    submit(index)
    vote(index, GateName.PROCEED, shown=(fail(index, "n1"),))
    finish(index, "n2")
    seen = far(index)
    assert (seen.state, seen.eta_s, seen.failed) == (State.RUNNING, None, 1)
    assert seen.reason is not None
    assert (seen.reason.code, seen.reason.lifted_by) == ("failed", "rolloutctl retry, skip or rollback R n1")
