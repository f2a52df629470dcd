"""The gate page and the approval dialog: what a user reads before a vote."""

from __future__ import annotations

from pathlib import Path

from tests.support.replayed_fleet import DIGEST
from tests.tui.harness import (
    list_text,
    paused_fleet,
    run_console,
    running_fleet,
    screen_text,
    start_gate_fleet,
    wait_for_text,
    wait_until,
)
from tui.operations.dialog import Dialog
from tui.screens.gates import GatesPage
from tui.screens.node import NodePage


async def test_gate_page_shows_change_before_plan(socket_dir: Path) -> None:
    async with run_console(start_gate_fleet(), socket_dir) as (app, pilot, _):
        await pilot.press("2")
        # The plan and the review are requests of their own, so they arrive after the votes.
        await wait_until(pilot, lambda: DIGEST in list_text(app, "#content"))
        await wait_until(pilot, lambda: "THE PLAN" in list_text(app, "#content"))
        # The digest stands at the right edge of the gate's line, and is not cut off.
        assert screen_text(app).splitlines()[1].endswith(DIGEST[:12])
        text = list_text(app, "#content")
        order = ("CHANGE", "sysctl.yml, 2 lines", "- hosts: all", "TARGETS", "CHECKS", "NOT PROBED", "DIGEST")
        places = [text.index(each) for each in (*order, "THE PLAN", "VOTES")]
        assert places == sorted(places)
        assert (
            "gate start starts: 8 nodes of 4 teams, at most 4 at once, about 55s, traffic not probed" in text
        )
        assert "sysctl -n net.core.somaxconn" in text
        assert "not probed: client traffic" in text
        assert "maintain[0].vars.somaxconn: 65535" in text


async def test_gate_page_shows_differences_to_previous_rollout(socket_dir: Path) -> None:
    fleet = start_gate_fleet()
    fleet.review |= {
        "previous": "kernel-before",
        "plan_differences": [{"path": "soak", "before": "10m", "after": "20m"}],
        "overrides": [],
        "file_differences": [
            {"path": "sysctl.yml", "change": "changed", "diff": "@@ -1 +1 @@\n-old\n+new"},
            {"path": "blob.bin", "change": "added", "diff": None},
        ],
        "playbooks": [
            {"path": "sysctl.yml", "text": "\n".join(f"line {n}" for n in range(99)), "note": None}
        ],
    }
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await pilot.press("2")
        await wait_until(pilot, lambda: "kernel-before, the previous rollout" in list_text(app, "#content"))
        text = list_text(app, "#content")
        for line in (
            "-soak: 10m",
            "+soak: 20m",
            "sysctl.yml is changed",
            "+new",
            "blob.bin is added (not shown)",
        ):
            assert line in text
        assert "59 more lines: w shows all" in text
        assert "line 98" not in text
        await pilot.press("tab", *["down"] * 7, "w", *["space"] * 8)
        await wait_for_text(pilot, "line 98")


async def test_approvals_stay_visible_after_the_gate_has_opened(socket_dir: Path) -> None:
    async with run_console(running_fleet(), socket_dir, size=(160, 50)) as (_, pilot, _server):
        await pilot.press("enter")
        await wait_for_text(pilot, "APPROVED start", "ana for infra at", "seen")
        await pilot.press("2")
        await wait_for_text(pilot, "no gate waits", "✓ start of kernel-x7k2p", "ana for infra at")
        await pilot.press("a")
        await wait_for_text(pilot, "no gate waits here")


async def test_approval_names_blast_radius_and_votes_it_gives(socket_dir: Path) -> None:
    fleet = start_gate_fleet()
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        await wait_for_text(pilot, "1 for you")
        await pilot.press("a")
        text = " ".join(
            (await wait_for_text(pilot, "Approve start?", "Your approval")).replace("│", " ").split()
        )
        assert "Starts: 8 nodes of 4 teams, at most 4 at once, about 55s, traffic not probed." in text
        assert "Your approval gives the missing vote of infra (owner); then the gate opens." in text
        await pilot.press("escape")


