"""Windows, in which work may start, and freezes, in which it must not.

A window is open at an instant if and only if a clock on the wall of its zone
shows one of its days and a time from `start_minute` up to, but not at,
`end_minute`.  So nobody can look at a clock and find rolloutd wrong: where a
zone's clocks are put forward, a window inside the lost hour does not open on
that day; where they are put back, a window inside the doubled hour opens twice.

Nothing here knows what time it is: every instant is an argument, epoch seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import pairwise
from zoneinfo import ZoneInfo

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MINUTES_PER_DAY = 1440

_DAY_S = 86_400
_HORIZON_DAYS = 15
"""How far ahead openings are looked for: two of every weekday, so one lost hour hides nothing."""

_PROBE_S = 4 * 3600
"""Spacing of the offsets compared within a day; no zone has changed its clocks twice in four hours."""

_CACHED_DAYS = 8192
"""Window-days kept: sixteen days of some five hundred windows, a few megabytes."""

_MONDAY_EPOCH_DAY = 4
"""1970-01-05 was the first Monday after the epoch."""

_REFERENCE = 1_767_571_200.0
"""2026-01-05, a Monday: openings are measured from here, far from most zones' clock changes."""

Span = tuple[float, float]
"""An opening: [from, until) in epoch seconds."""


@dataclass(frozen=True, slots=True)
class Window:
    """Days and hours in a zone; `days` counts from Monday = 0.

    An `end_minute` that is not after `start_minute` lies on the following day.
    Raises ValueError for days, minutes outside their range or an empty window.
    """

    days: frozenset[int]
    start_minute: int
    end_minute: int
    zone: ZoneInfo

    def __post_init__(self) -> None:
        if not self.days or not self.days <= frozenset(range(7)):
            raise ValueError(f"a window needs days from 0 (Monday) to 6 (Sunday), not {sorted(self.days)}")
        if not 0 <= self.start_minute < MINUTES_PER_DAY or not 0 <= self.end_minute <= MINUTES_PER_DAY:
            raise ValueError("a window's minutes lie from 0 to 1440")
        if self.start_minute == self.end_minute:
            raise ValueError(
                "a window that ends when it starts is never open; 00:00 to 24:00 is the whole day"
            )

    def is_open(self, at: float) -> bool:
        """Say whether work may start at the instant."""
        return any(start <= at < end for start, end in _openings(self, math.floor(at / _DAY_S)))

    def next_opening(self, at: float) -> float | None:
        """Return the first instant from `at` on at which the window is open; `at` itself when it is.

        None when it does not open within two weeks.
        """
        first = math.floor(at / _DAY_S)
        for day in range(first, first + _HORIZON_DAYS):
            for start, end in _openings(self, day):
                if at < end:
                    return max(at, start)
        return None

    def closes_at(self, at: float) -> float | None:
        """Return when the opening that holds `at` ends; None when closed, infinity when it never ends."""
        if not self.is_open(at):
            return None
        until = at
        first = math.floor(at / _DAY_S)
        for day in range(first, first + _HORIZON_DAYS):
            for start, end in _openings(self, day):
                if start <= until < end:
                    until = end
            if until < (day + 1) * _DAY_S:
                return until
        return math.inf

    def __str__(self) -> str:
        return (
            f"{_days_text(self.days)} {_clock(self.start_minute)}-{_clock(self.end_minute)} {self.zone.key}"
        )


@dataclass(frozen=True, slots=True)
class Freeze:
    """A time in which nothing starts, by a person's word.

    `scope` is `all`, `team/NAME`, `node/NAME` or a pool id `KEY/VALUE`; `until`
    None lasts until somebody lifts it.
    """

    id: str
    scope: str
    reason: str
    by: str
    at: float
    until: float | None = None

    def is_active(self, at: float) -> bool:
        """Say whether the freeze holds at the instant; a clock that was set back does not lift it."""
        return self.until is None or at < self.until

    def covers(self, team: str | None, pools: Iterable[str]) -> bool:
        """Say whether a node of this team and these pools is frozen."""
        if self.scope == "all" or (team is not None and self.scope == f"team/{team}"):
            return True
        return self.scope in pools


def any_open(windows: Sequence[Window], at: float) -> bool:
    """Say whether work may start under these windows; no windows at all are always open."""
    return not windows or any(window.is_open(at) for window in windows)


def next_opening(windows: Sequence[Window], at: float) -> float | None:
    """Return the first instant from `at` on at which any window is open.

    None when none opens within two weeks; `at` itself when there are no windows.
    """
    if not windows:
        return at
    return min(
        (opening for window in windows if (opening := window.next_opening(at)) is not None), default=None
    )


