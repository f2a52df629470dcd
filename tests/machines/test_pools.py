"""Pools: which nodes take a slot, and the reasons."""

from __future__ import annotations

import pytest

from machines.facts.availability import Unavailability
from machines.facts.fleet_facts import IsolationProgress
from machines.facts.projection import Projection
from machines.model.decision import AbortIsolation, Admit, DeferMaintenance, Observe
from machines.model.events import (
    HoldReleased,
    HoldTaken,
    NodesDiscovered,
    RolloutCancelled,
    RolloutDeleted,
)
from machines.model.limits import Budget, Limits, PoolRule
from machines.model.node import Node, NodeHealth, Observation
from machines.model.plan import MaintainStage
from machines.model.reasons import UnavailabilityCause
from machines.model.rollout import Hold
from machines.rules.pools import slot_blocker, slot_holders
from machines.scheduler.decide import decide
from machines.scheduler.why import why
from machines.states import Outcome, Trigger
from rolloutd.texts.reason_text import describe, describe_remedy, lifted_by
from tests.machines.builders import (
    ALICE,
    T0,
    admit,
    fail,
    finish,
    index_of,
    nodes_of,
    observed_up,
    reason_of,
    submit,
    transition,
)

PAYMENTS = nodes_of({"payments": ("n1", "n2", "n3")})

PROCEED = "rolloutctl approve R proceed --reason ..."


def starts(index: Projection, now: float = T0) -> list[str]:
    return [start.node for start in decide(index, now).of(Admit)]


def test_one_node_of_a_pool_at_a_time() -> None:
    index = index_of(nodes_of({"a": ("n1", "n2"), "b": ("n3", "n4")}))
    submit(index)
    assert starts(index) == ["n1", "n3"]
    admit(index, "n1")
    assert starts(index) == ["n3"]
    reason = reason_of(index, "R", "n2", T0)
    assert reason.code == "pool-full"
    assert describe(reason) == "pool team/a is full: n1 is isolating in R since 2027-01-15T08:00:00Z"


@pytest.mark.parametrize(
    ("given", "members", "want"),
    [
        (Budget(2), 9, 2),
        (Budget(percent=10), 9, 1),
        (Budget(percent=34), 9, 3),
        (Budget(percent=0), 9, 0),
        (Budget(0), 9, 0),
    ],
)
def test_a_budget_counts_all_known_nodes(given: Budget, members: int, want: int) -> None:
    names = [f"n{number}" for number in range(members)]
    index = index_of(nodes_of({"a": names}), Limits(pools={"team": PoolRule(given)}))
    assert index.budget(index.pool("team/a")) == want


def test_a_node_without_the_label_is_in_pool_none() -> None:
    index = index_of([Node("n1"), Node("n2", labels={"team": ""})])
    submit(index)
    assert starts(index) == ["n1"]
    assert index.pool("team/none").members == {"n1", "n2"}
    assert index.pools_of(index.nodes["n1"]) == ("team/none",)


def test_a_closed_pool_says_so() -> None:
    index = index_of(PAYMENTS, Limits(pools={"team": PoolRule(Budget(0))}))
    submit(index)
    assert starts(index) == []
    assert reason_of(index, "R", "n1", T0).code == "pool-closed"


def test_a_failed_node_keeps_its_slot_until_it_is_done() -> None:
    index = index_of(PAYMENTS)
    submit(index)
    fail(index, "n1")
    assert [each.code for each in slot_holders(index, "team/payments", T0)] == ["failed"]
    transition(index, "n1", Trigger.SKIPPED, Outcome.SKIPPED, isolated=False)
    assert slot_holders(index, "team/payments", T0) == ()


def test_retried_isolated_node_goes_first() -> None:
    index = index_of(PAYMENTS)
    submit(index, gates={})
    fail(index, "n3")
    transition(index, "n3", Trigger.RETRIED)
    target = index.target("R", "n1")
    blocked = slot_blocker(index, target, T0)
    assert blocked is not None
    assert "n3 is pending in R" in describe(blocked)
    assert slot_blocker(index, index.target("R", "n3"), T0) is None
    assert index.pending("R", "fleet")[0][2] == "n3"


