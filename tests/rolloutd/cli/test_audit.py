"""rolloutctl audit against daemon answers: which entries are asked for, and how they are told."""

from __future__ import annotations

from typing import Any

import pytest

from machines.model.timefmt import format_rfc3339
from rolloutd.cli.main import main
from rolloutd.control.client import Client
from tests.rolloutd.canned_daemon import CannedDaemon


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_audit_is_read_page_by_page(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    entry = {
        "seq": 1,
        "at": 1.0,
        "actor": {"name": "alice"},
        "event": "RolloutPaused",
        "fields": {"reason": "lunch"},
        "node": None,
        "rollout": "r",
    }
    daemon.answer("GET", "audit", {"entries": [{"seq": 1, "hash": "", "entry": entry}], "next": None})
    code, out, _ = run(capsys, "audit", "r", "--kind", "RolloutPaused")
    assert code == 0
    assert "alice" in out
    assert "paused the rollout: lunch" in out
    assert daemon.requests[-1][2] == {"rollout": "r", "kind": "RolloutPaused", "after": "0", "limit": "1000"}


def test_the_last_entries_are_looked_for_from_the_end(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    def entry(seq: int) -> dict[str, Any]:
        told = {"seq": seq, "at": 1.0, "actor": {}, "event": "MoonRisen", "fields": {}}
        return {"seq": seq, "hash": "", "entry": told}

    daemon.answer("GET", "audit/head", {"seq": 50_000, "hash": "", "at": None})
    daemon.answer("GET", "audit", {"entries": [entry(seq) for seq in (49_997, 49_998, 49_999)], "next": None})
    code, out, _ = run(capsys, "audit", "-n", "2")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["49998", "49999"]
    assert daemon.requests[-1][2]["after"] == "49000"
    run(capsys, "audit", "--last", "7", "--node", "n1")
    sought = [query["after"] for _, path, query, _ in daemon.requests if path == "/v1/audit"]
    assert sought[1:] == ["49000", "40000", "0"], "further back while they are too few"


@pytest.mark.parametrize(
    ("since", "first"),
    [("1970-01-01T00:10:00Z", 600), ("1969-01-01T00:00:00Z", 1), ("2020-01-01T00:00:00Z", None)],
)
def test_entries_since_an_instant_are_found_by_few_questions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], since: str, first: int | None
) -> None:
    """Entry 600 is of ten minutes after 1970 began."""
    asked = list[int]()

    def answer(_: Client, path: str, query: Any = None) -> Any:
        if path.endswith("/head"):
            return {"seq": 1000}
        asked.append(query["after"])
        numbers = range(query["after"] + 1, min(1000, query["after"] + query["limit"]) + 1)
        told = {"actor": {}, "event": "MoonRisen", "fields": {}}
        entries = [
            {"seq": seq, "at": format_rfc3339(seq), "entry": {**told, "seq": seq, "at": seq}}
            for seq in numbers
        ]
        return {"entries": entries, "next": None}

    monkeypatch.setattr(Client, "get", answer)
    code, out, _ = run(capsys, "audit", "--since", since)
    shown = [int(line.split()[0]) for line in out.splitlines()]
    assert (code, shown) == (0, [] if first is None else list(range(first, 1001)))
    assert len(asked) < 14


@pytest.mark.parametrize("name", ["verify", "head", "export"])
def test_rollout_named_like_an_action_is_reachable(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    daemon.answer("GET", "audit", {"entries": [], "next": None})
    assert run(capsys, "audit", "--rollout", name) == (0, "", "no entry matches\n")
    assert daemon.requests[-1][2]["rollout"] == name


def test_word_after_two_dashes_is_no_verb(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer("GET", "audit", {"entries": [], "next": None})
    assert run(capsys, "audit", "--", "verify") == (0, "", "no entry matches\n")
    assert daemon.requests[-1][2]["rollout"] == "verify"


@pytest.mark.parametrize(
    ("words", "path"),
    [
        ("export --rollout head", "rollouts/head"),
        ("--rollout head export", "rollouts/head"),
        ("--output a.tar.gz export head", "rollouts/head"),
        (f"--head {'0' * 64} verify", "audit/verify"),
    ],
)
def test_option_of_verb_may_precede_it(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], words: str, path: str
) -> None:
    assert "nothing at" in run(capsys, "audit", *words.split())[2]
    assert daemon.requests[-1][1] == f"/v1/{path}"


def test_an_event_of_a_newer_daemon_is_shown_by_its_name(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"seq": 1, "at": 1.0, "actor": {}, "event": "MoonRisen", "fields": {}}
    daemon.answer("GET", "audit", {"entries": [{"seq": 1, "hash": "", "entry": entry}], "next": None})
    assert "moon risen" in run(capsys, "audit")[1]


def test_no_entries_are_said_on_stderr(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer("GET", "audit", {"entries": [], "next": None})
    assert run(capsys, "audit", "--kind", "VoteCast") == (0, "", "no entry matches\n")
    near = "votecas: no such event; did you mean VoteCast?\n"
    assert run(capsys, "audit", "--kind", "votecas") == (1, "", near)
