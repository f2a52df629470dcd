"""Formats instants and durations for the whole product, except the console.

The console may import nothing of the core, so tui/formatting has its own.
"""

from __future__ import annotations

from datetime import UTC, datetime

_UNITS = (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1))


def format_rfc3339(instant: float, timespec: str = "seconds") -> str:
    """Return an instant (epoch seconds) as `2026-11-20T09:30:00Z`."""
    return datetime.fromtimestamp(instant, UTC).isoformat(timespec=timespec).replace("+00:00", "Z")


def format_duration(seconds: float, max_units: int = len(_UNITS)) -> str:
    """Return a duration as `1h30m`: to the second, or in its `max_units` largest units."""
    remaining, text = max(0, round(seconds)), ""
    units = [(unit, size) for unit, size in _UNITS if size <= remaining]
    for unit, size in units[:max_units]:
        count, remaining = divmod(remaining, size)
        if count:
            text += f"{count}{unit}"
    return text or "0s"
