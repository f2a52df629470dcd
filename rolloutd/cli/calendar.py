"""A forecast as an iCalendar (RFC 5545): an event for each node, and one for each gate."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

from rolloutd.cli import exits
from rolloutd.texts import event_text
from rolloutd.texts.formats import suggest_name

if TYPE_CHECKING:
    from rolloutd.control.forecasts.wire_forecasts import Forecast
    from rolloutd.control.rollouts.wire import Instants

MAX_LINE_BYTES = 75
"""Of a line, without its end; longer ones are folded."""


def render(found: Forecast, team: str | None = None) -> str:
    """Return a calendar of the nodes, or of one team's; a node lasts from its p50 start to its p90 end.

    Raises exits.Exit where it would have no event: a calendar without one is not valid.
    """
    teams = [each["name"] for each in found["teams"]]
    if team is not None and team not in teams:
        action = suggest_name(team, teams, "see rolloutctl forecast")
        raise exits.Exit(exits.REFUSED, f"--team {team}: no node of the team is ahead; {action}")
    events = list(_events(found, team))
    if not events:
        raise exits.Exit(exits.REFUSED, f"{found['rollout']}: nothing ahead has a date; see its forecast")
    lines = [
        "BEGIN:VCALENDAR",
        "VERSION:2.0",
        "PRODID:-//rolloutd//forecast//EN",
        "CALSCALE:GREGORIAN",
        *events,
        "END:VCALENDAR",
    ]
    return "".join(f"{part}\r\n" for line in lines for part in _folded(line))


def _events(found: Forecast, team: str | None) -> Iterator[str]:
    stamp, rollout = found["made_at"], found["rollout"]
    for node in found["nodes"]:
        if team is not None and node["team"] != team:
            continue
        ends = node["ends_at"]["p90"] or node["ends_at"]["p50"]
        likely = f"back in service by {node['ends_at']['p50']}, with nine in ten chances by {ends}"
        yield from _event(
            f"{rollout}/{node['node']}", stamp, f"{node['node']}: {rollout}", likely, node["starts_at"], ends
        )
    for gate in found["gates"]:
        name = event_text.gate_label(gate)
        asked = gate["asked_at"]
        text = f"rolloutctl review {rollout}"
        yield from _event(
            f"{rollout}/gate/{name}", stamp, f"vote at {name}: {rollout}", text, asked, asked["p50"]
        )


def _event(
    uid: str, stamp: str, summary: str, text: str, starts: Instants, ends: str | None
) -> Iterator[str]:
    if starts["p50"] is None or ends is None:
        return  # what never happens is no date
    yield "BEGIN:VEVENT"
    yield f"UID:{_text(uid)}@rolloutd"
    yield f"DTSTAMP:{_utc(stamp)}"
    yield f"DTSTART:{_utc(starts['p50'])}"
    if _utc(ends) > _utc(starts["p50"]):  # an event without an end lasts no time; an end must be later
        yield f"DTEND:{_utc(ends)}"
    yield f"SUMMARY:{_text(summary)}"
    yield f"DESCRIPTION:{_text(text)}"
    yield "TRANSP:TRANSPARENT"
    yield "END:VEVENT"


def _utc(instant: str) -> str:
    return datetime.fromisoformat(instant).strftime("%Y%m%dT%H%M%SZ")


def _text(text: str) -> str:
    plain = "".join(char if char.isprintable() else " " for char in text)
    for special in "\\;,":
        plain = plain.replace(special, f"\\{special}")
    return plain


def _folded(line: str) -> Iterator[str]:
    """Yield a line in parts of at most 75 bytes; each part after the first begins with a blank."""
    part, size = "", 0
    for char in line:
        width = len(char.encode())
        if size + width > MAX_LINE_BYTES:
            yield part
            part, size = " ", 1
        part, size = part + char, size + width
    yield part