def test_hold_uses_slot_until_released_or_expired() -> None:
    index = index_of(PAYMENTS)
    submit(index)
    index.apply(HoldTaken(Hold("n2", "cli", "h1", ALICE, "disk swap", T0, T0 + 30.0)))
    assert starts(index) == []
    assert "n2 is held by alice" in describe(reason_of(index, "R", "n1", T0))
    assert reason_of(index, "R", "n2", T0).code == "held"
    assert decide(index, T0).wake_at == T0 + 30.0
    assert starts(index, T0 + 30.0) == ["n1"]
    index.apply(HoldTaken(Hold("n2", "cli", "h2", ALICE, "disk swap", T0)))
    assert starts(index, T0 + 31.0) == []
    index.apply(HoldReleased("n2", "cli", "h2", ALICE, T0 + 31.0))
    assert starts(index, T0 + 31.0) == ["n1"]


def test_down_peer_outside_rollout_named_as_blocker() -> None:
    index = index_of([*PAYMENTS, Node("n7", labels={"team": "payments", "spare": "yes"})])
    submit(index)
    index.record_observations([Observation("n7", NodeHealth.DOWN, T0, "connection refused")], T0)
    assert starts(index) == []
    reason = reason_of(index, "R", "n1", T0)
    assert reason.code == "peer-down"
    assert describe(reason) == "peer n7 of team/payments does not answer: connection refused"


def test_foreign_cordon_takes_slot_without_consent() -> None:
    index = index_of(PAYMENTS)
    submit(index)
    index.record_observations(
        [Observation("n1", NodeHealth.UP, T0, "cordoned by kubectl", cordoned_by_other=True)], T0
    )
    assert starts(index) == []
    assert reason_of(index, "R", "n1", T0).code == "foreign-cordon"
    assert reason_of(index, "R", "n2", T0).code == "peer-down"


def test_stale_peer_observed_before_admission() -> None:
    index = index_of(PAYMENTS, observed=False)
    submit(index)
    decision = decide(index, T0)
    assert decision.commands == (Observe("n1"), Observe("n2"), Observe("n3"))
    assert reason_of(index, "R", "n2", T0).code == "node-unknown"
    index.record_observations([Observation(node.name, NodeHealth.UP, T0) for node in PAYMENTS], T0)
    assert starts(index, T0 + 59.0) == ["n1"]
    assert decide(index, T0 + 60.0).of(Observe) == (Observe("n1"), Observe("n2"), Observe("n3"))


def test_nothing_observed_while_no_node_can_start() -> None:
    index = index_of(PAYMENTS, observed=False)
    submit(index, opened=False, gates={})
    assert decide(index, T0).of(Observe) == ()


def test_observation_before_release_is_repeated() -> None:
    index = index_of(PAYMENTS)
    submit(index)
    index.record_observations([Observation("n1", NodeHealth.DOWN, T0 + 1.0, "rebooting")], T0 + 1.0)
    finish(index, "n1", at=T0 + 5.0)
    found = node_unavailability(index, "n1", T0 + 6.0)
    assert found is not None
    assert (found.code, found.needs_observation) == ("unknown", True)
    assert decide(index, T0 + 6.0).of(Observe) == (Observe("n1"),)


def test_plan_pool_limits_plan_and_counts_all() -> None:
    index = index_of(nodes_of({"a": ("n1",), "b": ("n2",), "c": ("n3",)}, power={"n1": "p1", "n2": "p1"}))
    submit(index, "A", pool_keys=("power",))
    assert starts(index) == ["n1", "n3"]
    submit(index, "B")
    admit(index, "n2", rollout="B")
    decision = decide(index, T0)
    assert [(each.rollout, each.node) for each in decision.of(Admit)] == [("A", "n3"), ("B", "n1")]
    assert describe(decision.reasons["A|power/p1"]).startswith("pool power/p1 is full: n2 is isolating in B")


