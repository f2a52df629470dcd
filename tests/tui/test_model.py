"""The model without Textual: it shows what the daemon reports, and entries only make it ask again."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutd.control.status_changes import difference, merge
from tests.support.replayed_fleet import ReplayedFleet
from tui.screens.rollout import in_flight_row
from tui.state.model import Model
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


def apply_changed_nodes(model: Model, fleet: ReplayedFleet) -> None:
    query = {"changed_after": str(model.rollouts[fleet.id].nodes_seq)}
    changed = copy.deepcopy(fleet.all_nodes(query))
    model.apply_nodes(fleet.id, parse_nodes([changed]), is_whole=False)


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
    """Return everything of the rollout that responses determine."""
    known = model.rollouts[fleet.id]
    assert known.nodes is not None
    return {
        "status": known.status,
        "in_flight": {name: work["phase"] for name, work in known.in_flight.items()},
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
    model.apply_nodes(fleet.id, parse_nodes(pages))
    apply_changed_nodes(model, fleet)
    known, later = model.rollouts[fleet.id].nodes, model_of(fleet).rollouts[fleet.id].nodes
    assert known is not None
    assert later is not None
    assert [(each.node, each.phase, each.since, each.attempt) for each in known.values()] == [
        (each.node, each.phase, each.since, each.attempt) for each in later.values()
    ]


@property_settings
@given(before=moves, after=moves)
def test_changed_status_equals_a_whole_one(before: Any, after: Any) -> None:
    fleet = pending_fleet()
    apply_moves(fleet, before)
    model, status = model_of(fleet), copy.deepcopy(fleet.status())
    model.apply_status(status)
    pools = model.rollouts[fleet.id].pools
    apply_moves(fleet, after)
    later = copy.deepcopy(fleet.status())
    merged: Any = merge(status, json.loads(json.dumps(difference(status, later))))
    assert merged == later
    model.apply_status(merged)
    assert visible_state(model, fleet)["pools"] == visible_state(model_of(fleet), fleet)["pools"]
    (old,), (new,) = status["rollouts"], merged["rollouts"]
    unchanged = {each["pool"] for each in old["pools"] if each in new["pools"]}
    assert all(model.rollouts[fleet.id].pools[name] is pools[name] for name in unchanged)


@property_settings
@given(before=moves, after=moves, data=st.data())
def test_entries_change_no_figure_and_request_the_rollout(before: Any, after: Any, data: Any) -> None:
    fleet = pending_fleet()
    apply_moves(fleet, before)
    model = model_of(fleet)
    shown = visible_state(model, fleet)
    model.fetch_requests.clear()
    start = fleet.seq
    apply_moves(fleet, after)
    lines = stream_lines(fleet, start)
    # In any order, lost, and twice.
    chosen = data.draw(st.lists(st.sampled_from(lines), max_size=2 * len(lines)) if lines else st.just([]))
    model.apply_stream_lines(chosen)
    assert visible_state(model, fleet) == shown
    assert not chosen or ("changed-nodes", fleet.id) in model.fetch_requests


@property_settings
@given(before=moves, after=moves)
def test_changed_nodes_equal_a_later_response(before: Any, after: Any) -> None:
    fleet = pending_fleet()
    apply_moves(fleet, before)
    model = model_of(fleet)
    apply_moves(fleet, after)
    model.apply_status(fleet.status())
    apply_changed_nodes(model, fleet)
    assert visible_state(model, fleet) == visible_state(model_of(fleet), fleet)


@property_settings
@given(first=moves, second=moves)
def test_pages_older_than_changed_nodes_revert_no_node(first: Any, second: Any) -> None:
    fleet = pending_fleet()
    apply_moves(fleet, first)
    model = model_of(fleet)
    late = copy.deepcopy(fleet.all_nodes())
    apply_moves(fleet, second)
    apply_changed_nodes(model, fleet)
    expected = visible_state(model, fleet)
    model.apply_nodes(fleet.id, parse_nodes([late]))
    assert visible_state(model, fleet) == expected


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


def test_latest_status_of_the_stream_is_applied() -> None:
    fleet = pending_fleet()
    model, earlier = model_of(fleet), copy.deepcopy(fleet.status())
    apply_moves(fleet, [(0, 1), (1, 1)])
    statuses = [{"seq": None, "status": each} for each in (earlier, fleet.status())]
    model.apply_stream_lines(statuses, at=7.0)
    assert (model.seq, model.status_at) == (fleet.seq, 7.0)
    assert model.rollouts[fleet.id].status["in_flight"] == fleet.status()["rollouts"][0]["in_flight"]


def test_completions_count_when_they_happened() -> None:
    fleet = pending_fleet()
    model = model_of(fleet)
    apply_moves(fleet, [(0, 1), (1, 1), (2, 2)])
    model.apply_status(fleet.status(), at=5_000.0)
    model.apply_stream_lines(stream_lines(fleet))
    model.apply_stream_lines(stream_lines(fleet))
    assert [*model.rollouts[fleet.id].recent_completions] == [1_001.0, 1_002.0, 1_003.0]


def test_fleet_wide_entry_requests_nothing_of_a_closed_rollout() -> None:
    fleet = pending_fleet()
    fleet.state = "done"
    model = model_of(fleet)
    model.fetch_requests.clear()
    fleet.write("NodesDiscovered", nodes=["n"])
    model.apply_stream_lines(stream_lines(fleet))
    assert not model.fetch_requests
    fleet.write("FreezeLifted", actor="ana", freeze="f1")
    model.apply_stream_lines(stream_lines(fleet))
    assert ("rollout", fleet.id) in model.fetch_requests


def test_pages_older_than_a_new_node_keep_it() -> None:
    fleet = pending_fleet()
    apply_moves(fleet, [(0, 0)])
    model = model_of(fleet)
    late = copy.deepcopy(fleet.all_nodes())
    joined = [*fleet.nodes][1]
    late["nodes"] = [each for each in late["nodes"] if each["node"] != joined]
    apply_moves(fleet, [(1, 0)])
    apply_changed_nodes(model, fleet)
    expected = visible_state(model, fleet)
    model.apply_nodes(fleet.id, parse_nodes([late]))
    assert visible_state(model, fleet)["nodes"] == expected["nodes"]


def test_daemon_from_before_the_upgrade_is_shown() -> None:
    fleet = pending_fleet()
    apply_moves(fleet, [(0, 0)])
    status, nodes = current_responses(fleet)
    for each in (*status["rollouts"][0]["in_flight"], *nodes["nodes"]):
        del each["admitted_at"]
    model = Model()
    apply_responses(model, fleet, (status, nodes))
    (work,) = model.rollouts[fleet.id].in_flight.values()
    text = "".join(part for part, _ in in_flight_row(work, 60.0, fleet.at + 5, 12)(80))
    assert "0:05" in text


def test_votes_and_freezes_are_requested_at_once() -> None:
    fleet = pending_fleet()
    model = model_of(fleet)
    model.fetch_requests.clear()
    fleet.vote("start", by="ana", uid=1, teams=["infra"])
    model.apply_stream_lines(stream_lines(fleet))
    assert model.fetch_requests["nodes", fleet.id].is_urgent
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


def test_nodes_stay_for_the_last_tracked_rollouts() -> None:
    fleet = pending_fleet()
    model = model_of(fleet)
    for number in range(3):
        model.track_nodes(f"other-{number}")
    assert model.rollouts[fleet.id].nodes is None
    assert all(not pool.nodes for pool in model.rollouts[fleet.id].pools.values())
