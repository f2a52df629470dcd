"""A watch confirms all its reports at once: what that changes, and until when it holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from machines.facts.fleet_facts import FactsSnapshot
from machines.facts.projection import Projection
from machines.model.events import NodesDiscovered, NodesRemoved
from machines.model.limits import Limits, PoolRule
from machines.model.node import Node, NodeHealth, Observation
from machines.model.reasons import UnavailabilityCause
from tests.machines.builders import T0
from tests.support.recount import wrong_counts

LIMITS = Limits(pools={"team": PoolRule()})
VALID_S = LIMITS.observe_within_s


def watched(**health: NodeHealth) -> Projection:
    """Return nodes that a watch has reported at T0."""
    nodes = tuple(Node(name, labels={"team": "a"}) for name in health)
    index = Projection.build(FactsSnapshot(nodes=nodes), LIMITS)
    seen = [Observation(name, found, T0, watch="ams") for name, found in health.items()]
    index.record_observations(seen, T0)
    return index


def confirm(index: Projection, at: float) -> None:
    index.record_confirmation("ams", at, at)


def test_confirmed_nodes_stay_up_beyond_their_reports() -> None:
    index = watched(n1=NodeHealth.UP, n2=NodeHealth.UP)
    for minute in range(10):
        confirm(index, T0 + minute * VALID_S / 2)
        assert index.unavailability("n1") is None
    seen = index.observation("n1")
    assert seen is not None
    assert seen.at == T0 + 9 * VALID_S / 2
    assert wrong_counts(index) == []


def test_nodes_without_confirmation_expire_together() -> None:
    index = watched(n1=NodeHealth.UP, n2=NodeHealth.UP)
    confirm(index, T0 + 50.0)
    index.advance(T0 + 50.0 + VALID_S - 0.1)
    assert not index.pool("team/a").unknown
    index.advance(T0 + 50.0 + VALID_S)
    assert index.pool("team/a").unknown == {"n1", "n2"}
    confirm(index, T0 + 500.0)
    assert not index.pool("team/a").unknown
    assert wrong_counts(index) == []


def test_report_after_confirmation_expires_by_itself() -> None:
    index = watched(n1=NodeHealth.UP, n2=NodeHealth.UP)
    confirm(index, T0 + 10.0)
    index.record_observations([Observation("n1", NodeHealth.UP, T0 + 30.0, watch="ams")], T0 + 30.0)
    index.advance(T0 + 10.0 + VALID_S)
    assert index.pool("team/a").unknown == {"n2"}
    index.advance(T0 + 30.0 + VALID_S)
    assert index.pool("team/a").unknown == {"n1", "n2"}


def test_confirmed_outage_lasts_and_improves_with_the_last_confirmation() -> None:
    index = watched(n1=NodeHealth.DOWN, n2=NodeHealth.UP)
    confirm(index, T0 + 40.0)
    index.advance(T0 + VALID_S)
    down = index.unavailability("n1")
    assert down is not None
    assert (down.code, down.since) == (UnavailabilityCause.DOWN, T0)
    assert index.next_change() == T0 + 40.0 + VALID_S


def test_dropped_report_is_asked_for_again() -> None:
    index = watched(n1=NodeHealth.UP, n2=NodeHealth.UP)
    assert not index.lacks_reports("ams")
    index.apply(NodesRemoved(("n1",)))
    index.apply(NodesDiscovered((Node("n1", labels={"team": "a"}),)))
    assert index.lacks_reports("ams")
    index.expect_reports("ams")
    assert not index.lacks_reports("ams")


def test_observation_without_watch_is_not_confirmed() -> None:
    index = watched(n1=NodeHealth.UP)
    index.record_observations([Observation("n1", NodeHealth.UP, T0 + 1.0)], T0 + 1.0)
    assert index.lacks_reports("ams")
    confirm(index, T0 + 30.0)
    index.advance(T0 + 1.0 + VALID_S)
    assert index.unavailability("n1") is not None


def test_clock_set_back_drops_later_confirmations() -> None:
    index = watched(n1=NodeHealth.UP)
    confirm(index, T0 + 50.0)
    index.advance(T0 + 20.0)
    assert index.unavailability("n1") is None
    index.advance(T0 + VALID_S)
    assert index.unavailability("n1") is not None


def test_fork_sees_no_later_confirmation() -> None:
    index = watched(n1=NodeHealth.UP)
    confirm(index, T0 + 10.0)
    fork = index.fork()
    confirm(index, T0 + 50.0)
    fork.advance(T0 + 10.0 + VALID_S)
    index.advance(T0 + 10.0 + VALID_S)
    assert fork.unavailability("n1") is not None
    assert index.unavailability("n1") is None


def expired_alone(index: Projection) -> float:
    return T0 + VALID_S


def expired_together(index: Projection) -> float:
    confirm(index, T0 + 1.0)
    return T0 + 1.0 + VALID_S


def confirmed_late(index: Projection) -> float:
    index.advance(T0 + 3 * VALID_S)
    confirm(index, T0 + 3 * VALID_S)
    return T0 + 3 * VALID_S


def valid_again(index: Projection) -> float:
    index.advance(T0 + 3 * VALID_S)
    return T0 + 1.0


@pytest.mark.parametrize("become_due", [expired_alone, expired_together, confirmed_late, valid_again])
def test_question_between_parts_sees_no_expired_node_up(become_due: Callable[[Projection], float]) -> None:
    index = watched(**{f"n{number}": NodeHealth.UP for number in range(5)}, n5=NodeHealth.DOWN)
    index.judged_at_once = 2
    now = become_due(index)
    parts = 0
    while index.advance_in_part(now):
        parts += 1
        assert wrong_counts(index.at(now)) == []
        assert index.at(now + 1.0) is not index
    assert parts >= 1
    assert index.at(now) is index
    assert wrong_counts(index) == []
