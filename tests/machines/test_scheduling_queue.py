"""The queue of pending nodes: how often a group is tried, and when the daemon wakes for it."""

from __future__ import annotations

from collections.abc import Iterator
from zoneinfo import ZoneInfo

import pytest

from machines.facts.projection import Projection
from machines.model.decision import Admit, Decision, Observe
from machines.model.events import FreezeStarted, TeamRulesChanged
from machines.model.limits import Limits, PoolRule, TeamRules
from machines.model.node import Node, NodeHealth, Observation
from machines.model.plan import WaveDef
from machines.model.rollout import Actor, ActorKind, Failure
from machines.model.windows import Freeze, Window
from machines.scheduler.admission import MAX_BACKOFFS, MAX_OBSERVATIONS, MAX_PASSED_OVER
from machines.scheduler.decide import decide
from tests.machines.builders import T0, admit, index_of, observed_up, submit
from tests.support.recount import wrong_counts

HOUR_S = 3600.0
WATCH_S = 15.0
NODES, TEAMS = 40, 4

SATURDAYS = Window(frozenset({5}), 0, 24 * 60 - 1, ZoneInfo("UTC"))
OPENING = T0 + 16 * HOUR_S
"""T0 is a Friday, 8:00."""

OLGA = Actor(ActorKind.PERSON, "olga", 1001)
LIMITS = Limits(pools={key: PoolRule() for key in ("team", "rack")}, max_parallel=2 * NODES)


def fleet(nodes: int = NODES, teams: int = TEAMS, observed: bool = True) -> Projection:
    """Return nodes each of which has a rack, and so a group, of its own."""
    labels = ({"team": f"t{number % teams}", "rack": f"r{number}"} for number in range(nodes))
    known = [Node(f"n{number}", labels=each) for number, each in enumerate(labels)]
    return index_of(known, LIMITS, observed=observed)


def watched_hours(
    index: Projection, hours: int = 1, health: NodeHealth = NodeHealth.UP
) -> Iterator[Decision]:
    """Yield the daemon's decisions while a watch reports the same of all nodes again and again."""
    now = T0
    while now < T0 + hours * HOUR_S:
        now += WATCH_S
        index.record_observations([Observation(each, health, now) for each in index.nodes], now)
        index.advance(now)
        decision = decide(index, now)
        index.record_backoffs(decision.backoffs)
        yield decision


def close_teams(index: Projection, teams: int = TEAMS) -> None:
    for team in range(teams):
        rules = TeamRules(f"t{team}", windows=(SATURDAYS,))
        index.apply(TeamRulesChanged(rules, OLGA, "test", T0))


def test_closed_window_of_plan_tries_no_node() -> None:
    index = fleet()
    submit(index, windows=(SATURDAYS,))
    for decision in watched_hours(index):
        assert (decision.backoffs, decision.wake_at) == ((), OPENING)


def test_closed_windows_of_teams_try_each_group_once() -> None:
    index = fleet()
    submit(index)
    close_teams(index)
    decisions = list(watched_hours(index))
    assert sum(len(each.backoffs) for each in decisions) == NODES
    assert {each.wake_at for each in decisions} == {OPENING}
    assert index.pending_groups.instants == [OPENING]


def test_decision_backs_off_so_many_groups() -> None:
    index = fleet(MAX_BACKOFFS + 1)
    submit(index)
    close_teams(index)
    decisions = []
    for _ in range(3):
        decisions.append(decide(index, T0))
        index.record_backoffs(decisions[-1].backoffs)
    assert [len(each.backoffs) for each in decisions] == [MAX_BACKOFFS, 1, 0]
    assert [each.wake_at for each in decisions] == [T0, OPENING, OPENING]


def test_node_behind_blocked_groups_starts_before_later_rollout() -> None:
    index = fleet(MAX_BACKOFFS + 1, MAX_BACKOFFS + 1)
    for rollout in ("R", "later"):
        submit(index, rollout)
    close_teams(index, MAX_BACKOFFS)
    first = decide(index, T0)
    index.record_backoffs(first.backoffs)
    assert first.of(Admit) == ()
    assert decide(index, T0).of(Admit) == (Admit("R", f"n{MAX_BACKOFFS}"),)


