"""The timeline: the state of any moment from the audit, its bars and marks, and pools in order."""

from __future__ import annotations

import math
import re
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from machines.model.windows import Window
from tests.support.replayed_fleet import ReplayedFleet
from tests.tui.harness import NOON, paused_fleet, run_console, running_fleet, screen_text, wait_for_text
from tests.tui.test_model import apply_moves, moves, pending_fleet, property_settings
from tui.formatting.lines import line_text, merge_spans
from tui.screens.moment import parse_moment
from tui.state.history import MAX_TRANSITIONS, History
from tui.state.values import NodeState, PoolState
from tui.widgets import timeline
from tui.widgets.timeline import BarCache, TimelineView, TimeScale

WIDE = (200, 50)
CALM = ("media", "payments", "platform")
"""The teams of the replayed fleet without a failure."""


def node_states(fleet: ReplayedFleet) -> list[NodeState]:
    return [
        NodeState(
            node=each["node"],
            seq=fleet.seq,
            team=each["team"],
            pools=tuple(each["pools"]),
            wave=each["wave"],
            phase=each["phase"],
            outcome=each["outcome"],
        )
        for each in fleet.nodes.values()
    ]


def complete_history(fleet: ReplayedFleet) -> History:
    history = History(fleet.id, fleet.seq + 1)
    history.add_earlier([each for each in fleet.entries if each["event"] == "PhaseMoved"], is_complete=True)
    history.add_decisions(each for each in fleet.entries if each["event"] in timeline.MARKS)
    return history


@property_settings
@given(moves, moves, st.integers(1, 5))
def test_history_loaded_backwards_knows_every_moment(
    before: list[tuple[int, int]], after: list[tuple[int, int]], page_size: int
) -> None:
    fleet = pending_fleet()
    seen: list[tuple[float, dict[str, str]]] = []
    for chosen in [*before, *after]:
        if len(seen) == len(before):
            history = History(fleet.id, fleet.seq + 1)
        apply_moves(fleet, [chosen])
        seen.append((fleet.at, {name: node["phase"] for name, node in fleet.nodes.items()}))
    if not after:
        history = History(fleet.id, fleet.seq + 1)
    earlier = [e for e in fleet.entries if e["event"] == "PhaseMoved" and e["seq"] < history.first_seq]
    for entry in fleet.entries:
        if entry["seq"] >= history.first_seq:
            history.add_entry(entry)
    while not history.is_complete:
        page = earlier[-page_size:]
        earlier = earlier[: -len(page) or None]
        history.add_earlier(page, is_complete=len(page) < page_size)
        if len(page) < page_size:
            break
    for at, phases in seen:
        assert {node.node: history.phase_at(node, at).phase for node in node_states(fleet)} == phases


def test_history_keeps_a_bounded_number_of_transitions() -> None:
    fleet = pending_fleet()
    name = next(iter(fleet.nodes))
    entry = fleet.move(name, "isolating")
    history = History(fleet.id, entry["seq"])
    history.is_complete = True
    for number in range(MAX_TRANSITIONS + 10):
        history.add_entry({**entry, "fields": {**entry["fields"], "at": float(number)}})
    assert history.is_full
    assert not history.is_complete
    assert history.loaded_from == 10.0


def test_bar_shows_the_longest_phase_and_every_failure() -> None:
    fleet = pending_fleet()
    nodes = [each for each in node_states(fleet) if each.pools == ("team/payments",)]
    began, first = fleet.at, nodes[0].node
    for seconds, phase, outcome in (
        (20, "isolating", None),
        (3, "maintaining", None),
        (17, "failed", None),
        (1, "pending", None),
        (9, "isolating", None),
        (20, "verifying", None),
        (5, "done", "changed"),
    ):
        fleet.at += seconds
        fleet.move(first, phase, outcome=outcome, failure="no" if phase == "failed" else "")
    scale = TimeScale(began, 10.0, 10, fleet.at + 14)
    bar = line_text(timeline.pool_cells(complete_history(fleet), nodes, scale))
    assert bar == "··◑◑✗◔◔◕· "


