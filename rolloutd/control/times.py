"""Instants as the wire has them: RFC 3339, UTC, to the millisecond."""

from __future__ import annotations

from datetime import UTC, datetime


def moment(instant: float) -> str:
    """Return an instant (epoch seconds) as `2026-11-20T09:30:00.123Z`."""
    return datetime.fromtimestamp(instant, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def maybe(instant: float | None) -> str | None:
    """Return an instant, or None where there is none (0.0 means never, too)."""
    return moment(instant) if instant else None