def test_pools_of_a_deleted_plan_are_gone() -> None:
    index = index_of(nodes_of({"a": ("n1",)}, power={"n1": "p1"}))
    submit(index, "A", pool_keys=("power",))
    submit(index, "B", pool_keys=("power",))
    for rollout in ("A", "B"):
        assert "power/p1" in index.pool_ids()
        index.apply(RolloutCancelled(rollout, ALICE, "enough", T0))
        index.apply(RolloutDeleted(rollout, ALICE, T0))
    assert set(index.pool_ids()) == {"team/a"}


def test_pools_follow_the_labels() -> None:
    index = index_of(PAYMENTS)
    submit(index)
    admit(index, "n1")
    index.apply(NodesDiscovered((Node("n2", labels={"team": "other"}),)))
    assert starts(index) == ["n2"]


def test_over_budget_aborts_latest_isolations_first() -> None:
    index = index_of(PAYMENTS, Limits(pools={"team": PoolRule(Budget(2))}))
    submit(index)
    admit(index, "n1", at=T0)
    admit(index, "n2", at=T0 + 1.0)
    assert decide(index, T0 + 1.0).of(AbortIsolation) == ()
    index.record_observations([Observation("n3", NodeHealth.DOWN, T0 + 2.0, "no route to host")], T0 + 2.0)
    (back,) = decide(index, T0 + 2.0).of(AbortIsolation)
    assert back.node == "n2"
    assert back.reason.code == "pool-over-budget"
    assert "n3 does not answer: no route to host" in describe(back.reason)
    transition(index, "n1", Trigger.ISOLATED, at=T0 + 3.0)
    index.update_limits(Limits())
    assert [each.node for each in decide(index, T0 + 3.0).of(AbortIsolation)] == ["n2"]


def test_over_budget_keeps_isolation_that_cost_most() -> None:
    index = index_of(PAYMENTS, Limits(pools={"team": PoolRule(Budget(2))}))
    submit(index)
    admit(index, "n1", at=T0)
    admit(index, "n2", at=T0 + 1.0)
    down = [Observation("n3", NodeHealth.DOWN, T0 + 2.0, "no route to host")]
    index.record_observations(down, T0 + 2.0)
    for progress, given_back in (
        (IsolationProgress(1, moved=7), "n1"),
        (IsolationProgress(1, is_complete=True), "n1"),
        (IsolationProgress(2, moved=7), "n2"),  # of another attempt
    ):
        index.record_isolation("R", "n2", progress)
        decision = decide(index, T0 + 2.0)
        assert [each.node for each in decision.of(AbortIsolation)] == [given_back]
        assert decision.of(DeferMaintenance) == ()


def test_isolated_nodes_wait_for_slots_and_keep_them() -> None:
    index = index_of(PAYMENTS, Limits(pools={"team": PoolRule(Budget(2))}))
    submit(index)
    for node in ("n1", "n2"):
        admit(index, node)
        index.record_isolation("R", node, IsolationProgress(1, is_complete=True, moved=len(node)))
    index.record_observations([Observation("n3", NodeHealth.DOWN, T0, "no route to host")], T0)
    decision = decide(index, T0)
    assert decision.of(AbortIsolation) == ()
    [waits] = decision.of(DeferMaintenance)  # the other has a slot while the peer takes one
    transition(index, "n1" if waits.node == "n2" else "n2", Trigger.ISOLATED)
    assert [each.node for each in decide(index, T0).of(DeferMaintenance)] == [waits.node]
    index.record_observations(observed_up(["n3"], T0 + 1.0), T0 + 1.0)
    assert decide(index, T0 + 1.0).of(DeferMaintenance) == ()