def test_fresh_inventory_makes_groups_ready_in_order() -> None:
    index = fleet()
    submit(index)
    close_teams(index)
    before = list(index.pending_groups.ready("R", "fleet"))
    backoffs = decide(index, T0).backoffs
    index.record_backoffs([*reversed(backoffs[1:]), *backoffs[:1]])
    fork = index.fork()
    fork.pending_groups.mark_all()
    assert list(fork.pending_groups.ready("R", "fleet")) == before
    assert (fork.pending_groups.instants, index.pending_groups.instants) == ([], [OPENING])
    assert not index.pending_groups.ready("R", "fleet")


def test_frozen_groups_tried_once() -> None:
    index = fleet()
    submit(index)
    index.apply(FreezeStarted(Freeze("F", "all", "test", "olga", T0, until=T0 + 9 * HOUR_S)))
    decisions = list(watched_hours(index))
    assert sum(len(each.backoffs) for each in decisions) == NODES
    assert index.pending_groups.instants == [T0 + 9 * HOUR_S]


def test_repeated_reports_of_outages_try_nothing_again() -> None:
    index = fleet()
    submit(index)
    decisions = list(watched_hours(index, health=NodeHealth.DOWN))
    assert not any(each.backoffs for each in decisions[2:])


def test_opening_window_makes_all_groups_ready() -> None:
    index = fleet()
    submit(index)
    close_teams(index)
    index.record_backoffs(decide(index, T0).backoffs)
    assert not index.pending_groups.ready("R", "fleet")
    index.advance(OPENING)
    assert len(index.pending_groups.ready("R", "fleet")) == NODES
    assert index.pending_groups.instants == []


def test_changed_backoff_leaves_one_instant() -> None:
    index = fleet(nodes=1)
    submit(index)
    for minute in range(60):
        index.apply(FreezeStarted(Freeze(f"F{minute}", "all", "test", "olga", T0, T0 + HOUR_S + minute % 2)))
        index.record_backoffs(decide(index, T0).backoffs)
        assert len(index.pending_groups.instants) <= 2


def test_good_observations_expire_once_for_each_node() -> None:
    index = fleet()
    for _ in watched_hours(index, hours=1):
        assert sum(map(len, index._pool_index._stale_nodes.values())) <= NODES
    index.advance(T0 + 2 * HOUR_S)
    assert all(index.unavailability(node) is not None for node in index.nodes)


def test_observed_node_behind_unobserved_ones_starts() -> None:
    index = fleet(MAX_OBSERVATIONS + 100, MAX_OBSERVATIONS + 100, observed=False)
    submit(index)
    last = f"n{MAX_OBSERVATIONS + 99}"
    index.record_observations(observed_up([last], T0), T0)
    decision = decide(index, T0)
    assert [each.node for each in decision.of(Admit)] == [last]
    assert len(decision.of(Observe)) == MAX_OBSERVATIONS


@pytest.mark.parametrize("more", [0, 1])
def test_decision_passes_over_so_many_unobserved_nodes(more: int) -> None:
    nodes = MAX_OBSERVATIONS + MAX_PASSED_OVER + more
    index = fleet(nodes, nodes, observed=False)
    submit(index)
    last = f"n{nodes - 1}"
    index.record_observations(observed_up([last], T0), T0)
    assert len(decide(index, T0).of(Admit)) == 1 - more


def test_full_wave_tries_no_node() -> None:
    index = fleet()
    submit(index, waves=(WaveDef("fleet", max_parallel=1),))
    admit(index, "n0")
    decision = decide(index, T0)
    assert (decision.of(Admit), decision.backoffs) == ((), ())


def test_recount_reports_wrong_counts() -> None:
    index = fleet(nodes=4)
    submit(index)
    assert wrong_counts(index) == []
    index.pool("rack/r1").down.add("n1")
    index.counters("R").failed.add("n2")
    index.recounted_failures["R"] = [Failure("n3#1", "n3", 1, "verify", "it failed", T0)]
    del index.pending_groups._ready["R", "fleet"][0]
    assert [each.partition(" is ")[0] for each in wrong_counts(index)][:2] == ["failed of R", "pool rack/r1"]
    assert len(wrong_counts(index)) == 4
