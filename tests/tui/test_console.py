"""The console with Textual's pilot: what it sends first, what it shows second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.replayed import DIGEST, Fleet
from tests.tui.house import NOON, broken, console, rows, running, screen, shows, small, until
from tui import actions
from tui.app import Console
from tui.listing import Listing


def listed(app: Console, name: str) -> str:
    """Return all that a listing holds."""
    return "\n".join(rows(app.screen.query_one(name, Listing)))


# -- what is shown


async def test_the_fleet_says_how_far_how_it_stands_and_what_waits_for_us(place: Path) -> None:
    async with console(small(), place) as (_, pilot, _voice):
        await shows(pilot, "kernel-x7k2p", "1 for you", "start waits for votes of infra (owner)", "0/12")


async def test_a_rollout_shows_pools_what_is_in_flight_and_why_the_rest_waits(place: Path) -> None:
    async with console(running(), place) as (app, pilot, _):
        await pilot.press("enter")
        await shows(
            pilot, "IN FLIGHT 3", "POOLS 4", "WAITING 5", "Set the value", "4 of 12 done, 3 in flight"
        )
        waits = listed(app, "#now")
        assert "pool team/payments is full: pay000-01 has its slot" in waits
        assert "2 next  pla003-01" in waits
        pools = rows(app.screen.query_one("#pools", Listing))
        assert any("team/payments" in each and "■◑·" in each and "1/1" in each for each in pools)


async def test_events_are_drawn_as_they_come(place: Path) -> None:
    world = running()
    async with console(world, place) as (_, pilot, _voice):
        await pilot.press("enter")
        await shows(pilot, "3 in flight")
        world.move("sea001-01", "done", outcome="changed")
        await shows(pilot, "5 of 12 done, 2 in flight")


async def test_a_node_shows_steps_and_its_log(place: Path) -> None:
    world = broken()
    world.logs["sea001-01"] = [
        {"offset": 1, "at": "2026-11-20T18:45:00.000Z", "kind": "task", "text": "Restart nginx"},
        {"offset": 2, "at": "2026-11-20T18:45:01.000Z", "kind": "failed", "text": "exit status 1"},
    ]
    async with console(world, place) as (app, pilot, _):
        await pilot.press("enter")
        await shows(pilot, "FAILED 1")
        app.open_node(world.id, "sea001-01")
        await shows(pilot, "ATTEMPT 1", "Restart nginx", "isolate: kubernetes", "nginx did not come back")
        await pilot.press("slash", *"status", "enter")
        await until(pilot, lambda: "Restart nginx" not in screen(app) and "exit status 1" in screen(app))


async def test_nodes_are_found_by_any_word(place: Path) -> None:
    async with console(running(), place) as (_, pilot, _voice):
        await pilot.press("enter", "n")
        await shows(pilot, "12 nodes")
        await pilot.press("slash", *"media", "space", *"pending", "enter")
        await shows(pilot, "1 node,", "med002-02")


async def test_nodes_are_sorted_by_what_wants_a_look(place: Path) -> None:
    async with console(broken(), place) as (app, pilot, _):
        await pilot.press("enter", "n")
        await shows(pilot, "12 nodes, the plan's order")
        await pilot.press("o")
        await shows(pilot, "12 nodes, what wants a look first")
        first, second = rows(app.screen.query_one("#body", Listing))[:2]
        assert "✗ sea001-01" in first
        assert "◑ pay000-01" in second
        await pilot.press("o", "o", "o")
        await shows(pilot, "12 nodes, the plan's order")


async def test_what_is_longer_than_the_screen_is_read_whole(place: Path) -> None:
    world = broken()
    world.nodes["sea001-01"]["failure"]["message"] = "a" * 90 + " and its end"
    world.logs["sea001-01"] = [
        {
            "offset": 1,
            "at": "2026-11-20T18:45:00.000Z",
            "kind": "failed",
            "text": "b" * 90 + " and its last",
        }
    ]
    async with console(world, place) as (app, pilot, _):
        await pilot.press("enter", "n", "slash", *"failed", "enter")
        await shows(pilot, "1 node,")
        assert "and its end" not in screen(app)
        await pilot.press("l")
        await shows(pilot, "and its end", "esc back")
        await pilot.press("escape", "enter")
        await shows(pilot, "ATTEMPT 1", "bbbb")
        assert "and its last" not in screen(app)
        await pilot.press("l")
        await shows(pilot, "and its last")
        await pilot.press("escape", "tab", "home", "l")
        await shows(pilot, "cordoned, 14 pods evicted", "esc back")
        await pilot.press("escape", "4", "l")
        await shows(pilot, f"entry {world.seq}:", '"event": "PhaseMoved"')


async def test_a_gate_shows_everything_that_is_decided(place: Path) -> None:
    async with console(small(), place) as (app, pilot, _):
        await pilot.press("2")
        await shows(pilot, "VOTES", "DIGEST")
        # The plan is asked for by itself, so it comes after the votes.
        await until(pilot, lambda: DIGEST in listed(app, "#content"))
        text = listed(app, "#content")
        assert "sysctl -n net.core.somaxconn" in text
        assert "not looked at: client traffic" in text
        assert "maintain[0].vars.somaxconn: 65535" in text


async def test_audit_locks_teams_and_keys_each_have_a_screen(place: Path) -> None:
    async with console(running(), place) as (_, pilot, _voice):
        await pilot.press("4")
        await shows(pilot, "entries, the latest first", "maintaining → verifying")
        await pilot.press("v")
        await shows(pilot, "whole:")
        await pilot.press("3")
        await shows(pilot, "SLOTS TAKEN in 3 of 4 pools", "nobody holds a node")
        await pilot.press("5")
        await shows(pilot, "uid 1001", "payments", "pia, pol")
        await pilot.press("question_mark", "pagedown")
        await shows(pilot, "DECIDE AND ACT", "approve")
        await pilot.press("escape", "1")
        await shows(pilot, "kernel-x7k2p")


def test_every_action_has_a_key_of_its_own_and_can_be_carried_out() -> None:
    keys = [key for action in actions.ACTIONS for key in action.key.split(",")]
    assert len(keys) == len(set(keys))
    assert all(action.help and action.title for action in actions.ACTIONS)
    assert all(action.deed is not None for action in actions.ACTIONS if action.group == "decide")


# -- what is sent


async def test_approving_asks_for_a_reason_and_is_bound_to_the_digest(place: Path) -> None:
    world = small()
    async with console(world, place) as (_, pilot, _voice):
        await shows(pilot, "1 for you")
        await pilot.press("2", "a")
        text = await shows(pilot, "Approve start?")
        assert DIGEST[:12] in text
        await pilot.press("enter")
        await shows(pilot, "say something")
        assert not world.calls
        await pilot.press(*"ready", "enter")
        await until(pilot, lambda: bool(world.calls))
    assert world.calls == [
        (
            "POST",
            f"/v1/rollouts/{world.id}/votes",
            {"gate": "start", "yes": True, "reason": "ready", "digest": DIGEST},
        )
    ]


async def test_a_no_at_start_wants_the_digest_typed(place: Path) -> None:
    world = small()
    async with console(world, place) as (_, pilot, _voice):
        await shows(pilot, "1 for you")
        await pilot.press("2", "x")
        await shows(pilot, "Reject start?", "cannot be taken back")
        await pilot.press(*"wrong plan", "enter")
        await shows(pilot, "type b281")
        assert not world.calls
        await pilot.press(*"b281", "enter")
        await until(pilot, lambda: bool(world.calls))
    assert world.calls[0][2]["yes"] is False


async def test_escape_sends_nothing(place: Path) -> None:
    world = running()
    async with console(world, place) as (app, pilot, _):
        await pilot.press("p")
        await shows(pilot, "Pause kernel-x7k2p?")
        await pilot.press(*"why", "escape")
        await until(pilot, lambda: len(app.screen_stack) == 1)
    assert not world.calls


async def test_proceed_is_bound_to_the_failures_that_were_shown(place: Path) -> None:
    world = broken()
    async with console(world, place) as (app, pilot, _):
        await shows(pilot, "1 for you")
        await pilot.press("2")
        await shows(pilot, "WHAT HAS FAILED", "sea001-01")
        await until(pilot, lambda: bool(getattr(app.screen, "shown", None)))
        await pilot.press("a")
        await shows(pilot, "it covers 1 failure: sea001-01#1")
        await pilot.press(*"known", "enter")
        await until(pilot, lambda: bool(world.calls))
    assert world.calls[0][2]["shown"] == ["sea001-01#1"]


async def test_what_wants_a_person_comes_under_a_cursor_that_nobody_has_moved(place: Path) -> None:
    world = running()
    async with console(world, place) as (_, pilot, _voice):
        await pilot.press("enter")
        await shows(pilot, "▌ ◑ pay000-01")
        world.move("sea001-01", "failed", failure="no route to host")
        await shows(pilot, "▌◆ proceed of kernel-x7k2p")
        await pilot.press("down")
        await shows(pilot, "▌ ✗ sea001-01")
        world.move("med002-01", "failed", failure="no route to host")
        await shows(pilot, "FAILED 2", "▌ ✗ sea001-01")


async def test_a_failed_node_is_opened_where_it_is_judged(place: Path) -> None:
    async with console(broken(), place) as (app, pilot, _):
        await pilot.press("2")
        await shows(pilot, "WHAT HAS FAILED 1: a yes covers these")
        await pilot.press("tab", "down", "enter")
        await shows(pilot, "▸ sea001-01", "ATTEMPT 1")
        assert type(app.screen).__name__ == "NodePage"


async def test_nodes_are_listed_from_the_fleet(place: Path) -> None:
    async with console(running(), place) as (_, pilot, _voice):
        await shows(pilot, "kernel-x7k2p")
        await pilot.press("n")
        await shows(pilot, "12 nodes", "sea001-01")


async def test_what_is_typed_takes_the_place_of_what_was_proposed(place: Path) -> None:
    world = running()
    async with console(world, place) as (_, pilot, _voice):
        await shows(pilot, "kernel-x7k2p")
        await pilot.press("F")
        await shows(pilot, "Freeze everything?", "frozen from the console")
        await pilot.press(*"storm", "enter")
        await until(pilot, lambda: bool(world.calls))
    assert world.calls[0][2]["reason"] == "storm"


async def test_one_vote_covers_hundreds_of_failures(place: Path) -> None:
    world = Fleet(pools=21, per_pool=10, at=NOON)
    world.state = "paused"
    for name in world.nodes:
        world.move(name, "isolating")
        world.move(name, "failed", failure="no route to host")
    async with console(world, place) as (app, pilot, _):
        await pilot.press("2")
        await shows(pilot, "WHAT HAS FAILED 210: a yes covers these ─")
        await until(pilot, lambda: len(app.screen.shown[world.id]) == 210)  # type: ignore[attr-defined]
        await pilot.press("a")
        await shows(pilot, "it covers 210 failures: ", "and 206 more")
        await pilot.press(*"known", "enter")
        await until(pilot, lambda: bool(world.calls))
    assert len(world.calls[0][2]["shown"]) == 210


async def test_who_was_not_looked_at_lately_is_not_told_as_down(place: Path) -> None:
    world = running()
    unseen = ("pay000-00", "pay000-02")
    world.unseen = {name: f"{name} was last seen up at 2026-11-20T18:35:00Z" for name in unseen}
    async with console(world, place) as (_, pilot, _voice):
        await pilot.press("3")
        text = await shows(pilot, "SLOTS TAKEN in 3 of 4 pools", "pay000-00, pay000-02: unseen: last seen up")
        row = next(line for line in text.splitlines() if "team/payments" in line)
        assert "1/1 down of 3 nodes" in row
        assert "full  2 unseen" in row
        assert "not looked at lately" in text


async def test_what_nobody_has_read_is_not_approved(place: Path) -> None:
    world = broken()
    async with console(world, place) as (app, pilot, _):
        await shows(pilot, "1 for you")
        await pilot.press("a")
        await shows(pilot, "WHAT HAS FAILED 1: a yes covers these", "read it here")
        assert type(app.screen).__name__ == "GatesPage"
        await pilot.press("a")
        await shows(pilot, "it covers 1 failure: sea001-01#1")


async def test_a_node_that_fails_again_is_another_failure(place: Path) -> None:
    world = broken()
    async with console(world, place) as (app, pilot, _):
        await pilot.press("2")
        await shows(pilot, "WHAT HAS FAILED 1: a yes covers these")
        world.move("sea001-01", "pending")
        world.move("med002-01", "failed", failure="it did, too")
        await until(pilot, lambda: app.screen.shown[world.id] == ("med002-01#1",))  # type: ignore[attr-defined]
        world.move("med002-01", "pending")
        world.move("sea001-01", "isolating")
        world.move("sea001-01", "failed", failure="nginx did not come back: exit status 1")
        await until(pilot, lambda: app.screen.shown[world.id] == ("sea001-01#2",))  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("key", "question", "call", "extra"),
    [
        ("r", "Retry sea001-01?", "nodes/sea001-01/retry", {}),
        ("s", "Skip sea001-01?", "nodes/sea001-01/skip", {"put_back": "return"}),
        ("b", "Rollback sea001-01?", "nodes/sea001-01/rollback", {}),
    ],
)
async def test_a_failed_node_is_settled_where_it_is(
    place: Path, key: str, question: str, call: str, extra: dict[str, Any]
) -> None:
    world = broken()
    async with console(world, place, size=(100, 30)) as (app, pilot, _):
        await shows(pilot, "kernel-x7k2p")
        app.open_node(world.id, "sea001-01")
        await shows(pilot, "ATTEMPT 1")
        await pilot.press(key)
        await shows(pilot, question)
        await pilot.press(*"repaired", "enter")
        await until(pilot, lambda: bool(world.calls))
    assert world.calls == [("POST", f"/v1/rollouts/{world.id}/{call}", {"reason": "repaired", **extra})]


async def test_a_freeze_is_one_key_and_one_confirmation_from_anywhere(place: Path) -> None:
    world = running()
    async with console(world, place) as (_, pilot, _voice):
        await pilot.press("4", "F")
        await shows(pilot, "Freeze everything?")
        await pilot.press("enter")
        await until(pilot, lambda: bool(world.calls))
    assert world.calls == [("POST", "/v1/freezes", {"reason": "frozen from the console", "scope": "all"})]


async def test_a_refusal_is_explained(place: Path) -> None:
    world = running()
    world.refusal = (409, {"error": "somebody else was faster", "code": "conflict", "errors": []})
    async with console(world, place) as (_, pilot, _voice):
        await shows(pilot, "kernel-x7k2p")
        await pilot.press("p")
        await shows(pilot, "Pause")
        await pilot.press(*"why", "enter")
        await shows(pilot, "refused: somebody else was faster")


async def test_who_may_not_sees_all_does_nothing_and_is_told_who_could(place: Path) -> None:
    world = broken()
    world.me = {"user": "eve", "uid": 1666, "groups": [], "teams": [], "owner_of": [], "admin": False}
    async with console(world, place, size=(120, 40)) as (app, pilot, _):
        text = await shows(pilot, "kernel-x7k2p", "(not yours)")
        assert "for you" not in text
        for key in ("p", "C", "a"):
            await pilot.press(key)
            await shows(pilot, "not yours: team infra (ana, bo)")
        await pilot.press("F")
        await shows(pilot, "freeze: not yours: members of the teams")
        app.open_node(world.id, "sea001-01")
        await shows(pilot, "ATTEMPT 1")
        for key in ("r", "s", "b", "h"):
            await pilot.press(key)
        assert type(app.screen).__name__ == "NodePage"
    assert not world.calls
