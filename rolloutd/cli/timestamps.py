"""Instants and durations on a terminal: parsing what users write, formatting what they read."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from machines.model.timefmt import format_duration, format_rfc3339

AGE_UNITS = 2
"""Units of an age: `3d4h` is enough to see how old something is."""

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?:\d{1,6}[smhd])+")
_DURATION_PART = re.compile(r"(\d+)([smhd])")


def parse_user_time(text: str, now: datetime | None = None) -> str:
    """Return a user's time (RFC 3339, or a duration from now) as RFC 3339 UTC; raises ValueError."""
    try:
        return _parse_user_time(text, now or datetime.now(UTC))
    except OverflowError:
        raise ValueError(f"'{text}' is too far in the future") from None


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


def _parse_user_time(text: str, now: datetime) -> str:
    if _DURATION.fullmatch(text):
        seconds = sum(int(number) * _UNITS[unit] for number, unit in _DURATION_PART.findall(text))
        return format_rfc3339((now + timedelta(seconds=seconds)).timestamp())
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"'{text}' is neither a time (2026-11-20T16:00:00+01:00) nor a duration (2h)"
        ) from None
    if instant.tzinfo is None:
        raise ValueError(f"'{text}' names no time zone; add Z or an offset such as +01:00")
    return format_rfc3339(instant.astimezone(UTC).timestamp())
