"""Dates of a forecast: its calendar, and the days of a freeze."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from machines.states import Trigger
from rolloutd.cli import exits
from rolloutd.forecast import what_if
from tests.rolloutd.control.test_forecasts import ask, forecast_environment


async def test_calendar_has_nodes_of_a_team_and_gates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rolloutd.cli.calendar import render

    async with forecast_environment(tmp_path) as inside:
        rollout = await inside.submit()
        answer: Any = await ask(inside, rollout)
        text = render(answer, "search")
    lines = text.split("\r\n")
    ends = (lines[0], *lines[-2:], lines.count("BEGIN:VEVENT"))
    assert ends == ("BEGIN:VCALENDAR", "END:VCALENDAR", "", 4)
    # A gate is asked at an instant, and an end must be later than the start.
    assert sum(line.startswith("DTEND:") for line in lines) == 2
    assert [line for line in lines if line.startswith("SUMMARY:s")] == [
        f"SUMMARY:{node}: {rollout}" for node in ("s1", "s2")
    ]
    assert max(len(line.encode()) for line in lines) <= 75
    answer["nodes"][0] |= {"node": "ä;,\\\n" * 40, "team": "search"}
    folded = render(answer, "search")
    assert max(len(line.encode()) for line in folded.split("\r\n")) <= 75
    assert json.dumps(folded.replace("\r\n ", "")).count("SUMMARY") == 5
    assert Trigger.ADMITTED  # the phases are the core's
    with pytest.raises(exits.Exit, match=r"no node of the team is ahead; did you mean search\?"):
        render(answer, "serch")
    with pytest.raises(exits.Exit, match="nothing ahead has a date"):
        render({**answer, "nodes": [], "gates": []})


def test_frozen_day_ends_at_local_midnight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Europe/Amsterdam")
    time.tzset()
    try:
        begins, ends = what_if._span("all:2027-03-28", "2027-03-28", 0.0)  # the clocks go forward
    finally:
        monkeypatch.undo()
        time.tzset()
    assert (begins, ends - begins) == (datetime(2027, 3, 27, 23, tzinfo=UTC).timestamp(), 23 * 3600)
