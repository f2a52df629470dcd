"""Instants and durations as a terminal shows them."""

from __future__ import annotations

from datetime import UTC, datetime

from machines.model.timefmt import format_duration

AGE_UNITS = 2
"""Units of an age: `3d4h` is enough to see how old something is."""


def parse_rfc3339(text: str) -> datetime:
    return datetime.fromisoformat(text)


def format_age(text: str | None, now: datetime | None = None) -> str:
    """Return the time since an instant, as `3m`; `-` for None."""
    if text is None:
        return "-"
    return format_duration(((now or datetime.now(UTC)) - parse_rfc3339(text)).total_seconds(), AGE_UNITS)


def format_range(low_s: float, high_s: float) -> str:
    """Return a time between two limits, as `4m to 6m`; one value if both read alike."""
    low, high = format_duration(low_s, AGE_UNITS), format_duration(high_s, AGE_UNITS)
    return low if low == high else f"{low} to {high}"


def format_local(text: str, now: datetime | None = None) -> str:
    """Return an instant in local time, with its date unless it is today."""
    instant = parse_rfc3339(text).astimezone()
    today = (now or datetime.now(UTC)).astimezone().date()
    return instant.strftime("%H:%M:%S" if instant.date() == today else "%Y-%m-%d %H:%M:%S")
