"""Instants and durations as people write and read them on a terminal.

On the command line an instant is RFC 3339, or a duration from now (`2h`); on
the screen it is local time or an age.  It knows no command and no wire shape.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?:\d{1,6}[smhd])+")
_PART = re.compile(r"(\d+)([smhd])")


def read(text: str, now: datetime | None = None) -> str:
    """Return the instant that a person wrote as RFC 3339 UTC; raises ValueError with a sentence."""
    try:
        return _read(text, now or datetime.now(UTC))
    except OverflowError:
        raise ValueError(f"'{text}' is too far away") from None


def parse(text: str) -> datetime:
    """Return the instant that the daemon wrote."""
    return datetime.fromisoformat(text)


def age(text: str | None, now: datetime | None = None) -> str:
    """Return how long ago an instant was, as `3m`; `-` when there is none."""
    if text is None:
        return "-"
    return span(((now or datetime.now(UTC)) - parse(text)).total_seconds())


def ahead(text: str | None, now: datetime | None = None) -> str:
    """Return a coming instant as `14:32 (in 12m)`, local time; `-` when there is none."""
    if text is None:
        return "-"
    seconds = (parse(text) - (now or datetime.now(UTC))).total_seconds()
    return f"{local(text)} ({'in ' + span(seconds) if seconds > 0 else 'now'})"


def local(text: str, now: datetime | None = None) -> str:
    """Return an instant as local time, with its date unless that is today's."""
    instant = parse(text).astimezone()
    today = (now or datetime.now(UTC)).astimezone().date()
    return instant.strftime("%H:%M:%S" if instant.date() == today else "%Y-%m-%d %H:%M:%S")


def span(seconds: float) -> str:
    """Return a duration in at most two units: `45s`, `3m`, `2h10m`, `3d4h`."""
    whole = max(0, round(seconds))
    for size, unit, lesser, lesser_unit in ((86400, "d", 3600, "h"), (3600, "h", 60, "m")):
        if whole >= size:
            rest = whole % size // lesser
            return f"{whole // size}{unit}" + (f"{rest}{lesser_unit}" if rest else "")
    return f"{whole // 60}m" if whole >= 120 else f"{whole}s"


def _rfc3339(instant: datetime) -> str:
    return instant.isoformat(timespec="seconds").replace("+00:00", "Z")


def _read(text: str, now: datetime) -> str:
    if _DURATION.fullmatch(text):
        seconds = sum(int(number) * _UNITS[unit] for number, unit in _PART.findall(text))
        return _rfc3339(now + timedelta(seconds=seconds))
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"'{text}' is neither a time (2026-11-20T16:00:00+01:00) nor a duration (2h)"
        ) from None
    if instant.tzinfo is None:
        raise ValueError(f"'{text}' names no time zone; add Z or an offset such as +01:00")
    return _rfc3339(instant.astimezone(UTC))
