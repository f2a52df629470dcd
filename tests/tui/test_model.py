"""The model without Textual: the next response repairs every lost, duplicate or late entry."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.replayed_fleet import ReplayedFleet
from tui.state.model import MAX_ENTRIES, Model
from tui.state.values import parse_nodes

TRANSITIONS: dict[str, list[tuple[str, str | None]]] = {
    "pending": [("isolating", None), ("done", "skipped"), ("done", "already-current"), ("done", "left")],
    "isolating": [("maintaining", None), ("pending", None), ("failed", None)],
    "maintaining": [("verifying", None), ("failed", None)],
    "verifying": [("done", "changed"), ("failed", None), ("done", "rolled-back")],
    "failed": [("pending", None), ("done", "skipped")],
    "done": [],
}

property_settings = settings(deadline=None, max_examples=60)

moves = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), max_size=40)


def pending_fleet() -> ReplayedFleet:
    """Return eight nodes in four pools, all pending."""
    fleet = ReplayedFleet(pools=4, per_pool=2, at=1_000.0)
    fleet.state = "running"
    return fleet


def apply_moves(fleet: ReplayedFleet, chosen: list[tuple[int, int]]) -> None:
    """Move nodes along legal edges."""
    names = list(fleet.nodes)
    for which, way in chosen:
        fleet.at += 1.0
        name = names[which]
        ways = TRANSITIONS[fleet.nodes[name]["phase"]]
        if ways:
            target, outcome = ways[way % len(ways)]
            fleet.move(name, target, outcome=outcome, failure="it broke" if target == "failed" else "")


def stream_lines(fleet: ReplayedFleet, after: int = 0) -> list[dict[str, Any]]:
    """Return the lines of the event stream after an entry."""
    return [{"seq": each["seq"], "entry": each} for each in fleet.entries if each["seq"] > after]


def current_responses(fleet: ReplayedFleet) -> tuple[Any, Any]:
    """Return the current status and nodes, as two responses."""
    return copy.deepcopy((fleet.status(), fleet.all_nodes()))


def model_of(fleet: ReplayedFleet) -> Model:
    """Return a model with both responses, which tracks the rollout."""
    model = Model()
    apply_responses(model, fleet, current_responses(fleet))
    return model


def apply_responses(model: Model, fleet: ReplayedFleet, responses: tuple[Any, Any]) -> None:
    model.apply_status(responses[0])
    model.track_nodes(fleet.id)
    model.apply_nodes(fleet.id, parse_nodes([responses[1]]))


def visible_state(model: Model, fleet: ReplayedFleet) -> Any:
    """Return everything of the rollout that responses and entries determine."""
    known = model.rollouts[fleet.id]
    assert known.nodes is not None
    return {
        "counts": known.counts,
        "percent": known.percent,
        "in_flight": {name: work.phase for name, work in known.in_flight.items()},
        "pools": {
            name: (pool.total, pool.done, pool.failed, pool.in_flight) for name, pool in known.pools.items()
        },
        "members": {name: [node.node for node in pool.nodes] for name, pool in known.pools.items()},
        "nodes": {
            name: (
                node.phase,
                node.outcome,
                node.attempt,
                node.isolated,
                node.since,
                node.admitted_at,
                node.team,
            )
            for name, node in known.nodes.items()
        },
    }


@property_settings
@given(before=moves, between=moves, after=moves)
def test_pages_of_different_entries_equal_a_later_response(before: Any, between: Any, after: Any) -> None:
    fleet = pending_fleet()
    apply_moves(fleet, before)
    model, first = Model(), copy.deepcopy(fleet.all_nodes({"limit": "2"}))
    model.apply_status(fleet.status())
    model.track_nodes(fleet.id)
    apply_moves(fleet, between)
    pages = [first, copy.deepcopy(fleet.all_nodes({"after": first["next"]}))]
    apply_moves(fleet, after)
    model.apply_stream_lines(stream_lines(fleet))
    model.apply_nodes(fleet.id, parse_nodes(pages))
    known, later = model.rollouts[fleet.id].nodes, model_of(fleet).rollouts[fleet.id].nodes
    assert known is not None
    assert later is not None
    assert [(each.node, each.phase, each.since, each.attempt) for each in known.values()] == [
        (each.node, each.phase, each.since, each.attempt) for each in later.values()
    ]


@property_settings
@given(before=moves, after=moves)
def test_response_with_events_equals_a_later_response(before: Any, after: Any) -> None:
    fleet = pending_fleet()
    apply_moves(fleet, before)
    model = model_of(fleet)
    apply_moves(fleet, after)
    model.apply_stream_lines(stream_lines(fleet))
    assert visible_state(model, fleet) == visible_state(model_of(fleet), fleet)


@property_settings
@given(before=moves, after=moves, data=st.data())
def test_response_repairs_any_order_and_loss(before: Any, after: Any, data: Any) -> None:
    fleet = pending_fleet()
    apply_moves(fleet, before)
    model = model_of(fleet)
    apply_moves(fleet, after)
    lines = stream_lines(fleet)
    chosen = data.draw(st.lists(st.sampled_from(lines), max_size=2 * len(lines)) if lines else st.just([]))
    model.apply_stream_lines(chosen)
    apply_responses(model, fleet, current_responses(fleet))
    assert visible_state(model, fleet) == visible_state(model_of(fleet), fleet)


@property_settings
@given(first=moves, second=moves, third=moves)
def test_response_older_than_events_reverts_nothing(first: Any, second: Any, third: Any) -> None:
    fleet = pending_fleet()
    apply_moves(fleet, first)
    model = model_of(fleet)
    start = fleet.seq
    apply_moves(fleet, second)
    late = current_responses(fleet)
    apply_moves(fleet, third)
    model.apply_stream_lines(stream_lines(fleet, start))
    expected = visible_state(model, fleet)
    apply_responses(model, fleet, late)
    shown = visible_state(model, fleet)
    assert shown["nodes"] == expected["nodes"]
    assert shown["counts"] == expected["counts"]
    assert shown["in_flight"] == expected["in_flight"]


def test_response_older_than_the_previous_reverts_nothing() -> None:
    fleet = pending_fleet()
    model = model_of(fleet)
    late = current_responses(fleet)
    apply_moves(fleet, [(0, 0), (1, 0), (0, 0)])
    fleet.state = "paused"
    fleet.write("RolloutPaused", rollout=True, reason="fire")
    model.apply_stream_lines(stream_lines(fleet))
    apply_responses(model, fleet, current_responses(fleet))
    expected = visible_state(model, fleet)
    model.apply_status(late[0])
    assert model.rollouts[fleet.id].state == "paused"
    model.apply_rollout({**late[0]["rollouts"][0], "eta": "2026-11-20T18:45:00.000Z"}, late[0]["seq"])
    assert model.rollouts[fleet.id].status["eta"] is None
    assert visible_state(model, fleet) == expected


@property_settings
@given(chosen=moves, gap=st.integers(1, 10))
def test_missing_entry_requests_everything_again(chosen: Any, gap: int) -> None:
    fleet = pending_fleet()
    model = model_of(fleet)
    start = fleet.seq
    apply_moves(fleet, chosen)
    lines = stream_lines(fleet, start)
    if len(lines) < 2:
        return
    missing = lines.pop(min(gap, len(lines) - 1) - 1)
    model.fetch_requests.clear()
    model.apply_stream_lines(lines)
    assert missing["seq"] < lines[-1]["seq"]
    assert model.fetch_requests["status", ""].is_urgent
    assert model.fetch_requests["nodes", fleet.id].is_urgent


def test_heartbeat_ahead_of_the_stream_is_a_loss() -> None:
    fleet = pending_fleet()
    model = model_of(fleet)
    model.fetch_requests.clear()
    model.apply_stream_lines([{"seq": None, "heartbeat": fleet.seq}])
    assert not model.fetch_requests
    model.apply_stream_lines([{"seq": None, "heartbeat": fleet.seq + 3}])
    assert model.fetch_requests["status", ""].is_urgent


def test_response_older_than_kept_entries_is_requested_again() -> None:
    fleet = pending_fleet()
    model = model_of(fleet)
    old = current_responses(fleet)
    name = next(iter(fleet.nodes))
    for _ in range(MAX_ENTRIES // 2 + 10):
        fleet.move(name, "isolating")
        fleet.move(name, "pending")
    model.apply_stream_lines(stream_lines(fleet, old[0]["seq"]))
    model.fetch_requests.clear()
    model.apply_status(old[0])
    assert ("status", "") in model.fetch_requests


def test_duplicate_entries_change_nothing() -> None:
    fleet = pending_fleet()
    model = model_of(fleet)
    apply_moves(fleet, [(0, 0), (0, 0), (1, 0)])
    model.apply_stream_lines(stream_lines(fleet))
    once = visible_state(model, fleet)
    model.apply_stream_lines(stream_lines(fleet) * 3)
    assert visible_state(model, fleet) == once


def test_progress_line_replaces_the_nodes_in_flight() -> None:
    fleet = pending_fleet()
    model = model_of(fleet)
    names = list(fleet.nodes)[:2]
    for name in names:
        fleet.move(name, "isolating")
    fleet.in_progress[names[0]].update(percent=40.0, task="Install")
    model.apply_stream_lines(stream_lines(fleet))
    model.apply_stream_lines(
        [{"seq": None, "progress": [{**each, "rollout": fleet.id} for each in fleet.in_flight()]}]
    )
    assert {work.node: (work.percent, work.task) for work in model.rollouts[fleet.id].in_flight.values()} == {
        names[0]: (40.0, "Install"),
        names[1]: (0.0, ""),
    }
    model.apply_stream_lines([{"seq": None, "progress": []}])
    assert not model.rollouts[fleet.id].in_flight


def test_votes_and_freezes_are_requested_at_once() -> None:
    fleet = pending_fleet()
    model = model_of(fleet)
    model.fetch_requests.clear()
    fleet.vote("start", by="ana", uid=1, teams=["infra"])
    model.apply_stream_lines(stream_lines(fleet))
    assert model.fetch_requests["status", ""].is_urgent
    fleet.write("FreezeStarted", actor="ana", freeze={"scope": "all", "reason": "fire"})
    model.apply_stream_lines(stream_lines(fleet))
    assert model.fetch_requests["locks", ""].is_urgent


def test_closed_rollout_is_dropped_unless_tracked() -> None:
    fleet = pending_fleet()
    model = model_of(fleet)
    fleet.write("RolloutEnded", rollout=True, at=fleet.at)
    empty = {"rollouts": [], "trouble": None, "seq": fleet.seq}
    model.apply_status(empty)  # type: ignore[arg-type]
    assert fleet.id in model.rollouts
    assert ("rollout", fleet.id) in model.fetch_requests
    other = Model()
    other.apply_status(current_responses(fleet)[0])
    other.apply_status({**empty, "seq": fleet.seq + 1})  # type: ignore[typeddict-item]
    assert not other.rollouts


def test_rollout_that_ends_is_requested_for_its_exceptions() -> None:
    fleet = pending_fleet()
    model = model_of(fleet)
    fleet.write("RolloutEnded", rollout=True, at=fleet.at)
    model.fetch_requests.clear()
    model.apply_stream_lines(stream_lines(fleet))
    assert ("rollout", fleet.id) in model.fetch_requests


def test_nodes_stay_for_the_last_tracked_rollouts() -> None:
    fleet = pending_fleet()
    model = model_of(fleet)
    for number in range(3):
        model.track_nodes(f"other-{number}")
    assert model.rollouts[fleet.id].nodes is None
    assert all(not pool.nodes for pool in model.rollouts[fleet.id].pools.values())


def test_isolated_node_keeps_its_slot_from_failure_to_retry() -> None:
    fleet = pending_fleet()
    name = next(iter(fleet.nodes))
    fleet.move(name, "isolating")
    fleet.move(name, "failed", failure="it broke")
    model = model_of(fleet)
    pool = fleet.nodes[name]["pools"][0]
    seen = []
    for phase in ("pending", "isolating", "maintaining"):
        entry = fleet.move(name, phase)
        entry["fields"]["isolated"] = None
        model.apply_stream_lines([{"seq": entry["seq"], "entry": entry}])
        seen.append(model.rollouts[fleet.id].pools[pool].used)
    assert seen == [1, 1, 1]