def next_common_opening(groups: Sequence[Sequence[Window]], at: float) -> float | None:
    """Return the first instant from `at` on at which every group has an open window.

    A node of a team with windows waits for the plan's and the team's.  None
    when there is no such instant within two weeks.
    """
    instant = at
    while instant <= at + _HORIZON_DAYS * _DAY_S:
        openings = [next_opening(windows, instant) for windows in groups]
        latest = instant
        for opening in openings:
            if opening is None:
                return None
            latest = max(latest, opening)
        if latest == instant:
            return instant
        instant = latest
    return None


def open_until(windows: Sequence[Window], at: float) -> float | None:
    """Return when work under these windows must have ended, openings that touch taken as one.

    None when they are closed at `at`, infinity when they never close (or there
    are none).
    """
    if not any_open(windows, at):
        return None
    if not windows:
        return math.inf
    until = at
    while until < at + _HORIZON_DAYS * _DAY_S:
        closings = [closing for window in windows if (closing := window.closes_at(until)) is not None]
        if not closings:
            return until
        until = max(closings)
    return math.inf


def longest_opening(windows: Sequence[Window]) -> float:
    """Return the seconds of the longest opening of an ordinary week; infinity when they never close."""
    if not windows:
        return math.inf
    longest, instant = 0.0, _REFERENCE
    while instant < _REFERENCE + _HORIZON_DAYS * _DAY_S:
        opening = next_opening(windows, instant)
        if opening is None:
            break
        until = open_until(windows, opening)
        assert until is not None, "the windows are open at their opening"
        if math.isinf(until):
            return math.inf
        longest, instant = max(longest, until - opening), until
    return longest


@lru_cache(maxsize=_CACHED_DAYS)
def _openings(window: Window, day: int) -> tuple[Span, ...]:
    """Return the window's openings within one UTC day (counted from the epoch), oldest first."""
    spans: list[Span] = []
    for since, until, offset in _offsets(window.zone, day):
        first_local_day = math.floor((since + offset) / _DAY_S)
        last_local_day = math.floor((until + offset - 1) / _DAY_S)
        for local_day in range(first_local_day, last_local_day + 1):
            for start_minute, end_minute in _wall_spans(window, local_day):
                start = max(since, local_day * _DAY_S + start_minute * 60 - offset)
                end = min(until, local_day * _DAY_S + end_minute * 60 - offset)
                if start < end:
                    spans.append((float(start), float(end)))
    return tuple(_merged(sorted(spans)))


def _wall_spans(window: Window, local_day: int) -> Iterator[tuple[int, int]]:
    """Yield the minutes of a local day in which the window is open: yesterday's tail, then today's."""
    weekday = (local_day - _MONDAY_EPOCH_DAY) % 7
    over_midnight = window.end_minute < window.start_minute
    if over_midnight and (weekday - 1) % 7 in window.days:
        yield 0, window.end_minute
    if weekday in window.days:
        yield window.start_minute, MINUTES_PER_DAY if over_midnight else window.end_minute


def _merged(spans: Iterable[Span]) -> Iterator[Span]:
    """Join spans that touch, so that an opening is one opening."""
    current: Span | None = None
    for start, end in spans:
        if current is not None and start <= current[1]:
            current = (current[0], max(current[1], end))
            continue
        if current is not None:
            yield current
        current = (start, end)
    if current is not None:
        yield current


@lru_cache(maxsize=_CACHED_DAYS)
def _offsets(zone: ZoneInfo, day: int) -> tuple[tuple[int, int, int], ...]:
    """Cut a UTC day into stretches (from, until, offset) in which the zone's offset (seconds) is constant."""
    begin, end = day * _DAY_S, (day + 1) * _DAY_S
    probes = pairwise(range(begin, end + 1, _PROBE_S))
    changes = [_change(zone, low, high) for low, high in probes if _offset(zone, low) != _offset(zone, high)]
    cuts = pairwise((begin, *changes, end))
    return tuple((since, until, _offset(zone, since)) for since, until in cuts if since < until)


def _change(zone: ZoneInfo, low: int, high: int) -> int:
    """Return the second in (low, high] at which the zone leaves its offset at `low`."""
    before = _offset(zone, low)
    while high - low > 1:
        middle = (low + high) // 2
        if _offset(zone, middle) == before:
            low = middle
        else:
            high = middle
    return high


def _offset(zone: ZoneInfo, at: int) -> int:
    offset = datetime.fromtimestamp(at, UTC).astimezone(zone).utcoffset()
    assert offset is not None, "a ZoneInfo always has an offset"
    return round(offset.total_seconds())


def _days_text(days: frozenset[int]) -> str:
    ordered = sorted(days)
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{DAYS[ordered[0]]}-{DAYS[ordered[-1]]}"
    return ",".join(DAYS[day] for day in ordered)


def _clock(minute: int) -> str:
    return f"{minute // 60:02d}:{minute % 60:02d}"