def test_marks_show_votes_gates_soaks_windows_and_freezes() -> None:
    fleet = pending_fleet()
    began = fleet.at
    fleet.vote("start", by="ana", uid=1, teams=["infra"])
    fleet.at += 15
    fleet.write("GateOpened", rollout=True, gate="start", wave="", at=fleet.at)
    history = complete_history(fleet)
    scale = TimeScale(began, 10.0, 8, began + 79)
    assert line_text(timeline.decision_marks(history, [(began + 30, began + 55)], scale, None)) == "◆✓ ◷◷◷  "
    assert timeline.start_marks(history, [], scale, None) == []
    window = Window(frozenset({3}), 0, 17, ZoneInfo("UTC"))
    assert line_text(timeline.start_marks(history, [window], scale, None)) == "━━──────"
    freeze = {"id": "f1", "scope": "all", "until": None, "reason": "storm", "by": "ana", "at": began}
    for at, event, fields in (
        (20, "FreezeStarted", {"freeze": freeze}),
        (40, "FreezeLifted", {"freeze": "f1"}),
    ):
        history.add_entry({"event": event, "rollout": None, "at": began + at, "seq": at, "fields": fields})
    assert line_text(timeline.start_marks(history, [window], scale, None)) == "━━‖‖────"


def test_scale_fits_the_rollout_and_follows_the_moment() -> None:
    view = TimelineView()
    scale = view.scale(100, NOON, NOON + 900)
    assert (scale.step, scale.start, scale.column(scale.now)) == (10, NOON, 90)
    view.move(-3, scale)
    assert view.moment == pytest.approx(scale.start + 88 * 10, abs=0.01)
    view.zoom(-1, scale)
    scale = view.scale(100, NOON, NOON + 900)
    assert scale.step == 5
    assert view.moment is not None
    assert 0 <= scale.column(view.moment) < 100
    view.move(1_000, scale)
    assert view.moment is None
    assert view.scale(100, NOON - 86_400 * 9, NOON).step == 5


@pytest.mark.parametrize(
    ("text", "ago"),
    [
        ("10m ago", 600),
        ("1h30m", 5_400),
        ("2026-11-20T18:30:00Z", 600),
        ("18:30", 600),
        ("18:39:59", 1),
        ("18:41", 86_340),
        ("noon", None),
    ],
)
def test_moments_are_times_or_ages(text: str, ago: float | None, utc: None) -> None:
    parsed = parse_moment(text, NOON)
    assert parsed == (None if ago is None else NOON - ago)
    assert parse_moment("2026-11-20 18:30:05", NOON) == NOON - 595
    assert parse_moment("2026-13-20 18:30", NOON) is None


async def test_wide_screen_shows_the_timeline_beside_the_nodes(socket_dir: Path, utc: None) -> None:
    async with run_console(paused_fleet(), socket_dir, size=WIDE) as (app, pilot, _):
        await pilot.press("enter")
        text = await wait_for_text(pilot, "FAILED 1", "15s a column", "│18:40:00", "◕✗✗✗✗✗")
        rows = text.splitlines()
        assert any("FAILED 1" in row and "POOLS 4, most urgent first" in row for row in rows)
        assert re.findall(r"team/\w+", text) == [f"team/{name}" for name in ("search", *CALM)]
        assert "sea001-00   ··········◔◔◑◑◕◕■■■■" in text
        await pilot.press("tab", "down", "enter")
        await wait_for_text(pilot, "▸ sea001-00", "ATTEMPT 1")
        await pilot.press("escape", "t")
        await wait_for_text(pilot, "■✗·")
        await pilot.press("t", "o")
        await wait_for_text(pilot, "by name, 15s a column")
        assert re.findall(r"team/(\w+)", screen_text(app)) == sorted(("search", *CALM))


async def test_moment_shows_what_was_in_flight_then(socket_dir: Path, utc: None) -> None:
    async with run_console(paused_fleet(), socket_dir, size=WIDE) as (_, pilot, _server):
        await pilot.press("enter")
        await wait_for_text(pilot, "◕✗✗✗✗✗")
        await pilot.press("at")
        await wait_for_text(pilot, "show the rollout at")
        await pilot.press(*"18:48:45", "enter")
        await wait_for_text(
            pilot,
            "AT 2026-11-20 18:48:45",
            "33 %  4 of 12 changed, 2 in flight, 6 pending",
            "◑ sea001-01 maintaining for 0:05",
            "ana voted yes at start: seen",
            "18:48:40  ◑ sea001-01 isolating → maintaining",
            "▼18:48:45",
        )
        await pilot.press("right")
        await wait_for_text(pilot, "AT 2026-11-20 18:49:14", "✗ sea001-01 failed      for 0:14")
        await pilot.press("0")
        await wait_for_text(pilot, "FAILED 1", "WAITING 5")


