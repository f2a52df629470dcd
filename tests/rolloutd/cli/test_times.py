"""Instants and durations as people write and read them."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutd.cli import output
from rolloutd.control import user_time

NOW = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("2h", "2026-11-20T14:00:00Z"),
        ("1h30m", "2026-11-20T13:30:00Z"),
        ("1d", "2026-11-21T12:00:00Z"),
        ("2026-11-20T16:00:00+01:00", "2026-11-20T15:00:00Z"),
        ("2026-11-20T16:00:00Z", "2026-11-20T16:00:00Z"),
    ],
)
def test_read(written: str, read: str) -> None:
    assert user_time.parse_future(written, NOW) == read


@pytest.mark.parametrize(
    "written",
    [
        "",
        "soon",
        "2",
        "2w",
        "-2h",
        "2026-11-20",
        "2026-11-20T16:00:00",
        "999999d" * 9,
        "0001-01-01T00:00:00+01:00",
    ],
)
def test_what_is_no_moment_is_refused_with_a_sentence(written: str) -> None:
    with pytest.raises(ValueError, match=r"neither|time zone|too far"):
        user_time.parse_future(written, NOW)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("8h", "2026-11-20T04:00:00Z"),
        ("8h ago", "2026-11-20T04:00:00Z"),
        ("2026-11-20T09:00:00+01:00", "2026-11-20T08:00:00Z"),
    ],
)
def test_past_duration_is_before_now(written: str, read: str) -> None:
    assert user_time.parse_past(written, NOW) == read


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert user_time.parse_future(text, NOW).endswith("Z")


def test_an_age_and_what_is_ahead() -> None:
    assert output.format_age(None) == "-"
    assert output.format_age((NOW - timedelta(minutes=3)).isoformat(), NOW) == "3m"
    assert output.format_range(240.0, 380.0) == "4m to 6m20s"
    assert output.format_range(55.0, 55.0) == "55s"
