"""Who takes a slot, and what is said of it."""

from __future__ import annotations

import pytest

from machines.events import HoldReleased, HoldTaken, NodesSeen, RolloutCancelled
from machines.limits import Budget, Limits, PoolRule
from machines.node import Node, Observation, Sight
from machines.pools import budget, down, holders, may_start
from machines.projection import Projection
from machines.rollout import Hold
from machines.schedule import decide, why
from machines.stands import Stand
from machines.states import Outcome, Trigger
from tests.machines.worlds import ALICE, T0, admit, fail, finish, index_of, move, nodes_of, submit

PAYMENTS = nodes_of({"payments": ("n1", "n2", "n3")})


def starts(index: Projection, now: float = T0) -> list[str]:
    return [start.node for start in decide(index, now).starts]


def test_one_node_of_a_pool_at_a_time() -> None:
    index = index_of(nodes_of({"a": ("n1", "n2"), "b": ("n3", "n4")}))
    submit(index)
    assert starts(index) == ["n1", "n3"]
    admit(index, "n1")
    assert starts(index) == ["n3"]
    reason = why(index, "R", "n2", T0)
    assert reason.code == "pool-full"
    assert reason.text == "pool team/a is full: n1 is isolating in R since 2027-01-15T08:00:00Z"


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
    assert budget(index, "team/a") == want


def test_a_node_without_the_label_is_in_pool_none() -> None:
    index = index_of([Node("n1"), Node("n2")])
    submit(index)
    assert starts(index) == ["n1"]
    assert index.pools_of(index.nodes["n1"]) == ("team/none",)


def test_a_closed_pool_says_so() -> None:
    index = index_of(PAYMENTS, Limits(pools={"team": PoolRule(Budget(0))}))
    submit(index)
    assert starts(index) == []
    assert why(index, "R", "n1", T0).code == "pool-closed"


def test_a_failed_node_keeps_its_slot_until_it_is_done() -> None:
    index = index_of(PAYMENTS)
    submit(index)
    fail(index, "n1")
    assert [each.code for each in holders(index, "team/payments", T0)] == ["failed"]
    move(index, "n1", Trigger.SKIPPED, Outcome.SKIPPED, isolated=False)
    assert holders(index, "team/payments", T0) == ()


def test_a_retried_node_that_is_still_isolated_does_not_block_itself_and_goes_first() -> None:
    index = index_of(PAYMENTS)
    submit(index, gates={})
    fail(index, "n3")
    move(index, "n3", Trigger.RETRIED)
    target = index.target("R", "n1")
    blocked = may_start(index, target, T0)
    assert blocked is not None
    assert "n3 is pending in R" in blocked.text
    assert may_start(index, index.target("R", "n3"), T0) is None
    assert index.pending("R", "fleet")[0][2] == "n3"


def test_a_hold_takes_a_slot_until_it_is_released_or_runs_out() -> None:
    index = index_of(PAYMENTS)
    submit(index)
    index.apply(HoldTaken(Hold("n2", "cli", "h1", ALICE, "disk swap", T0, T0 + 30.0)))
    assert starts(index) == []
    assert "n2 is held by alice" in why(index, "R", "n1", T0).text
    assert why(index, "R", "n2", T0).code == "held"
    assert decide(index, T0).wake_at == T0 + 30.0
    assert starts(index, T0 + 30.0) == ["n1"]
    index.apply(HoldTaken(Hold("n2", "cli", "h2", ALICE, "disk swap", T0)))
    assert starts(index, T0 + 31.0) == []
    index.apply(HoldReleased("n2", "cli", "h2", ALICE, T0 + 31.0))
    assert starts(index, T0 + 31.0) == ["n1"]


def test_a_dead_mate_that_is_no_target_keeps_its_pool_shut_and_is_named() -> None:
    index = index_of([*PAYMENTS, Node("n7", labels={"team": "payments", "spare": "yes"})])
    submit(index)
    index.observed([Observation("n7", Sight.DOWN, T0, "connection refused")], T0)
    assert starts(index) == []
    reason = why(index, "R", "n1", T0)
    assert reason.code == "mate-down"
    assert reason.text == "mate n7 of team/payments does not answer: connection refused"


def test_a_foreign_cordon_is_occupancy_and_never_consent() -> None:
    index = index_of(PAYMENTS)
    submit(index)
    index.observed([Observation("n1", Sight.UP, T0, "cordoned by kubectl", foreign=True)], T0)
    assert starts(index) == []
    assert why(index, "R", "n1", T0).code == "foreign-cordon"
    assert why(index, "R", "n2", T0).code == "mate-down"


