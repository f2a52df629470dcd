"""rolloutctl against daemon answers: exit codes, what is printed where, how quick it can be."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rolloutd.cli.follow import WatchUpdate
from rolloutd.cli.main import parser
from rolloutd.cli.progress_bars import draw_updates
from rolloutd.control import reconnect
from tests.rolloutd.canned_daemon import CannedDaemon
from tests.rolloutd.cli.samples import GATE, REASON, ROLLOUT, failure_of, run

ROOT = Path(__file__).resolve().parents[3]

# -- exit codes


@pytest.mark.parametrize(
    ("status", "code"), [(400, 2), (401, 4), (403, 4), (404, 1), (409, 1), (413, 2), (422, 1), (503, 1)]
)
def test_a_refusal_has_its_exit_code_and_its_words_on_stderr(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], status: int, code: int
) -> None:
    daemon.refuse("GET", "rollouts/r1", status, "because of the weather")
    assert run(capsys, "status", "r1") == (code, "", "because of the weather\n")


def test_nothing_is_suggested_that_is_not_near(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "bogus")
    assert (code, "did you mean" in err) == (2, False)


def test_missing_daemon_exits_3_and_names_socket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--socket", str(tmp_path / "none"), "status")
    assert (code, out) == (3, "")
    assert str(tmp_path / "none") in err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["statsu"], "did you mean 'status'"),
        (["frobnicate"], "rolloutctl: 'frobnicate' is unknown; list the commands with rolloutctl help\n"),
        (["get", "nodes"], "rolloutctl: 'get' is unknown; use rollouts, nodes, gates or inventory\n"),
        (["-o", "json", "status"], "-o stands before the command; write rolloutctl COMMAND -o\n"),
        (["--socket", "x", "--tail=3", "logs"], "--tail stands before the command; write rolloutctl COMMAND"),
        (
            ["plan", "--supersede", "submit"],
            "write rolloutctl plan COMMAND --supersede\n",
        ),
        (["retry"], "the following arguments are required: ROLLOUT, --reason\n"),
        (["status", "--output", "json"], "use -o"),
        (["plan", "validte", "x"], "did you mean 'validate'"),
        (["approve", "r", "strat", "--reason", "x"], "did you mean 'start'"),
        (["pause", "r"], "--reason"),
        (["hold", "n1", "--reason", "x", "--until", "tomorrow"], "neither a time"),
        (["hold", "n1", "--reason", "x", "--until", "2026-11-20T10:00:00"], "no time zone"),
        (["skip", "r", "n1", "--reason", "x", "--return", "--leave"], "not allowed with"),
        (["rollouts", "delete"], "ROLLOUT"),
        (["rollouts", "delete", "r", "--watch"], "unrecognized arguments: --watch"),
        (["status", "--jsn"], "did you mean --json"),
        (["release", "n3", "--reason", "x"], "unrecognized arguments: --reason"),
        (["pause", "r", "--reason", " "], "the audit needs a reason"),
        (["logs", "r", "n1", "--attempt", "0"], "1 or more"),
        (["status", "--for", "3"], "rolloutctl status: unrecognized arguments: --for"),
        (["plan", "validate", "a.yml", "b.yml"], "rolloutctl plan validate --help"),
        (["audit", "--limit", "0"], "1 or more"),
        (["audit", "--last", "2", "--limit", "2"], "not allowed with"),
        (["audit", "export"], "ROLLOUT"),
        (["inventory", "accpt", "s", "--reason", "x"], "did you mean 'accept'"),
        (["verdicts", "clear", "v"], "--reason"),
        (["audit", "verify", "--rollout", "r"], "rolloutctl audit verify: unrecognized arguments: --rollout"),
        (["audit", "--node", "head", "r", "verify"], "rolloutctl audit: unrecognized arguments: verify"),
        (["doctor", "--host", "ops1"], "it works on this machine, not on ops1"),
        (["--host", "ops1", "restore", "f"], "it works on this machine, not on ops1"),
        (["logs", "r", "n1", "-o", "yaml"], "choose from 'json'"),
        (["audit", "--head", "f" * 64], "audit verify"),
        ([], "COMMAND"),
    ],
)
def test_wrong_usage_is_exit_2_with_a_hint(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert hint in err
    assert "Traceback" not in err


# -- reading


def test_json_is_what_the_daemon_said(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer("GET", "status", {"rollouts": [ROLLOUT], "trouble": None})
    daemon.answer("GET", "rollouts/somaxconn", ROLLOUT)
    code, out, _ = run(capsys, "status", "--json")
    assert (code, json.loads(out)["rollouts"]) == (0, [ROLLOUT])
    code, out, _ = run(capsys, "status", "somaxconn", "--json")
    assert (code, json.loads(out)) == (0, ROLLOUT)


def test_status_names_nodes_that_an_ended_rollout_keeps(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    slots = {"rollout": "old", "nodes": ["n1", "n2"], "total": 1002}
    daemon.answer("GET", "status", {"rollouts": [ROLLOUT], "kept_slots": [slots], "trouble": None})
    kept = "old has ended and still holds the slots of n1, n2 and 1,000 more; see rolloutctl why old\n"
    assert run(capsys, "status")[2] == kept


@pytest.mark.parametrize(("age", "told"), [(3, "6m20s (forecast 3h ago), 2 votes"), (-3, "6m20s, 2 votes")])
def test_old_forecast_has_its_age(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], age: int, told: str
) -> None:
    made_at = (datetime.now(UTC) - timedelta(hours=age, minutes=age)).isoformat()
    forecast = {"made_at": made_at, "ends_at": {"p50": None, "p90": None}, "vote_deadline": None}
    rollout = ROLLOUT | {"forecast": forecast}
    daemon.answer("GET", "status", {"rollouts": [rollout], "trouble": None})
    out = run(capsys, "status")[1]
    assert told in out.replace("3h3m", "3h")


def test_status_says_what_a_person_wants_to_know(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer("GET", "status", {"rollouts": [ROLLOUT], "trouble": None})
    code, out, _ = run(capsys, "status")
    assert code == 0
    for told in (
        "paused",
        "58 %",
        "7 of 12 nodes changed",
        "ends in 4m to 6m20s, 2 votes left",
        "n3 failed while maintaining",
        "lifted by a proceed vote",
        "1 + 2 unobserved   1",
        "1 vote of infra",
        "n9",
        "verify.1.ssh",
        "team/media",
        "client traffic",
    ):
        assert told in out
    assert "\x1b" not in out


def test_what_a_node_said_does_not_drive_the_terminal(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = {**REASON, "text": "\x1b[2Jgone\nnext line"}
    daemon.answer("GET", "status", {"rollouts": [{**ROLLOUT, "reason": reason}], "trouble": None})
    _, out, _ = run(capsys, "status")
    assert "\x1b" not in out
    assert "gone next line" in out


def test_several_rollouts_are_a_table(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer("GET", "status", {"rollouts": [ROLLOUT, ROLLOUT], "trouble": "the disk is full"})
    _, out, _ = run(capsys, "status")
    trouble, heading, *rows = out.splitlines()
    assert trouble == "trouble: the disk is full"
    assert heading.split()[:3] == ["ROLLOUT", "PLAN", "STATE"]
    assert len(rows) == 2


def test_nodes_as_json_is_a_list(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    node = {
        "node": "n1",
        "team": None,
        "pools": ["team/none"],
        "phase": "pending",
        "wave": "canary",
        "outcome": None,
        "attempt": 0,
        "minutes": {"slot": 0.0, "prepare": 0.0},
        "isolated": False,
        "since": None,
        "step": None,
        "percent": None,
        "reason": REASON,
    }
    daemon.answer("GET", "rollouts/r/nodes", {"nodes": [node]})
    _, out, _ = run(capsys, "nodes", "r", "--json")
    assert json.loads(out) == [node]
    _, out, _ = run(capsys, "nodes", "r")
    assert "n3 failed while maintaining" in out


def test_why_is_one_sentence(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer("GET", "rollouts/r/nodes/n%2F1/why", {"node": "n/1", "phase": "pending", "reason": REASON})
    code, out, _ = run(capsys, "why", "r", "n/1")
    assert code == 0
    assert out.startswith("n/1 is pending: n3 failed while maintaining (node-failed, for ")


def test_why_says_outcome_and_isolation(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"node": "n1", "phase": "pending", "isolated": True, "reason": REASON}
    daemon.answer("GET", "rollouts/r/nodes/n1/why", answer)
    assert run(capsys, "why", "r", "n1")[1].startswith("n1 is pending and isolated: n3 failed while ")
    daemon.answer("GET", "rollouts/r/nodes/n1/why", answer | {"phase": "verifying", "reason": None})
    assert run(capsys, "why", "r", "n1")[1] == "n1 is verifying; nothing blocks it\n"
    left = {"node": "n1", "phase": "done", "outcome": "left", "isolated": False, "reason": None}
    daemon.answer("GET", "rollouts/r/nodes/n1/why", left)
    assert run(capsys, "why", "r", "n1")[1] == "n1 is done (left)\n"


@pytest.mark.parametrize(
    ("phase", "line"), [("maintaining", "n1 is maintaining; nothing blocks it\n"), ("done", "n1 is done\n")]
)
def test_why_of_moving_node_names_no_block(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], phase: str, line: str
) -> None:
    daemon.answer("GET", "rollouts/r/nodes/n1/why", {"node": "n1", "phase": phase, "reason": None})
    assert run(capsys, "why", "r", "n1")[1] == line


def test_trouble_of_the_daemon_shown_by_why(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    answer = {"node": "n1", "phase": "maintaining", "reason": None, "trouble": "no space is left"}
    daemon.answer("GET", "rollouts/r/nodes/n1/why", answer)
    _, out, _ = run(capsys, "why", "r", "n1")
    assert out == "n1 is maintaining\nthe daemon has trouble: no space is left\n"


# -- telling


def test_a_vote_carries_only_what_was_said(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer("POST", "rollouts/r/votes", GATE)
    daemon.answer(
        "GET", "rollouts/r/failures", {"failures": [failure_of("n3"), failure_of("n5")], "omitted": 0}
    )
    words = ("approve", "r", "proceed", "--reason", "fixed", "--node", "n3", "--node", "n4", "--more", "2")
    code, out, _ = run(capsys, *words)
    assert (code, "waiting: 1 vote of infra" in out) == (0, True)
    assert daemon.requests[-1][3] == {
        "gate": "proceed",
        "yes": True,
        "reason": "fixed",
        "nodes": ["n3", "n4"],
        "more": 2,
        "shown": ["n3#1"],
    }
    run(capsys, "reject", "r", "start", "--reason", "no", "--team", "media")
    assert daemon.requests[-1][3] == {"gate": "start", "yes": False, "reason": "no", "team": "media"}


@pytest.mark.parametrize("words", [(), ("--yes",), ("-o", "json")])
def test_approve_proceed_sends_the_printed_failures(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    daemon.answer("POST", "rollouts/r/votes", GATE)
    daemon.answer(
        "GET", "rollouts/r/failures", {"failures": [failure_of("n3"), failure_of("n5")], "omitted": 7}
    )
    code, _, err = run(capsys, "approve", "r", "proceed", "--reason", "fixed", *words)
    assert (code, daemon.requests[-1][3]["shown"]) == (0, ["n3#1", "n5#1"])
    for node in ("n3", "n5"):
        assert f"covers {node}#1: {node} failed in verify.0: no answer" in err
    assert "7 failures need another vote" in err


def test_token_at_proceed_prints_what_it_covers(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 64)
    daemon.answer("GET", "rollouts/r", ROLLOUT)
    daemon.answer("GET", "rollouts/r/failures", {"failures": [failure_of("n3")], "omitted": 7})
    words = ("token", "sign", "r", "proceed", "--service", "s", "--key-file", str(key), "--for", "ann")
    code, out, err = run(capsys, *words, "--reason", "fixed")
    assert (code, len(out.splitlines())) == (0, 1)
    assert "covers n3#1: n3 failed in verify.0: no answer" in err
    assert "7 failures need another vote" in err


def test_unread_failures_send_no_vote(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.refuse("GET", "rollouts/r/failures", 503, "the store cannot read")
    code, _, err = run(capsys, "approve", "r", "proceed", "--reason", "fixed", "--yes")
    assert (code, "the store cannot read" in err) == (1, True)
    assert [method for method, *_ in daemon.requests] == ["GET"]


def test_locks_distinguish_down_from_unobserved(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    def holder(node: str, state: str, rollout: str | None = None, *, unseen: bool = False) -> dict[str, Any]:
        of = {"rollout": rollout, "source": None, "id": None, "since": None, "unobserved": unseen}
        return {"node": node, "why": f"{node} {state}", "state": state, **of}

    unseen = [holder(node, "last seen up", unseen=True) for node in ("n1", "n3")]
    down = holder("n2", "does not answer", unseen=True)
    held = [holder("n7", "is failed in r", "r"), holder("n8", "does not answer"), *unseen, down]
    pool = {"pool": "rack/r1", "max_unavailable": 2, "members": 6, "down": 5, "unobserved": 3}
    answer = {"pools": [{**pool, "holders": held}], "holds": [], "freezes": [], "reboot_gates": [], "seq": 1}
    daemon.answer("GET", "locks", answer)
    _, out, _ = run(capsys, "locks")
    told = "n7 (r), n8 (does not answer), n1, n3 (unobserved: last seen up), n2 (unobserved: does not answer)"
    assert " ".join(out.splitlines()[1].split()) == f"rack/r1 2 + 3 unobserved 2 6 {told}"


def test_a_refused_hold_is_exit_1_with_its_reason(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer("GET", "locks", {"pools": []})
    daemon.refuse("PUT", "holds", 409, "pool team/media is full: n9 is verifying")
    code, _, err = run(capsys, "hold", "n10", "--as", "kured", "--until", "2h", "--reason", "reboot")
    assert (code, err) == (1, "pool team/media is full: n9 is verifying\n")
    body = daemon.requests[-1][3]
    assert body["id"] == "kured"
    assert body["until"].endswith("Z")


def test_a_hold_says_as_whose_and_until_when(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    granted = {"node": "n1", "source": "person", "id": "kured", "until": "2099-01-15T12:00:00Z"}
    daemon.answer("PUT", "holds", granted)
    daemon.answer("GET", "locks", {"pools": []})
    code, out, err = run(capsys, "hold", "n1", "--as", "kured", "--until", "2h", "--reason", "reboot")
    assert (code, out) == (0, "")
    assert err.startswith("n1: held as person/kured until 2099-01-1")


# -- streams


def test_log_resumes_after_the_daemon_returns(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconnect, "RECONNECT_DELAYS_S", (0.01,))
    line = {"at": "2026-11-20T08:00:00Z", "kind": "task"}
    daemon.streams["/v1/rollouts/r/nodes/n1/log"] = [
        [{**line, "offset": 10, "text": "first"}],
        [{**line, "offset": 20, "text": "second"}],
    ]
    daemon.answer("GET", "rollouts/r/nodes/n1/why", {"node": "n1", "phase": "maintaining", "reason": None})
    code, out, err = run(capsys, "logs", "r", "n1", "-f")
    assert code == 0
    assert [text.split()[-1] for text in out.splitlines()] == ["first", "second"]
    assert "reconnecting" in err
    assert [asked[2]["offset"] for asked in daemon.requests[1:]] == ["0", "10"]


@pytest.mark.parametrize("words", [[], ["-f"]])
def test_log_of_pending_node_shows_reason(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    waiting = {"node": "n1", "phase": "pending", "reason": REASON}
    daemon.answer("GET", "rollouts/r/nodes/n1/why", waiting)
    daemon.streams["/v1/rollouts/r/nodes/n1/log"] = [[]]
    code, out, err = run(capsys, "logs", "r", "n1", *words)
    assert (code, out) == (0, "")
    assert err.startswith("n1 is pending: n3 failed while maintaining (node-failed")


def test_watching_ends_with_the_rollout(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    done = {**ROLLOUT, "state": "done", "reason": None}
    daemon.answer("GET", "rollouts/r", {**done, "rollout": "r"})
    daemon.streams["/v1/events"] = [[]]
    code, out, _ = run(capsys, "watch", "r")
    assert code == 0
    assert "r done 7/12 58 %" in out


# -- start-up


def test_reading_commands_load_the_standard_library_only(daemon: CannedDaemon) -> None:
    daemon.answer("GET", "status", {"rollouts": [], "trouble": None})
    program = (
        "import sys; from rolloutd.cli.main import main; main(['status', '--json']);"
        "pure = {'machines', 'machines.model', 'machines.model.timefmt'};"
        "print([m for m in sys.modules if '.wire' in m or m not in pure and m.split('.')[0] in"
        " {'aiohttp', 'pydantic', 'rich', 'asyncio', 'yaml', 'jinja2', 'shtab', 'asyncssh', 'machines'}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, env=os.environ, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands():
        code, out, _ = run(capsys, *words, "--help")
        assert (code, out.startswith("usage: rolloutctl")) == (0, True)


def test_help_has_headings_and_each_command_under_one(capsys: pytest.CaptureFixture[str]) -> None:
    listed: dict[str, list[str]] = {"": []}
    for line in run(capsys, "--help")[1].partition("commands:\n")[2].splitlines():
        if line.startswith("  ") and line.endswith(":"):
            listed[line.strip(" :")] = []
        elif line.startswith("    ") and not line.startswith("     "):
            listed[list(listed)[-1]].append(line.split()[0])
    assert (listed.pop(""), listed["votes"][:2]) == ([], ["approve", "reject"])
    assert sorted(name for names in listed.values() for name in names) == sorted(
        {words[0] for words in commands()} | {"help"}
    )


# -- formats


def test_refresh_waits_for_answers_of_sources(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {"source": "ansible:hosts", "nodes": 0, "refreshed_at": None, "stale_after_s": 60.0}
    state = {"stale": False, "error": None, "held": None, "tried_age_s": None}
    daemon.answer("POST", "inventory/refresh", {"sources": ["ansible:hosts"]})
    for age_s, expected in ((3600.0, "ansible:hosts: no answer in 0 s; its last one is shown\n"), (0.0, "")):
        monkeypatch.setattr("rolloutd.cli.inventory.REFRESH_WAIT_S", 60.0 if age_s == 0.0 else 0.0)
        daemon.answer(
            "GET", "inventory", {"nodes": [], "sources": [{**source, **state, "age_s": age_s}], "next": None}
        )
        said = f"{expected}rolloutctl inventory: nothing to list\n"
        assert run(capsys, "inventory", "--refresh")[::2] == (int(age_s > 0), said)


def test_refresh_of_failing_source_exits_1(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutd.cli.inventory.REFRESH_WAIT_S", 60.0)
    source = {"source": "netbox/a", "nodes": 1, "refreshed_at": None, "stale_after_s": 60.0, "stale": False}
    state = {"error": "no route", "held": None, "age_s": 300.0, "tried_age_s": 0.0}
    daemon.answer("POST", "inventory/refresh", {"sources": ["netbox/a"]})
    daemon.answer("GET", "inventory", {"nodes": [], "sources": [{**source, **state}], "next": None})
    status, _, errors = run(capsys, "inventory", "--refresh")
    assert status == 1
    assert "netbox/a: no route" in errors


def test_watch_prints_again_after_a_change_only(daemon: CannedDaemon) -> None:
    daemon.answer("GET", "status", {"rollouts": [ROLLOUT], "trouble": None})
    daemon.answer("GET", "fleetlock", {"gates": []})
    daemon.streams["/v1/events"] = [[{"seq": 1, "entry": {"event": "VoteCast"}}]] * 3
    command = [sys.executable, "-m", "rolloutd.cli", "gates", "--watch"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert watching.stdout.readline() == "somaxconn-abcde\n"
        assert "waiting" in watching.stdout.readline()
        gate = {**GATE, "state": "open"}
        daemon.answer("GET", "status", {"rollouts": [{**ROLLOUT, "gates": [gate]}], "trouble": None})
        assert watching.stdout.readline() == "somaxconn-abcde\n"
        assert "proceed after fleet is open" in watching.stdout.readline()
        watching.terminate()


def test_watched_rollout_ends_at_100_percent() -> None:
    output = io.StringIO()
    done = {**ROLLOUT, "state": "done", "percent": 100.0, "done": 12, "failed": 0, "pending": 0}
    updates = [WatchUpdate((), [ROLLOUT]), WatchUpdate((), [{**done, "in_flight": [], "reason": None}])]
    draw_updates(iter(updates), Console(file=output, force_terminal=True, width=100))
    last = output.getvalue().rpartition("somaxconn")[2]
    assert "100 %" in last
    assert "n9" not in last


def test_help_of_a_command_equals_its_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "help", "plan", "submit") == run(capsys, "plan", "submit", "--help")


def commands() -> list[list[str]]:
    """Return all commands, as words."""
    top = parser()._subparsers
    assert top is not None
    choices: Any = top._group_actions[0].choices
    found = [[name] for name in choices if name != "plan"]
    return [*found, *(["plan", verb] for verb in ("validate", "preview", "submit", "schema"))]
