"""Lines and messages of runner pods: short enough, and no result of another run or holder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from machines.model.rollout import FailureCode
from rolloutd.adapters.ansible.run_directory import RunDirectory, RunEventLine
from rolloutd.adapters.kubernetes_jobs.pod_state import combine
from rolloutd.adapters.kubernetes_jobs.records import RunRecord
from rolloutd.adapters.kubernetes_jobs.report import (
    MAX_LINE_BYTES,
    MAX_MESSAGE_BYTES,
    PodResult,
    numbered_line,
    parse_line,
)
from rolloutd.ports import Failed, Ok, Unknown


def test_each_event_of_run_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is looked at each second, and its events are megabytes."""
    record = RunRecord(RunDirectory(tmp_path / "r1"))
    record.create(run="r1", node="n1")
    record.append({1: {"kind": "task", "task": "one"}, 2: {"kind": "ok", "host": "n1"}})
    assert record.state(None, "").task == "one"
    read: list[object] = []
    original = RunDirectory.read_events

    def counted(directory: RunDirectory, offset: int) -> list[RunEventLine]:
        lines = original(directory, offset)
        read.extend(lines)
        return lines

    monkeypatch.setattr(RunDirectory, "read_events", counted)
    record.append({3: {"kind": "task", "task": "two"}})
    assert (record.state(None, "").task, len(read)) == ("two", 1)
    assert RunRecord(record.directory).state(None, "").task == "two"
    record.remove()
    assert record.state(None, "").task == ""


@pytest.mark.parametrize("text", ["x" * 100_000, "\x00" * 100_000, "\U0001f600" * 50_000])
def test_long_line_is_cut_and_parses(text: str) -> None:
    line = numbered_line(7, {"kind": "failed", "host": "n1", "text": text, "stats": {}})
    assert len(line) <= MAX_LINE_BYTES
    parsed = parse_line(line)
    assert parsed is not None
    assert (parsed[0], parsed[1]["kind"]) == (7, "failed")


@pytest.mark.parametrize(
    "line", ["", "{", "[]", '{"n": 1}', '{"n": "1", "e": {}}', '"e": {}}', "[" * 100_000]
)
def test_part_of_line_is_left_out(line: str) -> None:
    assert parse_line(line) is None


@pytest.mark.parametrize(
    "result",
    [
        Ok("2 tasks", "out" * 5000),
        Failed("no", "\x1b" * 9000, code=FailureCode.UNREACHABLE),
        Unknown("lost"),
    ],
)
def test_message_fits_and_is_read_back(result: Ok | Failed | Unknown) -> None:
    message = PodResult.of("r1", "uid", 3, result).message()
    assert len(message.encode()) <= MAX_MESSAGE_BYTES
    parsed = PodResult.parse(message, "r1", "uid")
    assert parsed is not None
    again = parsed.to_result()
    assert (type(again), again.text) == (type(result), result.text)
    assert getattr(again, "code", None) == getattr(result, "code", None)


@pytest.mark.parametrize(
    "message",
    [
        "",
        "137",
        "null",
        json.dumps(["r2", "uid", "ok", "", "", 1, ""]),
        json.dumps(["r1", "x", "ok", "", "", 1, ""]),
        '["r1", "uid", "ok"',
        json.dumps(["r1", "uid", "ok", 5, "", 1, ""]),
        json.dumps(["r1", "uid", ["ok"], "", "", 1, ""]),
    ],
)
def test_message_of_another_is_no_result(message: str) -> None:
    assert PodResult.parse(message, "r1", "uid") is None


REFUSED = Failed("a newer run has been on n1", code=FailureCode.NEVER_STARTED)


@pytest.mark.parametrize(
    ("results", "kind"),
    [
        ([Unknown("lost"), REFUSED], Unknown),
        ([REFUSED, Unknown("lost")], Unknown),
        ([Ok("done"), REFUSED], Ok),
        ([None, REFUSED], type(None)),
        ([Ok("done"), Ok("done")], Unknown),
        ([REFUSED], Failed),
    ],
)
def test_refused_second_pod_says_nothing_of_first(results: list[Any], kind: type) -> None:
    assert isinstance(combine(results), kind)
