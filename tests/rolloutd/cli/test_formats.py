"""Every command in every format of `-o`, against a daemon that has something to list."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutd.cli import follow, watch
from tests.rolloutd.canned_daemon import CannedDaemon
from tests.rolloutd.cli.command_lines import leaf_parsers
from tests.rolloutd.cli.populated_daemon import ANY, CHANGING, READING, populated_daemon
from tests.rolloutd.cli.samples import run

NOTHING_LISTED = {
    *(
        "tui",
        "web",
        "demo",
        "completion",
        "help",
        "names",
        "report",
        "plan schema",
        "plan new",
        "audit export",
    ),
    *("token sign", "token use", "context add", "context use", "context remove"),
    # Other programs, which have their own tests.
    *("doctor", "backup", "restore", "init", "hosts scan", "store prepare", "store move"),
}
"""Commands that are not run here: they list nothing, or become another program."""


def formats_of(words: list[str]) -> tuple[str, ...]:
    """Return the formats that the parser takes for this command."""
    leaves = leaf_parsers()
    name = next(" ".join(words[:count]) for count in (2, 1) if " ".join(words[:count]) in leaves)
    option = leaves[name]._option_string_actions["-o"]
    return tuple(str(choice) for choice in option.choices or ())


def test_each_command_is_walked_in_each_format() -> None:
    lines = [*READING, *CHANGING]
    walked = {name for name in leaf_parsers() for line in lines if f"{line} ".startswith(f"{name} ")}
    assert walked == set(leaf_parsers()) - NOTHING_LISTED


@pytest.mark.parametrize("form", ["json", "yaml", "name", "wide", ""])
async def test_output_parses_as_its_format(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    async with populated_daemon(tmp_path) as daemon:
        for line, names in {**READING, **CHANGING}.items():
            words = daemon.fill(line)
            if form and form not in formats_of(words):
                continue
            code = await daemon.run(*words, *(["-o", form] if form else []))
            out, err = capsys.readouterr()
            assert code in (0, 1), f"{line}: {code} {err}"
            assert "Traceback" not in err, line
            _require_format(line, form, out, err)
            if form == "name":
                listed = out.splitlines()
                expected = listed if names == ANY else daemon.fill(names)
                assert (sorted(listed), names == ANY and not listed) == (sorted(expected), False), line


def _require_format(line: str, form: str, out: str, err: str) -> None:
    match form:
        case "json":
            values = [json.loads(text) for text in out.splitlines()]
            assert len(values) == 1 or line.startswith(("watch", "logs")), line
        case "yaml":
            assert len(list(yaml.safe_load_all(out))) == 1, line
            assert "..." not in out.splitlines(), line
        case "name":
            assert all(text and " " not in text for text in out.splitlines()), line
        case _:
            assert out or err, line


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("json", ['{"seq": 7, "entry": {', '{"seq": 8, "entry": {']),
        ("yaml", ["---", "seq: 7", "entry:", "---", "seq: 8", "entry:"]),
        ("name", ["7", "8"]),
    ],
)
def test_followed_audit_has_the_chosen_format(
    daemon: CannedDaemon,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    form: str,
    expected: list[str],
) -> None:
    monkeypatch.setattr(follow, "RECONNECT_TIMEOUT_S", -1.0)
    entry: dict[str, Any] = {"event": "VoteCast", "actor": {"kind": "person", "name": "olga"}, "node": None}
    daemon.streams["/v1/events"] = [[{"seq": seq, "entry": {**entry, "seq": seq}} for seq in (7, 8)]]
    out = run(capsys, "audit", "-f", "-o", form)[1]
    printed = [text for text in out.splitlines() if not text.startswith("  ")]
    assert [text[: len(begin)] for text, begin in zip(printed, expected, strict=True)] == expected


def test_missing_record_is_reported_in_each_format(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    records = {"current": None, "previous": None, "invalid": None}
    daemon.answer("GET", "nodes/n1/configuration", records)
    message = "n1: no invalid configuration; list its records with rolloutctl config n1\n"
    for form, out in (("name", ""), ("json", "null\n"), ("yaml", "null\n"), ("wide", "")):
        assert run(capsys, "config", "n1", "--record", "invalid", "-o", form) == (0, out, message)


LISTED = {
    "rollout": "kernel-abcde",
    "plan": "kernel",
    "state": "done",
    "submitted_by": "olga",
    "ended_at": None,
    "submitted_at": "2026-11-20T07:00:00Z",
    "total": 1,
    "done": 1,
    "skipped": 0,
    "rolled_back": 0,
    "percent": 100.0,
}


def test_watch_prints_a_message_once(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "event_queue", lambda *_: nullcontext())
    answers = iter([[], [], [LISTED]])

    def wait_for_change(*_: object) -> None:
        following = next(answers, None)
        if following is None:
            raise KeyboardInterrupt
        daemon.answer("GET", "rollouts", {"rollouts": following})

    monkeypatch.setattr(watch, "next_batch", wait_for_change)
    daemon.answer("GET", "rollouts", {"rollouts": []})
    assert run(capsys, "rollouts", "--watch", "-o", "name") == (130, "kernel-abcde\n", "")
    answers = iter([[], []])
    daemon.answer("GET", "rollouts", {"rollouts": []})
    assert run(capsys, "rollouts", "--watch") == (130, "", "there are no rollouts\n")
    answers = iter([[], [LISTED]])
    daemon.answer("GET", "rollouts", {"rollouts": []})
    documents = list(yaml.safe_load_all(run(capsys, "rollouts", "--watch", "-o", "yaml")[1]))
    assert [len(each["rollouts"]) for each in documents] == [0, 1]
