"""Words for times, durations, numbers and values, as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

MINUTE_S, HOUR_S, DAY_S = 60, 3_600, 86_400

SHOWN_OF_DIGEST = 12
"""Characters of a digest: enough to be told from every other one, few enough to be compared by eye."""

DURATIONS = frozenset(
    {"soak", "probation", "timeout", "expected", "within", "drain_timeout", "isolate", "votes"}
)
"""Keys of a plan whose values are durations; its content has them in seconds."""


def span(seconds: float) -> str:
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


def clock(seconds: float) -> str:
    """Return a duration that runs: `0:31`, `12:05`, `1:02:03`."""
    whole = max(0, int(seconds))
    if whole < HOUR_S:
        return f"{whole // 60}:{whole % 60:02}"
    return f"{whole // HOUR_S}:{whole % HOUR_S // 60:02}:{whole % 60:02}"


def ago(then: float | None, now: float) -> str:
    """Return how long ago something was: `4m ago`, `just now`."""
    if then is None:
        return ""
    return "just now" if now - then < 2 else f"{span(now - then)} ago"


def hour(at: float) -> str:
    """Return the local time of day."""
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S")


def day_and_hour(at: float) -> str:
    """Return the local date and time of day."""
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def percent(value: float) -> str:
    """Return a percentage in five characters; never 100 before everything is done."""
    return "100 %" if value >= 100 else f"{min(int(value), 99):>3} %"


def count(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def some(names: Sequence[str], most: int, between: str = ", ") -> str:
    """Return the first of them, and how many more there are."""
    more = f"{between}and {len(names) - most:,} more" if len(names) > most else ""
    return f"{between.join(names[:most])}{more}"


def short(digest: str) -> str:
    """Return the beginning of a digest."""
    return digest[:SHOWN_OF_DIGEST]


def exact(seconds: float) -> str:
    """Return a duration as a plan file has it, with nothing left out: `1h30m`, `45s`."""
    left, text = int(seconds), ""
    for unit, size in (("d", DAY_S), ("h", HOUR_S), ("m", MINUTE_S), ("s", 1)):
        if left >= size:
            text += f"{left // size}{unit}"
            left %= size
    return text or "0s"


def value(path: str, told: Any) -> str:
    """Return a value of a plan on one line; at the path of a duration it is one, in seconds."""
    if isinstance(told, str):
        return told
    if told is None:
        return "-"
    if isinstance(told, bool):
        return "true" if told else "false"
    is_duration = isinstance(told, int | float) and path.rpartition(".")[2] in DURATIONS
    return exact(told) if is_duration else str(told)


def tone(entry: Mapping[str, Any]) -> str:
    """Return the role in which an entry is shown."""
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
        case "RolloutPaused" | "RolloutCancelled" | "CallRefused" | "Frozen" | "HoldTaken":
            return "warn"
        case _:
            return ""