@pytest.mark.parametrize("cordoned", [True, False])
def test_peer_that_is_being_removed_aborts_nothing(cordoned: bool) -> None:
    index = index_of(PAYMENTS)
    submit(index)
    admit(index, "n1")
    sight = NodeHealth.UP if cordoned else NodeHealth.DOWN
    leaving = Observation("n2", sight, T0, "it is being removed", cordoned_by_other=cordoned, is_leaving=True)
    index.record_observations([leaving], T0)
    decision = decide(index, T0)
    assert (decision.of(AbortIsolation), decision.of(DeferMaintenance), decision.of(Admit)) == ((), (), ())
    index.record_observations([Observation("n3", NodeHealth.DOWN, T0, "no route to host")], T0)
    assert [each.node for each in decide(index, T0).of(AbortIsolation)] == ["n1"]


def test_another_user_s_cordon_aborts_isolating() -> None:
    index = index_of(nodes_of({"a": ["n1"], "b": ["n2"]}))
    submit(index)
    for node in ("n1", "n2"):
        admit(index, node)
        held = Observation(node, NodeHealth.UP, T0 + 1.0, "annotated hold: disk", cordoned_by_other=True)
        index.record_observations([held], T0 + 1.0)
    transition(index, "n2", Trigger.ISOLATED)
    (back,) = decide(index, T0 + 1.0).of(AbortIsolation)
    assert (back.node, back.reason.code) == ("n1", "foreign-cordon")
    assert "annotated hold: disk" in describe(back.reason)


def test_unknown_peers_observed_without_abort() -> None:
    index = index_of(PAYMENTS)
    submit(index)
    admit(index, "n1")
    decision = decide(index, T0 + 300.0)
    assert decision.of(AbortIsolation) == ()
    assert decision.of(Observe) == (Observe("n2"), Observe("n3"))


def test_failed_node_not_returned_without_passing() -> None:
    index = index_of(PAYMENTS)
    submit(index)
    fail(index, "n1")
    transition(index, "n1", Trigger.RETRIED)
    admit(index, "n1")
    index.record_observations([Observation("n2", NodeHealth.DOWN, T0, "gone")], T0)
    assert decide(index, T0).of(AbortIsolation) == ()


def test_hold_aborts_isolating_but_not_maintaining() -> None:
    index = index_of(nodes_of({"a": ["n1"], "b": ["n2"], "c": ["n3"]}))
    submit(index)
    fail(index, "n3")
    transition(index, "n3", Trigger.RETRIED)
    for node in ("n1", "n2", "n3"):
        admit(index, node)
        index.apply(HoldTaken(Hold(node, "person", "alice", ALICE, "disk", T0, until=T0 + 60.0)))
    transition(index, "n2", Trigger.ISOLATED)
    (back,) = decide(index, T0).of(AbortIsolation)
    assert (back.node, back.reason.code) == ("n1", "held")
    assert "n1 is held by alice" in describe(back.reason)
    assert decide(index, T0 + 60.0).of(AbortIsolation) == ()


def test_node_left_isolated_known_while_observed() -> None:
    index = index_of(nodes_of({"a": ["n1"]}))
    index.record_observations(
        [Observation("n1", NodeHealth.UP, T0, "held", cordoned_by_other=True, left_isolated_by="kubernetes")],
        T0,
    )
    assert [seen.node for seen in index.left_cordoned()] == ["n1"]
    index.record_observations([Observation("n1", NodeHealth.UP, T0 + 1.0)], T0 + 1.0)
    assert index.left_cordoned() == []


def test_observation_expires_after_clock_set_back() -> None:
    index = index_of(nodes_of({"a": ["n1", "n2"]}))
    assert [node_unavailability(index, "n1", T0 + at) is None for at in (10.0, 100.0, 20.0, 100.0)] == [
        True,
        False,
        True,
        False,
    ]


def node_unavailability(index: Projection, node: str, now: float) -> Unavailability | None:
    """Return why a node counts as down at an instant."""
    index.advance(now)
    return index.unavailability(node)


def test_observation_from_future_ignored() -> None:
    index = index_of(nodes_of({"a": ["n1", "n2"]}))
    stand = node_unavailability(index, "n1", T0 - 600.0)
    assert stand is not None
    assert stand.code == "unknown"


