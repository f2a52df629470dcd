"""The model, without Textual: whatever is lost, doubled or late, an answer repairs it."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.replayed import Fleet
from tui.model import KEPT_ENTRIES, Model
from tui.values import nodes_of

NEXT: dict[str, list[tuple[str, str | None]]] = {
    "pending": [("isolating", None), ("done", "skipped"), ("done", "already-current"), ("done", "left")],
    "isolating": [("maintaining", None), ("pending", None), ("failed", None)],
    "maintaining": [("verifying", None), ("failed", None)],
    "verifying": [("done", "changed"), ("failed", None), ("done", "rolled-back")],
    "failed": [("pending", None), ("done", "skipped")],
    "done": [],
}

calm = settings(deadline=None, max_examples=60)

moves = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), max_size=40)


def fleet() -> Fleet:
    """Return eight nodes in four pools, all pending."""
    found = Fleet(pools=4, per_pool=2, at=1_000.0)
    found.state = "running"
    return found


def play(world: Fleet, chosen: list[tuple[int, int]]) -> None:
    """Move nodes along legal edges."""
    names = list(world.nodes)
    for which, way in chosen:
        world.at += 1.0
        name = names[which]
        ways = NEXT[world.nodes[name]["phase"]]
        if ways:
            target, outcome = ways[way % len(ways)]
            world.move(name, target, outcome=outcome, failure="it broke" if target == "failed" else "")


def told(world: Fleet, after: int = 0) -> list[dict[str, Any]]:
    """Return the lines of the stream."""
    return [{"seq": each["seq"], "entry": each} for each in world.entries if each["seq"] > after]


def answers(world: Fleet) -> tuple[Any, Any]:
    """Return how things stand now, as two answers."""
    return copy.deepcopy((world.status(), world.all_nodes()))


def model_of(world: Fleet) -> Model:
    """Return a model that has asked now, and looks at the rollout."""
    model = Model()
    take(model, world, answers(world))
    return model


def take(model: Model, world: Fleet, answered: tuple[Any, Any]) -> None:
    """Give a model both answers."""
    model.status_answered(answered[0])
    model.look_at(world.id)
    model.nodes_answered(world.id, nodes_of(json.dumps(answered[1])))


def picture(model: Model, world: Fleet) -> Any:
    """Return everything of the rollout that is shown and folded."""
    known = model.rollouts[world.id]
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


@calm
@given(before=moves, after=moves)
def test_events_on_an_answer_are_as_good_as_a_later_answer(before: Any, after: Any) -> None:
    world = fleet()
    play(world, before)
    model = model_of(world)
    play(world, after)
    model.lines_told(told(world))
    assert picture(model, world) == picture(model_of(world), world)


@calm
@given(before=moves, after=moves, data=st.data())
def test_an_answer_repairs_any_order_and_any_loss(before: Any, after: Any, data: Any) -> None:
    world = fleet()
    play(world, before)
    model = model_of(world)
    play(world, after)
    lines = told(world)
    chosen = data.draw(st.lists(st.sampled_from(lines), max_size=2 * len(lines)) if lines else st.just([]))
    model.lines_told(chosen)
    take(model, world, answers(world))
    assert picture(model, world) == picture(model_of(world), world)


@calm
@given(first=moves, second=moves, third=moves)
def test_an_answer_that_is_older_than_the_events_takes_nothing_back(
    first: Any, second: Any, third: Any
) -> None:
    world = fleet()
    play(world, first)
    model = model_of(world)
    start = world.seq
    play(world, second)
    late = answers(world)
    play(world, third)
    model.lines_told(told(world, start))
    expected = picture(model, world)
    take(model, world, late)
    shown = picture(model, world)
    assert shown["nodes"] == expected["nodes"]
    assert shown["counts"] == expected["counts"]
    assert shown["in_flight"] == expected["in_flight"]


def test_an_answer_that_is_older_than_the_one_before_takes_nothing_back() -> None:
    world = fleet()
    model = model_of(world)
    late = answers(world)
    play(world, [(0, 0), (1, 0), (0, 0)])
    world.state = "paused"
    world.write("RolloutPaused", rollout=True, reason="fire")
    model.lines_told(told(world))
    take(model, world, answers(world))
    expected = picture(model, world)
    model.status_answered(late[0])
    assert model.rollouts[world.id].state == "paused"
    model.rollout_answered({**late[0]["rollouts"][0], "eta": "2026-11-20T18:45:00.000Z"}, late[0]["seq"])
    assert model.rollouts[world.id].status["eta"] is None
    assert picture(model, world) == expected


@calm
@given(chosen=moves, gap=st.integers(1, 10))
def test_a_missing_entry_is_noticed_by_its_number(chosen: Any, gap: int) -> None:
    world = fleet()
    model = model_of(world)
    start = world.seq
    play(world, chosen)
    lines = told(world, start)
    if len(lines) < 2:
        return
    missing = lines.pop(min(gap, len(lines) - 1) - 1)
    model.wishes.clear()
    model.lines_told(lines)
    assert missing["seq"] < lines[-1]["seq"]
    assert model.wishes["status", ""].urgent
    assert model.wishes["nodes", world.id].urgent


def test_a_heartbeat_beyond_what_was_heard_is_a_loss() -> None:
    world = fleet()
    model = model_of(world)
    model.wishes.clear()
    model.lines_told([{"seq": None, "heartbeat": world.seq}])
    assert not model.wishes
    model.lines_told([{"seq": None, "heartbeat": world.seq + 3}])
    assert model.wishes["status", ""].urgent


def test_an_answer_that_is_older_than_all_kept_entries_is_asked_again() -> None:
    world = fleet()
    model = model_of(world)
    old = answers(world)
    name = next(iter(world.nodes))
    for _ in range(KEPT_ENTRIES // 2 + 10):
        world.move(name, "isolating")
        world.move(name, "pending")
    model.lines_told(told(world, old[0]["seq"]))
    model.wishes.clear()
    model.status_answered(old[0])
    assert ("status", "") in model.wishes


def test_doubled_entries_change_nothing() -> None:
    world = fleet()
    model = model_of(world)
    play(world, [(0, 0), (0, 0), (1, 0)])
    model.lines_told(told(world))
    once = picture(model, world)
    model.lines_told(told(world) * 3)
    assert picture(model, world) == once


def test_progress_says_what_runs_and_who_has_ended() -> None:
    world = fleet()
    model = model_of(world)
    names = list(world.nodes)[:2]
    for name in names:
        world.move(name, "isolating")
    world.live[names[0]].update(percent=40.0, task="Install")
    model.lines_told(told(world))
    model.lines_told(
        [{"seq": None, "progress": [{**each, "rollout": world.id} for each in world.in_flight()]}]
    )
    assert {work.node: (work.percent, work.task) for work in model.rollouts[world.id].in_flight.values()} == {
        names[0]: (40.0, "Install"),
        names[1]: (0.0, ""),
    }
    model.lines_told([{"seq": None, "progress": []}])
    assert not model.rollouts[world.id].in_flight


def test_votes_holds_and_pauses_are_asked_for_at_once() -> None:
    world = fleet()
    model = model_of(world)
    model.wishes.clear()
    world.vote("start", by="ana", uid=1, teams=["infra"])
    model.lines_told(told(world))
    assert model.wishes["status", ""].urgent
    world.write("Frozen", actor="ana", freeze={"scope": "all", "reason": "fire"})
    model.lines_told(told(world))
    assert model.wishes["locks", ""].urgent


def test_a_rollout_that_is_no_longer_told_is_forgotten_unless_it_is_looked_at() -> None:
    world = fleet()
    model = model_of(world)
    world.write("RolloutEnded", rollout=True, at=world.at)
    empty = {"rollouts": [], "trouble": None, "seq": world.seq}
    model.status_answered(empty)  # type: ignore[arg-type]
    assert world.id in model.rollouts
    assert ("rollout", world.id) in model.wishes
    other = Model()
    other.status_answered(answers(world)[0])
    other.status_answered({**empty, "seq": world.seq + 1})  # type: ignore[typeddict-item]
    assert not other.rollouts


def test_nodes_are_kept_of_the_rollouts_looked_at_last() -> None:
    world = fleet()
    model = model_of(world)
    for number in range(3):
        model.look_at(f"other-{number}")
    assert model.rollouts[world.id].nodes is None
    assert all(not pool.nodes for pool in model.rollouts[world.id].pools.values())
