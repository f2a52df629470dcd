"""Times of a user: instants and durations as users write them, and when the user last looked at a daemon."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from machines.model.timefmt import format_rfc3339
from rolloutd.control.user_state import UserState

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?:\d{1,6}[smhd])+")
_DURATION_PART = re.compile(r"(\d+)([smhd])")


def parse_future(text: str, now: datetime | None = None) -> str:
    """Return an instant (RFC 3339, or a duration from now) as RFC 3339 UTC; raises ValueError."""
    return _parse(text, now or datetime.now(UTC), 1)


def parse_past(text: str, now: datetime | None = None) -> str:
    """Return the same, with a duration before now: `8h` is eight hours ago; the future is refused too."""
    now = now or datetime.now(UTC)
    found = _parse(text.removesuffix(" ago"), now, -1)
    if datetime.fromisoformat(found) > now:
        raise ValueError(f"'{text}' is in the future; give a time before now")
    return found


def parse_duration(text: str) -> int:
    """Return a duration, such as 1h30m, in seconds; raises ValueError."""
    if not _DURATION.fullmatch(text):
        raise ValueError(f"'{text}' is not a duration; use s, m, h and d, such as 1h30m")
    return sum(int(number) * _UNITS[unit] for number, unit in _DURATION_PART.findall(text))


def _parse(text: str, now: datetime, direction: int) -> str:
    try:
        return _parse_instant(text, now, direction)
    except OverflowError:
        raise ValueError(f"'{text}' is too far away; give a nearer time") from None


def _parse_instant(text: str, now: datetime, direction: int) -> str:
    if _DURATION.fullmatch(text):
        return format_rfc3339((now + direction * timedelta(seconds=parse_duration(text))).timestamp())
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"'{text}' is neither a time (2026-11-20T16:00:00+01:00) nor a duration (2h)"
        ) from None
    if instant.tzinfo is None:
        raise ValueError(f"'{text}' names no time zone; add Z or an offset such as +01:00")
    return format_rfc3339(instant.astimezone(UTC).timestamp())


DEFAULT_SPAN_S = 8 * 3600.0
"""How far the first handover reaches back: one shift."""


class LastLook:
    """The instant of the last look (epoch seconds) for one daemon; a file that cannot be used is ignored."""

    def __init__(self, daemon: str) -> None:
        self._daemon = daemon
        self._state = UserState("last-look")

    def read(self, now: float) -> float:
        at = self._state.read().get(self._daemon)
        return at if isinstance(at, int | float) and at <= now else now - DEFAULT_SPAN_S

    def write(self, at: float) -> None:
        self._state.update({self._daemon: at})