async def test_earlier_pages_of_the_audit_load_when_scrolled_to(socket_dir: Path, utc: None) -> None:
    fleet = ReplayedFleet(pools=10, per_pool=130, at=NOON)
    fleet.state = "running"
    for name in fleet.nodes:
        fleet.at += 10
        fleet.move(name, "isolating")
        fleet.move(name, "done", outcome="changed")
    async with run_console(fleet, socket_dir, size=WIDE) as (app, pilot, _):
        await pilot.press("enter")
        await wait_for_text(pilot, "1,300 of 1,300 changed")
        history = app.model.history(fleet.id)
        assert not history.is_complete
        await pilot.press("at", *"18:40:15", "enter")
        await wait_for_text(pilot, "0 %  1 of 1,300 changed, 0 in flight, 1,299 pending")
        assert history.loaded_from == -math.inf


async def test_ascii_timeline_has_distinct_marks(socket_dir: Path, utc: None) -> None:
    async with run_console(paused_fleet(), socket_dir, size=WIDE, ascii_only=True) as (app, pilot, _):
        await pilot.press("enter")
        await wait_for_text(pilot, "..iimmvv", "vXXXX", "! vote  y gate open  % soak")
        await pilot.press("left")
        await wait_for_text(pilot, "V18:52:", "AT 2026-11-20")
        assert screen_text(app).isascii()


async def test_many_full_pools_are_one_line(socket_dir: Path) -> None:
    fleet = ReplayedFleet(pools=40, per_pool=3, at=NOON)
    fleet.state = "running"
    for name in list(fleet.nodes)[1::3]:
        fleet.move(name, "isolating")
    async with run_console(fleet, socket_dir, size=(120, 40)) as (_, pilot, _server):
        await pilot.press("enter")
        await wait_for_text(pilot, "80 wait behind 40 full pools")
        await pilot.press("end", "enter")
        await wait_for_text(pilot, "80 nodes that wait: wait behind 40 full pools")


async def test_timeline_draws_nothing_after_now(socket_dir: Path, utc: None) -> None:
    fleet = running_fleet()
    async with run_console(fleet, socket_dir, size=WIDE) as (_, pilot, _server):
        await pilot.press("enter")
        text = await wait_for_text(pilot, "◔◔◔◑◑◑◕◕◕■")
        (row,) = [row for row in text.splitlines() if "team/platform" in row]
        bar = row.partition("team/platform ")[2]
        assert re.fullmatch(r"·+◔◔◔◑◑◑◕◕◕■·+ {10,}0/1 +1/3", bar.rstrip()), bar


@property_settings
@example([([], 19), ([(0, 0), (0, 1)], 13), ([(0, 0), (0, 0), (0, 1), (0, 0), (0, 0), (0, 0)], 0), ([], 0)])
@given(st.lists(st.tuples(moves, st.integers(0, 30)), min_size=2, max_size=6))
def test_bar_extended_by_events_equals_one_drawn_at_once(
    steps: list[tuple[list[tuple[int, int]], int]],
) -> None:
    fleet = pending_fleet()
    history, view, bars = History(fleet.id, 1), TimelineView(), BarCache()
    history.is_complete = True
    pool = PoolState("p", 8, 0, 0, 0, 0, 0, 1)
    for chosen, seconds in steps:
        sent = fleet.seq
        apply_moves(fleet, chosen)
        for entry in fleet.entries[sent:]:
            history.add_entry(entry)
        fleet.at += seconds
        pool.nodes, pool.version = node_states(fleet), pool.version + 1
        scale = view.scale(40, 1_000.0, fleet.at)
        extended = bars.bar(history, pool, scale, None)
        assert extended == merge_spans(timeline.pool_cells(history, pool.nodes, scale))
