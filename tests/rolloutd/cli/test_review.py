"""Commands for people who vote: gates, review, reasons, and the questions on a terminal."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rolloutd.cli.status import format_gate
from rolloutd.commands import tokens
from tests.rolloutd.canned_daemon import CannedDaemon
from tests.rolloutd.cli.samples import GATE, REASON, ROLLOUT, run
from tests.support.replayed_fleet import ReplayedFleet, comparison_of, review_of

ROOT = Path(__file__).resolve().parents[3]


# -- gates, and why a rollout waits


def test_gates_of_live_rollouts_are_listed(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer("GET", "status", {"rollouts": [ROLLOUT], "trouble": None})
    daemon.answer("GET", "fleetlock", {"gates": []})
    code, out, _ = run(capsys, "gates")
    assert (code, out.splitlines()[0]) == (0, "somaxconn-abcde")
    assert out.splitlines()[1].strip() == "proceed after fleet is waiting: 1 vote of infra"
    code, out, _ = run(capsys, "gates", "--json")
    assert json.loads(out) == [{"rollout": "somaxconn-abcde", **GATE}]
    assert run(capsys, "gates", "-o", "name")[1] == "somaxconn-abcde/proceed/fleet\n"


def test_gate_of_later_names_the_votes_it_will_need() -> None:
    needs = {"owner": {"want": 1, "have": 0}, "teams": [{"team": "media", "want": 1, "have": 0}]}
    later: Any = {**GATE, "gate": "continue", "wave": "canary", "state": "not-asked", "needs": needs}
    text = "continue after canary is not needed yet; later it needs votes of the owner, media"
    assert format_gate(later) == text


def test_closed_rollout_shows_only_gates_with_votes(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    vote = {"by": "alice", "yes": True, "reason": "ok", "at": "2026-11-20T08:00:00Z", "counts": True}
    gates = [
        {**GATE, "votes": [{**vote, "withdrawn": None}]},
        {**GATE, "gate": "start", "state": "not-asked"},
    ]
    daemon.answer("GET", "rollouts/somaxconn", {**ROLLOUT, "state": "cancelled", "gates": gates})
    shown = run(capsys, "status", "somaxconn")[1]
    assert "proceed after fleet was not opened\n    yes by alice" in shown
    assert "start after" not in shown


def test_why_of_a_rollout_groups_its_nodes(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    waiting = [{"node": f"n{number}", "phase": "pending", "reason": REASON} for number in range(7)]
    daemon.answer("GET", "rollouts/somaxconn", ROLLOUT)
    daemon.answer("GET", "rollouts/somaxconn-abcde/nodes", {"nodes": waiting})
    code, out, _ = run(capsys, "why", "somaxconn")
    first, second = out.splitlines()
    assert (code, first.startswith("somaxconn-abcde is paused: ")) == (0, True)
    assert second.startswith("  7 nodes (n0, n1, n2, n3, n4 and 2 more): ")


# -- questions on a terminal


def ask_on_terminal(answer: str, *words: str) -> tuple[int, str]:
    """Run a command at a terminal, answer its question, and return its exit code and what it showed."""
    terminal, inside = pty.openpty()
    command = [sys.executable, "-m", "rolloutd.cli", *words]
    with subprocess.Popen(command, cwd=ROOT, stdin=inside, stdout=inside, stderr=inside) as asked:
        os.write(terminal, f"{answer}\n".encode())
        code = asked.wait(timeout=30)
    os.close(inside)
    shown = os.read(terminal, 65536).decode()
    os.close(terminal)
    return code, " ".join(shown.split())


@pytest.mark.parametrize(("answer", "sent"), [("n", False), ("\x04", False), ("y", True)])
def test_cancel_on_a_terminal_asks_first(daemon: CannedDaemon, answer: str, sent: bool) -> None:
    daemon.answer("GET", "rollouts/r", ROLLOUT)
    daemon.answer("POST", "rollouts/r/cancel", ROLLOUT)
    code, shown = ask_on_terminal(answer, "cancel", "r", "--reason", "wrong plan")
    assert "finish 1 node in flight, never start 3 pending nodes; this cannot be undone" in shown
    assert ("nothing was done" in shown, "Traceback" in shown) == (not sent, False)
    assert (code, [each[0] for each in daemon.requests][-1]) == ((0, "POST") if sent else (1, "GET"))


@pytest.mark.parametrize(("answer", "sent"), [("n", False), ("y", True)])
def test_approve_on_a_terminal_shows_what_it_starts(daemon: CannedDaemon, answer: str, sent: bool) -> None:
    gate = {**GATE, "gate": "start", "wave": None}
    review = {**review_of("somaxconn-abcde"), "gates": [review_of("r")["gates"][0]]}
    daemon.answer("GET", "rollouts/r", {**ROLLOUT, "owner": "infra", "gates": [gate]})
    daemon.answer("GET", "rollouts/somaxconn-abcde/review", review)
    daemon.answer("POST", "rollouts/r/votes", gate)
    code, shown = ask_on_terminal(answer, "approve", "r", "start", "--reason", "read")
    assert "start starts 8 nodes of 4 teams, at most 4 at once, about 55s, traffic not probed" in shown
    assert "your approval gives the missing vote of infra (owner); then the gate opens" in shown
    method, _, _, body = daemon.requests[-1]
    assert (code, method) == ((0, "POST") if sent else (1, "GET"))
    # The vote is for what was shown.
    assert not sent or body["digest"] == gate["digest"]


def test_approve_on_a_terminal_is_for_the_gate_that_it_shows(daemon: CannedDaemon) -> None:
    """The next wave may be over, and its gate wait, when the user answers."""
    gate = {**GATE, "gate": "continue", "wave": "canary"}
    daemon.answer("GET", "rollouts/r", {**ROLLOUT, "owner": "infra", "gates": [gate]})
    daemon.answer("GET", "rollouts/somaxconn-abcde/review", review_of("somaxconn-abcde"))
    daemon.answer("POST", "rollouts/r/votes", gate)
    code, _ = ask_on_terminal("y", "approve", "r", "continue", "--reason", "read")
    assert (code, daemon.requests[-1][3].get("wave")) == (0, "canary")


def test_token_is_for_the_gate_that_waits(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It may be used when that gate is open and the next one waits."""
    (tmp_path / "key").write_bytes(b"k" * 64)
    gate = {**GATE, "gate": "continue"}
    gates = [{**gate, "wave": "canary", "state": "open"}, {**gate, "wave": "first"}]
    daemon.answer("GET", "rollouts/r", {**ROLLOUT, "gates": gates})
    words = ("token", "sign", "r", "continue", "--service", "s", "--key-file", str(tmp_path / "key"))
    code, out, _ = run(capsys, *words, "--for", "ann", "--reason", "fine")
    assert (code, tokens.verify(out, b"k" * 64).wave) == (0, "first")