def test_hold_names_command_that_releases_it() -> None:
    def told(source: str, name: str) -> str:
        hold = Hold("n1", source, name, ALICE, "mine", T0)
        return describe_remedy(Unavailability("n1", UnavailabilityCause.HELD, hold).remedy)

    assert told("person", "alice") == "alice: rolloutctl release n1"
    assert told("person", "CHG-1") == "alice: rolloutctl release n1 --as CHG-1"
    assert told("left", "R/n1") == "rolloutctl return n1"
    assert told("kured", "k1") == "kured, which holds it as k1"


def test_node_without_slot_does_not_wait_for_probe() -> None:
    index = index_of((*PAYMENTS, *nodes_of({"search": ("n4", "n5")})), Limits(max_parallel=1), observed=False)
    submit(index)
    index.record_observations([Observation(node, NodeHealth.UP, T0) for node in ("n1", "n2", "n3")], T0)
    admit(index, "n1")
    assert reason_of(index, "R", "n4", T0).code == "max-parallel"


def test_full_pool_reported_before_unobserved_peer() -> None:
    """Nobody looks at a node whose pool is full, so that is not what it waits for."""
    index = index_of(PAYMENTS)
    submit(index)
    admit(index, "n1")
    later = T0 + 300.0
    index.record_observations([Observation("n1", NodeHealth.UP, later)], later)
    reason = reason_of(index, "R", "n2", later)
    assert (reason.code, "n1 is isolating" in describe(reason)) == ("pool-full", True)


def test_down_peer_named_before_unobserved_peer() -> None:
    """Whoever looks between two looks at a dead node is told of it, not of those that were well."""
    index = index_of(PAYMENTS)
    submit(index)
    index.record_observations([Observation("n3", NodeHealth.DOWN, T0, "connection refused")], T0)
    later = T0 + 300.0
    reason = reason_of(index, "R", "n1", later)
    assert reason.code == "peer-unknown"
    assert describe(reason).startswith("peer n3 of team/payments does not answer: connection refused (obser")
    assert reason_of(index, "R", "n3", later).code == "node-unknown"


def test_node_last_seen_down_reported_before_peers() -> None:
    index = index_of(PAYMENTS)
    submit(index)
    index.record_observations([Observation(node, NodeHealth.DOWN, T0, "gone") for node in ("n1", "n3")], T0)
    reason = reason_of(index, "R", "n1", T0 + 300.0)
    assert (reason.code, describe(reason).startswith("n1 does not answer: gone")) == ("node-unknown", True)


def test_plan_with_rollback_suggests_it() -> None:
    index = index_of(PAYMENTS)
    submit(index, rollback=(MaintainStage("rollback", "undo.yml"),))
    fail(index, "n1")
    suggested = lifted_by(reason_of(index, "R", "n1", T0))
    retry = "rolloutctl retry R n1 --reason ... (or skip, or rollback)"
    assert suggested == f"{retry}, and for R to continue {PROCEED}"
    reason = why(index, index.rollout("R"), T0)
    assert reason is not None
    assert lifted_by(reason) == f"{PROCEED}, and for n1 itself {retry}"


def test_failed_node_of_closed_rollout_only_skippable() -> None:
    """What another rollout waits for is never a command that is refused."""
    index = index_of(PAYMENTS)
    submit(index)
    fail(index, "n1")
    submit(index, "S")
    for rollout, node in (("R", "n1"), ("S", "n1"), ("S", "n2")):
        suggested = lifted_by(reason_of(index, rollout, node, T0))
        # A slot of the other rollout needs no votes of this one.
        proceed = f", and for R to continue {PROCEED}" if rollout == "R" else ""
        assert suggested == f"rolloutctl retry R n1 --reason ... (or skip){proceed}"
    index.apply(RolloutCancelled("R", ALICE, "superseded", T0))
    for rollout, node in (("R", "n1"), ("S", "n1"), ("S", "n2")):
        assert lifted_by(reason_of(index, rollout, node, T0)) == "rolloutctl skip R n1 --return --reason ..."
