"""Times and durations in few cells, and what a filter shows; other formats are in rolloutd.texts.formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rolloutd.texts.audit_names import with_current_names

MINUTE_S, HOUR_S, DAY_S = 60, 3_600, 86_400


def format_duration(seconds: float) -> str:
    """Return a duration in at most five characters: `48s`, `12m`, `3h05`, `4d`."""
    whole = max(0, int(seconds))
    if whole < 100:
        return f"{whole}s"
    if whole < HOUR_S:
        return f"{whole // MINUTE_S}m"
    if whole < DAY_S:
        minutes = whole % HOUR_S // MINUTE_S
        return f"{whole // HOUR_S}h{f'{minutes:02}' if minutes else ''}"
    return f"{whole // DAY_S}d"


def format_clock(seconds: float) -> str:
    """Return a running duration: `0:31`, `12:05`, `1:02:03`."""
    whole = max(0, int(seconds))
    if whole < HOUR_S:
        return f"{whole // 60}:{whole % 60:02}"
    return f"{whole // HOUR_S}:{whole % HOUR_S // 60:02}:{whole % 60:02}"


def format_age(then: float | None, now: float) -> str:
    """Return an age: `4m ago`, `just now`; empty for None."""
    if then is None:
        return ""
    return "just now" if now - then < 2 else f"{format_duration(now - then)} ago"


def format_time(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")


def format_datetime(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def join_first(names: Sequence[str], limit: int) -> str:
    """Return the first names on a line that says their number elsewhere: `a, b …`."""
    return ", ".join(names[:limit]) + (" …" if len(names) > limit else "")


def matches(text: str, wanted: str) -> bool:
    """Return whether a text contains each wanted word, and no word that is written after `!`."""
    lowered = text.lower()
    return all(
        word[1:] not in lowered if word.startswith("!") and len(word) > 1 else word in lowered
        for word in wanted.lower().split()
    )


def entry_role(entry: Mapping[str, Any]) -> str:
    entry = with_current_names(entry)
    fields = entry.get("fields") or {}
    match entry["event"]:
        case "PhaseMoved" if fields.get("target") == "failed":
            return "bad"
        case "PhaseMoved" if fields.get("target") == "done":
            return "ok"
        case "StepRecorded":
            return "bad" if fields.get("state") in ("failed", "unknown") else "dim"
        case "VoteCast" | "GateOpened" | "VoteWithdrawn":
            return "accent"
        case "RolloutPaused" | "RolloutCancelled" | "RequestDenied" | "FreezeStarted" | "HoldTaken":
            return "warn"
        case _:
            return ""
