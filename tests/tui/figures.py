"""The figures on a captured screen of the console, and the same figures of `rolloutctl status -o json`.

python -m tests.tui.figures SOCKET ROLLOUT      prints the status again and again, with its times
"""

from __future__ import annotations

import io
import json
import re
import select
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rolloutd.cli.main import main
from tui.formatting.formatting import format_duration

SAMPLE_INTERVAL_S = 0.1

Figures = dict[str, Any]
"""Values by name; numbers are floats, everything else is text."""

_NUMBERS = re.compile(
    r"(?P<percent>\d+) %  (?P<done>[\d,]+) of (?P<wanted>[\d,]+) \w+(?:, (?P<failed>[\d,]+) failed)?"
    r"(?:, (?P<skipped>[\d,]+) skipped)?(?:, (?P<rolled_back>[\d,]+) rolled back)?"
    r", (?P<in_flight>[\d,]+) in flight, (?P<pending>[\d,]+) pending"
)
_AGE = re.compile(r"● live .*?age (\d+)([sm]) ")
_WORK = re.compile(r"~(\S+) left")
_STATE = re.compile(r"^ \S (awaiting approval|running|soaking|paused|done|cancelled)\b", re.MULTILINE)
_IN_FLIGHT = re.compile(
    r"^. [◔◑◕] (?P<node>\S+) +(?P<phase>isolating|maintaining|verifying) +(?:\S+ +(?P<percent>\d+) %)?",
    re.MULTILINE,
)
_POOL = re.compile(
    # The reasons in the left pane name pools too: the last name on a line counts.
    r"^.*(?P<pool>(?:team|rack)/\S+) .*?  (?P<failed>[ ✗]) +(?P<used>\d+)/(?P<max>\d+)"
    r" +(?P<done>\d+)/(?P<wanted>\d+) *$",
    re.MULTILINE,
)
_VOTES = re.compile(r"(\d+) votes? missing")
_FLEET_ROW = re.compile(
    r"^\S\S (?P<id>\S+) +(?P<state>approval|awaiting-approval|running|soaking|paused|done|cancelled)"
    r" +[━╍✗─]+ +(?P<percent>\d+) % +(?P<done>\d+)/(?P<wanted>\d+) ",
    re.MULTILINE,
)


def shown_age(screen: str) -> float:
    """Return the age of the state that a screen names, at most: it is rounded down."""
    age = _AGE.search(screen)
    return 0.0 if age is None else (int(age[1]) + 1) * (60.0 if age[2] == "m" else 1.0)


def rollout_page_figures(screen: str) -> Figures:
    """Return the figures of a rollout's page; empty for another page."""
    numbers = _NUMBERS.search(screen)
    state = _STATE.search(screen)
    if numbers is None or state is None or "POOLS" not in screen:
        return {}
    found: Figures = {name: _number(text or "0") for name, text in numbers.groupdict().items()}
    found["state"] = state[1].replace(" ", "-")
    found["page"] = "rollout"
    work, votes = _WORK.search(screen), _VOTES.search(screen)
    found["work"] = work[1] if work else ""
    if votes:
        found["votes"] = _number(votes[1])
    for row in _IN_FLIGHT.finditer(screen):
        found[f"phase of {row['node']}"] = row["phase"]
        if row["percent"]:
            found[f"percent of {row['node']}"] = _number(row["percent"])
    for row in _POOL.finditer(screen):
        for name in ("used", "max", "done", "wanted"):
            found[f"{name} of {row['pool']}"] = _number(row[name])
        found[f"failed of {row['pool']}"] = row["failed"].strip()
    return found


def fleet_page_figures(screen: str) -> Figures:
    """Return the figures of the first rollout on the fleet's page; empty for another page."""
    row = _FLEET_ROW.search(screen)
    if row is None:
        return {}
    state = "awaiting-approval" if row["state"] == "approval" else row["state"]
    return {"state": state, **{name: _number(row[name]) for name in ("percent", "done", "wanted")}}


def status_figures(status: Mapping[str, Any]) -> Figures:
    """Return the figures of a rollout's status."""
    found: Figures = {name: float(status[name]) for name in ("done", "failed", "rolled_back", "pending")}
    found["skipped"] = float(status["skipped"] - status["rolled_back"])
    found["percent"] = _percent(status["percent"])
    found["wanted"] = float(status["total"] - status["skipped"])
    found["in_flight"] = float(len(status["in_flight"]))
    found["state"] = status["state"]
    found["work"] = _work_text(status)
    found["votes"] = float(_votes_missing(status))
    for each in status["in_flight"]:
        found[f"phase of {each['node']}"] = each["phase"]
        if each["percent"] is not None:
            found[f"percent of {each['node']}"] = _percent(each["percent"])
    for pool in status["pools"]:
        found |= dict(_pool_figures(pool))
    return found


def _pool_figures(pool: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    name = pool["pool"]
    yield f"used of {name}", float(max(pool["in_flight"] + pool["failed"], pool["down"] - pool["unobserved"]))
    yield f"max of {name}", float(pool["max_unavailable"])
    yield f"done of {name}", float(pool["done"])
    yield f"wanted of {name}", float(pool["total"] - pool["skipped"])
    yield f"failed of {name}", "✗" if pool["failed"] else ""


def _work_text(status: Mapping[str, Any]) -> str:
    work = status["work"]
    if work is None or not work["high_s"] or status["state"] in ("done", "cancelled"):
        return ""
    low, high = format_duration(work["low_s"]), format_duration(work["high_s"])
    return low if low == high else f"{low}-{high}"


def _votes_missing(status: Mapping[str, Any]) -> int:
    return sum(
        max(0, need["want"] - need["have"])
        for gate in status["gates"]
        if gate["state"] == "waiting"
        for need in (gate["needs"]["owner"], *gate["needs"]["teams"])
    )


def _percent(value: float) -> float:
    return float(100 if value >= 100 else int(value))


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def print_statuses(socket: str, rollout: str) -> None:
    """Print `rolloutctl status ROLLOUT -o json` again and again, with its times, until the input ends."""
    stdout = sys.stdout
    while not select.select([sys.stdin], [], [], SAMPLE_INTERVAL_S)[0]:
        sys.stdout = text = io.TextIOWrapper(io.BytesIO())
        began = time.monotonic()
        code = main(["--socket", socket, "status", rollout, "-o", "json"])
        ended = time.monotonic()
        sys.stdout = stdout
        text.seek(0)
        if code == 0:
            line = {"began": began, "ended": ended, "status": json.loads(text.read())}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    print_statuses(*sys.argv[1:])