@pytest.mark.parametrize("yes", [(), ("--yes",)])
def test_script_binds_its_vote_by_digest_only(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], yes: tuple[str, ...]
) -> None:
    daemon.answer("POST", "rollouts/r/votes", {**GATE, "gate": "start", "wave": None})
    words = ("approve", "r", "start", "--reason", "read", *yes)
    assert run(capsys, *words)[0] == run(capsys, *words, "--digest", "f" * 64)[0] == 0
    assert [body.get("digest") for _, _, _, body in daemon.requests] == [None, "f" * 64]


def test_unseen_files_are_named_and_approved_with_unseen(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    review = review_of("somaxconn-abcde") | {
        "files": [{"path": "roles/a/tasks/main.yml", "text": "- raw: 'true'\n", "note": None}],
        "commands": [{"path": "team.pay.0.ssh: run", "text": "systemctl is-active pay"}],
        "unseen": ["group_vars/all.yml: not shown: encrypted (31 bytes, sha256 abc)"],
    }
    daemon.answer("GET", "rollouts/r", {**ROLLOUT, "owner": "infra", "gates": [{**GATE, "wave": None}]})
    daemon.answer("GET", "rollouts/somaxconn-abcde/review", review)
    daemon.answer("POST", "rollouts/r/votes", GATE)
    _, out, _ = run(capsys, "review", "r")
    for text in (
        "NOT SHOWN an approval must confirm them: with --unseen",
        "encrypted (31 bytes",
        "FILE roles/a/tasks/main.yml",
    ):
        assert text in out
    assert "team.pay.0.ssh: run: systemctl is-active pay" in out
    run(capsys, "approve", "r", "start", "--reason", "read", "--yes")
    assert "unseen" not in daemon.requests[-1][3]
    run(capsys, "approve", "r", "start", "--reason", "read", "--yes", "--unseen")
    assert daemon.requests[-1][3]["unseen"] is True


def test_review_shows_change_first_and_plan_last(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    review = review_of("somaxconn-abcde") | {
        "previous": "somaxconn-before",
        "plan_differences": [{"path": "soak", "before": "10m", "after": "20m"}],
    }
    daemon.answer("GET", "rollouts/r", {**ROLLOUT, "owner": "infra", "gates": [{**GATE, "wave": None}]})
    daemon.answer("GET", "rollouts/somaxconn-abcde/review", review)
    code, out, _ = run(capsys, "review", "r")
    order = (
        "CHANGE differences to somaxconn-before",
        "-soak: 10m",
        "PLAYBOOK sysctl.yml",
        "- hosts: all",
        "TARGETS",
    )
    places = [
        out.index(each) for each in (*order, "at most 4 at once", "CHECKS", "NOT PROBED", "DIGEST", "PLAN")
    ]
    assert (code, places) == (0, sorted(places))
    assert json.loads(run(capsys, "review", "r", "--json")[1]) == review
    assert out in run(capsys, "gates", "r")[1]


# -- the next person on duty


def test_handover_begins_where_the_last_one_ended(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = ReplayedFleet(pools=4, per_pool=3, at=1_795_200_000.0)
    fleet.vote("start", by="ana", uid=1001, teams=["infra"], reason="read it")
    daemon.answer("GET", "handover", fleet.handover("2026-11-20T10:00:00Z"))
    code, out, _ = run(capsys, "handover", "--since", "2026-11-20T12:00:00+02:00")
    assert code == 0
    assert "proceed: the vote of infra is missing" in out
    assert "ana  kernel-x7k2p voted yes at start: read it" in out
    run(capsys, "handover")
    asked = [query["since"] for _, _, query, _ in daemon.requests]
    assert asked == ["2026-11-20T10:00:00Z", "2026-11-20T18:40:00Z"]


def test_comparison_names_what_is_unlike_the_canaries(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer("GET", "rollouts/r/comparison", comparison_of("r"))
    code, out, _ = run(capsys, "compare", "r")
    first, _, heading, slow, *_ = out.splitlines()
    assert (code, first, heading.split()[0]) == (0, "1 canary took 30s", "NODE")
    assert "5m" in slow
    assert "slower than all canaries; changed, but on no canary: restart docker" in slow
    assert json.loads(run(capsys, "compare", "r", "-o", "json")[1]) == comparison_of("r")
