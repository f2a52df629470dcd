"""Instants as people read them: RFC 3339 in UTC, to the second.  It knows no clock."""

from __future__ import annotations

from datetime import UTC, datetime


def stamp(instant: float) -> str:
    """Return an instant (epoch seconds) as `2026-11-20T09:30:00Z`."""
    return datetime.fromtimestamp(instant, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def span(seconds: float) -> str:
    """Return a duration as `1h30m`, to the second."""
    rest, text = max(0, round(seconds)), ""
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, size)
        if count:
            text += f"{count}{unit}"
    return text or "0s"
