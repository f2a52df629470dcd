"""Windows, in which work may start, and freezes, in which it must not.

A window is open when a wall clock in its zone shows one of its days and a time from `start_minute` up to, but
not at, `end_minute`.  A window inside the hour that is lost in spring does not open on that day; a window
inside the hour that is repeated in autumn opens twice.  All instants are arguments, in epoch seconds.
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
_SEARCH_DAYS = 15
"""How far ahead to search for an opening: two of every weekday, so one lost hour hides nothing."""

_OFFSET_STEP_S = 4 * 3600
"""Step of the search for offset changes; no zone has changed its clocks twice in four hours."""

_CACHED_DAYS = 8192
"""Cached window-days: sixteen days of some five hundred windows, a few megabytes."""

_MONDAY_EPOCH_DAY = 4
"""1970-01-05 was the first Monday after the epoch."""

_REFERENCE_MONDAY = 1_767_571_200.0
"""2026-01-05, a Monday far from most clock changes: the ordinary week is measured from here."""

Opening = tuple[float, float]
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
        """Return whether work may start at the instant."""
        return any(start <= at < end for start, end in _openings_on_day(self, math.floor(at / _DAY_S)))

    def next_opening(self, at: float) -> float | None:
        """Return the first open instant from `at` on, None when there is none within two weeks."""
        first = math.floor(at / _DAY_S)
        for day in range(first, first + _SEARCH_DAYS):
            for start, end in _openings_on_day(self, day):
                if at < end:
                    return max(at, start)
        return None

    def closes_at(self, at: float) -> float | None:
        """Return when the opening that contains `at` ends; None when closed, infinity when it never ends."""
        if not self.is_open(at):
            return None
        until = at
        first = math.floor(at / _DAY_S)
        for day in range(first, first + _SEARCH_DAYS):
            for start, end in _openings_on_day(self, day):
                if start <= until < end:
                    until = end
            # Openings are cut at midnight UTC, so one that reaches it may continue on the next day.
            if until < (day + 1) * _DAY_S:
                return until
        return math.inf

    def __str__(self) -> str:
        return (
            f"{_format_days(self.days)} "
            f"{_format_minute(self.start_minute)}-{_format_minute(self.end_minute)} {self.zone.key}"
        )


@dataclass(frozen=True, slots=True)
class Freeze:
    """A time in which nothing starts, by a person's order.

    `scope` is `all`, `team/NAME`, `node/NAME` or a pool id `KEY/VALUE`; `until` None lasts until it is
    lifted.
    """

    id: str
    scope: str
    reason: str
    by: str
    at: float
    until: float | None = None

    def is_active(self, at: float) -> bool:
        """Return whether the freeze is active at the instant; a clock that was set back does not lift it."""
        return self.until is None or at < self.until

    def covers(self, team: str | None, pools: Iterable[str]) -> bool:
        if self.scope == "all" or (team is not None and self.scope == f"team/{team}"):
            return True
        return self.scope in pools


def any_open(windows: Sequence[Window], at: float) -> bool:
    """Return whether work may start under these windows; without windows it always may."""
    return not windows or any(window.is_open(at) for window in windows)


def next_opening(windows: Sequence[Window], at: float) -> float | None:
    """Return the first instant from `at` on at which any window is open; `at` without windows.

    None when none opens within two weeks.
    """
    if not windows:
        return at
    return min(
        (opening for window in windows if (opening := window.next_opening(at)) is not None), default=None
    )


def next_common_opening(groups: Sequence[Sequence[Window]], at: float) -> float | None:
    """Return the first instant from `at` on at which every group has an open window.

    None when there is none within two weeks.  The groups are the windows of the plan and of the team.
    """
    instant = at
    while instant <= at + _SEARCH_DAYS * _DAY_S:
        openings = [next_opening(windows, instant) for windows in groups]
        if None in openings:
            return None
        # No instant before the latest of them suits that group, so the search continues there.
        latest = max((opening for opening in openings if opening is not None), default=instant)
        if latest == instant:
            return instant
        instant = latest
    return None


def open_until(windows: Sequence[Window], at: float) -> float | None:
    """Return when these windows close; adjacent openings count as one.

    None when they are closed at `at`, infinity when they never close.
    """
    if not any_open(windows, at):
        return None
    if not windows:
        return math.inf
    until = at
    while until < at + _SEARCH_DAYS * _DAY_S:
        closings = [closing for window in windows if (closing := window.closes_at(until)) is not None]
        if not closings:
            return until
        until = max(closings)
    return math.inf


def longest_opening(windows: Sequence[Window]) -> float:
    """Return the longest opening of an ordinary week (seconds), infinity when they never close."""
    if not windows:
        return math.inf
    longest, instant = 0.0, _REFERENCE_MONDAY
    while instant < _REFERENCE_MONDAY + _SEARCH_DAYS * _DAY_S:
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
def _openings_on_day(window: Window, day: int) -> tuple[Opening, ...]:
    """Return the openings within one UTC day (counted from the epoch), oldest first."""
    spans: list[Opening] = []
    for since, until, offset in _split_by_offset(window.zone, day):
        first_local_day = math.floor((since + offset) / _DAY_S)
        last_local_day = math.floor((until + offset - 1) / _DAY_S)
        # A UTC day covers parts of two local days in every zone but UTC.
        for local_day in range(first_local_day, last_local_day + 1):
            for start_minute, end_minute in _local_minutes(window, local_day):
                start = max(since, local_day * _DAY_S + start_minute * 60 - offset)
                end = min(until, local_day * _DAY_S + end_minute * 60 - offset)
                if start < end:
                    spans.append((float(start), float(end)))
    return tuple(_merge_adjacent(sorted(spans)))


def _local_minutes(window: Window, local_day: int) -> Iterator[tuple[int, int]]:
    """Yield the open minutes of a local day: the rest of yesterday's opening, then today's."""
    weekday = (local_day - _MONDAY_EPOCH_DAY) % 7
    over_midnight = window.end_minute < window.start_minute
    if over_midnight and (weekday - 1) % 7 in window.days:
        yield 0, window.end_minute
    if weekday in window.days:
        yield window.start_minute, MINUTES_PER_DAY if over_midnight else window.end_minute


def _merge_adjacent(spans: Iterable[Opening]) -> Iterator[Opening]:
    current: Opening | None = None
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
def _split_by_offset(zone: ZoneInfo, day: int) -> tuple[tuple[int, int, int], ...]:
    """Split a UTC day where the zone's offset changes, into (from, until, offset) in seconds."""
    begin, end = day * _DAY_S, (day + 1) * _DAY_S
    steps = pairwise(range(begin, end + 1, _OFFSET_STEP_S))
    changes = [
        _find_offset_change(zone, low, high)
        for low, high in steps
        if _utc_offset_s(zone, low) != _utc_offset_s(zone, high)
    ]
    stretches = pairwise((begin, *changes, end))
    return tuple((since, until, _utc_offset_s(zone, since)) for since, until in stretches if since < until)


def _find_offset_change(zone: ZoneInfo, low: int, high: int) -> int:
    """Return the second in (low, high] at which the zone leaves its offset at `low`."""
    before = _utc_offset_s(zone, low)
    while high - low > 1:
        middle = (low + high) // 2
        if _utc_offset_s(zone, middle) == before:
            low = middle
        else:
            high = middle
    return high


def _utc_offset_s(zone: ZoneInfo, at: int) -> int:
    offset = datetime.fromtimestamp(at, UTC).astimezone(zone).utcoffset()
    assert offset is not None, "a ZoneInfo always has an offset"
    return round(offset.total_seconds())


def _format_days(days: frozenset[int]) -> str:
    ordered = sorted(days)
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{DAYS[ordered[0]]}-{DAYS[ordered[-1]]}"
    return ",".join(DAYS[day] for day in ordered)


def _format_minute(minute: int) -> str:
    return f"{minute // 60:02d}:{minute % 60:02d}"