def test_what_was_not_observed_lately_is_observed_before_a_mate_starts() -> None:
    index = index_of(PAYMENTS, seen=False)
    submit(index)
    decision = decide(index, T0)
    assert (decision.starts, decision.observe) == ((), ("n1", "n2", "n3"))
    assert why(index, "R", "n2", T0).code == "node-unknown"
    index.observed([Observation(node.name, Sight.UP, T0) for node in PAYMENTS], T0)
    assert starts(index, T0 + 59.0) == ["n1"]
    assert decide(index, T0 + 60.0).observe == ("n1", "n2", "n3")


def test_nothing_is_observed_while_nobody_could_start() -> None:
    index = index_of(PAYMENTS, seen=False)
    submit(index, opened=False, gates={})
    assert decide(index, T0).observe == ()


def test_a_bad_observation_from_before_we_let_go_is_made_again() -> None:
    index = index_of(PAYMENTS)
    submit(index)
    index.observed([Observation("n1", Sight.DOWN, T0 + 1.0, "rebooting")], T0 + 1.0)
    finish(index, "n1", at=T0 + 5.0)
    found = down(index, "n1", T0 + 6.0)
    assert found is not None
    assert (found.code, found.stale) == ("unknown", True)
    assert decide(index, T0 + 6.0).observe == ("n1",)


def test_a_pool_that_only_a_plan_names_binds_that_plan_and_counts_everybody() -> None:
    index = index_of(nodes_of({"a": ("n1",), "b": ("n2",), "c": ("n3",)}, power={"n1": "p1", "n2": "p1"}))
    submit(index, "A", pool_keys=("power",))
    assert starts(index) == ["n1", "n3"]
    submit(index, "B")
    admit(index, "n2", rollout="B")
    decision = decide(index, T0)
    assert [(each.rollout, each.node) for each in decision.starts] == [("A", "n3"), ("B", "n1")]
    assert decision.reasons["A|power/p1"].text.startswith("pool power/p1 is full: n2 is isolating in B")


def test_pools_follow_the_labels() -> None:
    index = index_of(PAYMENTS)
    submit(index)
    admit(index, "n1")
    index.apply(NodesSeen((Node("n2", labels={"team": "other"}),)))
    assert starts(index) == ["n2"]


def test_over_budget_only_as_many_as_needed_are_put_back_the_latest_first() -> None:
    index = index_of(PAYMENTS, Limits(pools={"team": PoolRule(Budget(2))}))
    submit(index)
    admit(index, "n1", at=T0)
    admit(index, "n2", at=T0 + 1.0)
    assert decide(index, T0 + 1.0).put_backs == ()
    index.observed([Observation("n3", Sight.DOWN, T0 + 2.0, "no route to host")], T0 + 2.0)
    (back,) = decide(index, T0 + 2.0).put_backs
    assert back.node == "n2"
    assert back.reason.code == "pool-over-budget"
    assert "n3 does not answer: no route to host" in back.reason.text
    move(index, "n1", Trigger.ISOLATED, at=T0 + 3.0)
    index.relimit(Limits())
    assert [each.node for each in decide(index, T0 + 3.0).put_backs] == ["n2"]


def test_unknown_mates_put_nobody_back_but_are_looked_at() -> None:
    index = index_of(PAYMENTS)
    submit(index)
    admit(index, "n1")
    decision = decide(index, T0 + 300.0)
    assert decision.put_backs == ()
    assert decision.observe == ("n2", "n3")


def test_a_node_that_failed_before_is_never_put_back_unproven() -> None:
    index = index_of(PAYMENTS)
    submit(index)
    fail(index, "n1")
    move(index, "n1", Trigger.RETRIED)
    admit(index, "n1")
    index.observed([Observation("n2", Sight.DOWN, T0, "gone")], T0)
    assert decide(index, T0).put_backs == ()


def test_who_holds_a_node_that_is_isolating_gets_it_back_and_one_that_is_further_finishes() -> None:
    index = index_of(nodes_of({"a": ["n1"], "b": ["n2"], "c": ["n3"]}))
    submit(index)
    fail(index, "n3")
    move(index, "n3", Trigger.RETRIED)
    for node in ("n1", "n2", "n3"):
        admit(index, node)
        index.apply(HoldTaken(Hold(node, "person", "alice", ALICE, "disk", T0, until=T0 + 60.0)))
    move(index, "n2", Trigger.ISOLATED)
    (back,) = decide(index, T0).put_backs
    assert (back.node, back.reason.code) == ("n1", "held")
    assert "n1 is held by alice" in back.reason.text
    assert decide(index, T0 + 60.0).put_backs == ()


