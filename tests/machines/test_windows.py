"""Windows follow the wall clock, also when the clocks change."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machines.model.windows import (
    Freeze,
    Window,
    any_open,
    longest_opening,
    next_common_opening,
    next_opening,
    open_until,
)

AMSTERDAM = ZoneInfo("Europe/Amsterdam")
EVERY_DAY = frozenset(range(7))
WEEKDAYS = frozenset(range(5))
ZONES = [
    "Europe/Amsterdam",
    "America/New_York",
    "Australia/Lord_Howe",
    "Asia/Kathmandu",
    "UTC",
    "Pacific/Apia",
]


def instant(text: str, zone: ZoneInfo = AMSTERDAM, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold).timestamp()


def window(start: int, end: int, days: frozenset[int] = EVERY_DAY, zone: ZoneInfo = AMSTERDAM) -> Window:
    return Window(days, start, end, zone)


def wall_clock_says(window: Window, at: float) -> bool:
    """Judge by reading the clock on the wall: the definition, written down a second time."""
    local = datetime.fromtimestamp(at, UTC).astimezone(window.zone)
    minute = local.hour * 60 + local.minute
    today, yesterday = local.weekday(), (local.weekday() - 1) % 7
    if window.end_minute > window.start_minute:
        return today in window.days and window.start_minute <= minute < window.end_minute
    return (today in window.days and minute >= window.start_minute) or (
        yesterday in window.days and minute < window.end_minute
    )


WINDOWS = (
    st.tuples(
        st.frozensets(st.integers(0, 6), min_size=1),
        st.integers(0, 1439),
        st.integers(0, 1440),
        st.sampled_from(ZONES).map(ZoneInfo),
    )
    .filter(lambda parts: parts[1] != parts[2])
    .map(lambda parts: Window(*parts))
)

INSTANTS = st.integers(1_700_000_000, 1_900_000_000).map(float)


@given(WINDOWS, INSTANTS)
def test_a_window_is_open_when_the_wall_clock_says_so(window: Window, at: float) -> None:
    assert window.is_open(at) is wall_clock_says(window, at)


@given(WINDOWS, INSTANTS)
def test_an_opening_is_the_first_open_instant(window: Window, at: float) -> None:
    opening = window.next_opening(at)
    assert opening is not None
    assert opening >= at
    assert window.is_open(opening)
    if opening > at:
        assert not window.is_open(at)
        assert not window.is_open(opening - 1)


@given(WINDOWS, INSTANTS)
def test_a_closing_is_the_first_shut_instant(window: Window, at: float) -> None:
    closing = window.closes_at(at)
    if closing is None:
        assert not window.is_open(at)
    elif not math.isinf(closing):
        assert window.is_open(closing - 1)
        assert not window.is_open(closing)


def test_a_window_over_midnight_belongs_to_the_day_it_starts() -> None:
    friday_night = window(22 * 60, 4 * 60, frozenset({4}))
    assert friday_night.is_open(instant("2026-11-20 23:00"))
    assert friday_night.is_open(instant("2026-11-21 03:59"))
    assert not friday_night.is_open(instant("2026-11-20 03:00"))
    assert friday_night.closes_at(instant("2026-11-20 22:00")) == instant("2026-11-21 04:00")


def test_a_window_in_the_lost_hour_skips_that_day() -> None:
    night = window(2 * 60 + 15, 2 * 60 + 45)
    assert night.next_opening(instant("2026-03-29 00:00")) == instant("2026-03-30 02:15")


def test_a_window_across_the_lost_hour_is_an_hour_shorter() -> None:
    night = window(60, 4 * 60)
    opening = instant("2026-03-29 01:00")
    assert night.closes_at(opening) == opening + 2 * 3600


def test_a_window_in_the_doubled_hour_opens_twice() -> None:
    night = window(2 * 60 + 15, 2 * 60 + 45)
    first = night.next_opening(instant("2026-10-25 00:00"))
    assert first == instant("2026-10-25 02:15", fold=0)
    assert first is not None
    assert night.closes_at(first) == first + 1800
    assert night.next_opening(first + 1800) == instant("2026-10-25 02:15", fold=1)


def test_a_window_across_the_doubled_hour_is_an_hour_longer() -> None:
    night = window(60, 4 * 60)
    opening = instant("2026-10-25 01:00")
    assert night.closes_at(opening) == opening + 4 * 3600


def test_whole_days_never_close() -> None:
    always = window(0, 1440)
    assert always.closes_at(instant("2026-11-20 12:00")) == math.inf
    assert open_until([always], instant("2026-11-20 12:00")) == math.inf
    assert longest_opening([always]) == math.inf
    weekdays = window(0, 1440, WEEKDAYS)
    assert weekdays.closes_at(instant("2026-11-17 12:00")) == instant("2026-11-21 00:00")


def test_several_windows_open_when_any_does() -> None:
    morning, noon = window(9 * 60, 12 * 60, WEEKDAYS), window(12 * 60, 13 * 60, WEEKDAYS)
    both = [noon, morning]
    assert any_open(both, instant("2026-11-20 09:00"))
    assert open_until(both, instant("2026-11-20 09:30")) == instant("2026-11-20 13:00")
    assert open_until(both, instant("2026-11-20 14:00")) is None
    assert next_opening(both, instant("2026-11-20 14:00")) == instant("2026-11-23 09:00")
    assert longest_opening(both) == 4 * 3600


def test_no_windows_are_always_open() -> None:
    assert any_open([], 0.0)
    assert next_opening([], 5.0) == 5.0
    assert open_until([], 5.0) == math.inf
    assert longest_opening([]) == math.inf


def test_plan_and_team_windows_both_apply() -> None:
    plan, team = [window(9 * 60, 16 * 60, WEEKDAYS)], [window(15 * 60, 17 * 60, frozenset({2}))]
    assert next_common_opening([plan, team, []], instant("2026-11-20 10:00")) == instant("2026-11-25 15:00")
    never_together = [window(17 * 60, 18 * 60)]
    assert next_common_opening([plan, never_together], instant("2026-11-20 10:00")) is None


@pytest.mark.parametrize(
    ("days", "start", "end"),
    [
        (frozenset(), 0, 60),
        (frozenset({7}), 0, 60),
        (EVERY_DAY, -1, 60),
        (EVERY_DAY, 1440, 60),
        (EVERY_DAY, 0, 1441),
        (EVERY_DAY, 60, 60),
    ],
)
def test_invalid_window_rejected(days: frozenset[int], start: int, end: int) -> None:
    with pytest.raises(ValueError, match="window"):
        window(start, end, days)


def test_a_window_says_what_it_is() -> None:
    assert str(window(9 * 60, 16 * 60, WEEKDAYS)) == "mon-fri 09:00-16:00 Europe/Amsterdam"
    assert str(window(0, 1440, frozenset({0, 2}))) == "mon,wed 00:00-24:00 Europe/Amsterdam"


def test_a_freeze_covers_its_scope_until_its_end() -> None:
    freeze = Freeze("f1", "rack/r12", "power work", "alice", at=100.0, until=200.0)
    assert freeze.covers("infra", ["team/infra", "rack/r12"])
    assert not freeze.covers("infra", ["team/infra", "rack/r1"])
    assert [freeze.is_active(at) for at in (99.0, 100.0, 199.0, 200.0)] == [True, True, True, False]
    assert Freeze("f2", "all", "", "bob", at=0.0).covers(None, [])
    assert Freeze("f3", "team/infra", "", "bob", at=0.0).covers("infra", [])
    assert not Freeze("f3", "team/infra", "", "bob", at=0.0).covers("payments", ["team/payments"])