async def test_start_gate_shows_evidence_of_pilot(socket_dir: Path) -> None:
    fleet = start_gate_fleet()
    place = {"attempt": 1, "step": "run.configure"}
    fleet.pilot_evidence = {
        "node": "pay-01",
        "team": "payments",
        "outcome": "changed",
        "reason": "",
        "attempts": 1,
        "steps": [{**place, "action": "run", "state": "ok", "seconds": 72.0, "text": "4 tasks, 1 changed"}],
        "changes": [{**place, "task": "set somaxconn", "diff": "-somaxconn 4096\n+somaxconn 65535"}],
        "logs": [{**place, "lines": 12, "sha256": "0" * 64}],
    }
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await pilot.press("2")
        await wait_until(pilot, lambda: "PILOT" in list_text(app, "#content"))
        text = list_text(app, "#content")
        assert "pay-01 of payments: changed, 1 attempt" in text
        assert "4 tasks, 1 changed" in text
        assert "changed: set somaxconn" in text
        assert "+somaxconn 65535" in text
        assert "the node's page has the logs" in text
        await pilot.press("tab", "home", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, NodePage))
        assert isinstance(app.screen, NodePage)
        assert app.screen.node_name == "pay-01"


async def test_failures_that_cannot_be_read_allow_no_vote(socket_dir: Path) -> None:
    fleet = paused_fleet()
    fleet.failures_error = ({"error": "the store cannot read", "code": "store", "errors": []}, 503)
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await wait_for_text(pilot, "1 for you")
        await pilot.press("2")
        await wait_for_text(pilot, "not read: no approval is possible", "the store cannot read")
        await pilot.press("a")
        await wait_for_text(pilot, "an approval covers the failures that are listed here")
        assert not isinstance(app.screen, Dialog)
    assert not fleet.requests


async def test_unseen_files_ask_for_a_word_of_their_own(socket_dir: Path) -> None:
    fleet = start_gate_fleet()
    fleet.review |= {
        "unseen": ["group_vars/all.yml: not shown: encrypted (31 bytes, sha256 abc)"],
        "files": [{"path": "roles/a/tasks/main.yml", "text": "- raw: drain", "note": None}],
        "commands": [{"path": "team.pay.0.ssh: run", "text": "systemctl is-active pay"}],
        "overrides": [{"node": "n1", "rollout": "kernel-before", "step": "run.configure", "text": "exit 2"}],
    }
    async with run_console(fleet, socket_dir, size=(100, 40)) as (app, pilot, _):
        await pilot.press("2")
        await wait_until(pilot, lambda: "THE PLAN" in list_text(app, "#content"))
        text = list_text(app, "#content")
        assert "NOT SHOWN" in text
        assert "group_vars/all.yml: not shown: encrypted" in text
        assert "FILE roles/a/tasks/main.yml, 1 line" in text
        assert "systemctl is-active pay" in text
        assert "n1 in kernel-before, run.configure: exit 2" in text
        await pilot.press("a")
        await wait_for_text(pilot, "Not shown: group_vars/all.yml", "type unseen to approve them")
        await pilot.press(*"read", "enter")
        await wait_for_text(pilot, "unseen: missing; type one")
        assert not fleet.requests
        await pilot.press(*"unseen", "enter")
        await wait_until(pilot, lambda: bool(fleet.requests))
    body = fleet.requests[0][2]
    assert (body["reason"], body["unseen"]) == ("read", True)


async def test_submitter_is_not_asked_where_four_eyes_hold(socket_dir: Path) -> None:
    fleet = start_gate_fleet()
    fleet.four_eyes, fleet.whoami = True, fleet.whoami | {"user": "bo", "uid": 1002}
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        # Without the plan, which the fleet page does not load.
        shown = await wait_for_text(pilot, "kernel-x7k2p", "waits for votes of infra")
        assert "for you" not in shown
        await pilot.press("2")
        assert "for you" not in await wait_for_text(pilot, "votes missing: infra")


async def test_gate_in_doubt_takes_no_vote(socket_dir: Path) -> None:
    fleet = start_gate_fleet()
    fleet.doubt = "vote/v9: the database has it, but no audit entry made it"
    async with run_console(fleet, socket_dir) as (_, pilot, _server):
        await pilot.press("2")
        await wait_for_text(pilot, "? start of kernel-x7k2p", "in doubt: vote/v9: the database has it")
        await pilot.press("a")
        await wait_for_text(pilot, "no gate waits here")


async def test_rows_of_large_review_are_made_once(socket_dir: Path) -> None:
    fleet = start_gate_fleet()
    text = "- name: set a value\n  raw: something\n" * 25
    files = [{"path": f"roles/r{number}/tasks/main.yml", "text": text, "note": None} for number in range(200)]
    fleet.review |= {"files": files}
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await pilot.press("2")
        await wait_until(pilot, lambda: "THE PLAN" in list_text(app, "#content"))
        page = app.screen
        assert isinstance(page, GatesPage)
        _, made = page._change_items
        page.update_view()
        assert page._change_items[1] is made
        assert len(made) > 200 * 40