def test_a_kept_node_is_known_as_long_as_it_is_seen_so() -> None:
    index = index_of(nodes_of({"a": ["n1"]}))
    index.observed([Observation("n1", Sight.UP, T0, "held", foreign=True, kept="kubernetes")], T0)
    assert [seen.node for seen in index.kept()] == ["n1"]
    index.observed([Observation("n1", Sight.UP, T0 + 1.0)], T0 + 1.0)
    assert index.kept() == []


def test_an_observation_grows_old_again_after_the_clock_was_set_back() -> None:
    index = index_of(nodes_of({"a": ["n1", "n2"]}))
    assert [down(index, "n1", T0 + at) is None for at in (10.0, 100.0, 20.0, 100.0)] == [
        True,
        False,
        True,
        False,
    ]


def test_an_observation_from_the_future_says_nothing() -> None:
    index = index_of(nodes_of({"a": ["n1", "n2"]}))
    stand = down(index, "n1", T0 - 600.0)
    assert stand is not None
    assert stand.code == "unknown"


def test_a_hold_says_the_very_command_that_ends_it() -> None:
    def told(source: str, name: str) -> str:
        return Stand("n1", "held", Hold("n1", source, name, ALICE, "mine", T0)).lifted_by

    assert told("person", "alice") == "alice: rolloutctl release n1"
    assert told("person", "CHG-1") == "alice: rolloutctl release n1 --as CHG-1"
    assert told("left", "R/n1") == "rolloutctl return n1"
    assert told("kured", "k1") == "kured, which holds it as k1"


def test_a_node_without_room_waits_for_that_and_not_for_a_look_that_nobody_takes() -> None:
    index = index_of((*PAYMENTS, *nodes_of({"search": ("n4", "n5")})), Limits(max_parallel=1), seen=False)
    submit(index)
    index.observed([Observation(node, Sight.UP, T0) for node in ("n1", "n2", "n3")], T0)
    admit(index, "n1")
    assert why(index, "R", "n4", T0).code == "max-parallel"


def test_a_full_pool_is_said_before_what_was_not_seen_lately() -> None:
    """Nobody looks at a node whose pool is full, so that is not what it waits for."""
    index = index_of(PAYMENTS)
    submit(index)
    admit(index, "n1")
    later = T0 + 300.0
    index.observed([Observation("n1", Sight.UP, later)], later)
    reason = why(index, "R", "n2", later)
    assert (reason.code, "n1 is isolating" in reason.text) == ("pool-full", True)


def test_a_mate_last_seen_down_is_named_before_what_is_merely_not_seen_lately() -> None:
    """Whoever looks between two looks at a dead node is told of it, not of those that were well."""
    index = index_of(PAYMENTS)
    submit(index)
    index.observed([Observation("n3", Sight.DOWN, T0, "connection refused")], T0)
    later = T0 + 300.0
    reason = why(index, "R", "n1", later)
    assert reason.code == "mate-unknown"
    assert reason.text.startswith("mate n3 of team/payments does not answer: connection refused (obser")
    assert why(index, "R", "n3", later).code == "node-unknown"


def test_a_node_last_seen_down_itself_says_so_before_its_mates() -> None:
    index = index_of(PAYMENTS)
    submit(index)
    index.observed([Observation(node, Sight.DOWN, T0, "gone") for node in ("n1", "n3")], T0)
    reason = why(index, "R", "n1", T0 + 300.0)
    assert (reason.code, reason.text.startswith("n1 does not answer: gone")) == ("node-unknown", True)


def test_a_node_that_failed_in_a_rollout_that_is_over_can_only_be_left_out() -> None:
    """What another rollout waits for is never a command that is refused."""
    index = index_of(PAYMENTS)
    submit(index)
    fail(index, "n1")
    submit(index, "S")
    for rollout, node in (("R", "n1"), ("S", "n1"), ("S", "n2")):
        assert why(index, rollout, node, T0).lifted_by == "rolloutctl retry, skip or rollback R n1"
    index.apply(RolloutCancelled("R", ALICE, "superseded", T0))
    for rollout, node in (("R", "n1"), ("S", "n1"), ("S", "n2")):
        assert why(index, rollout, node, T0).lifted_by == "rolloutctl skip R n1 --return"
