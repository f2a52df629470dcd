"""The one formatter of instants and durations."""

from __future__ import annotations

import pytest

from machines.model.timefmt import format_duration, format_rfc3339


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0s"),
        (0.4, "0s"),
        (45, "45s"),
        (61, "1m1s"),
        (5400, "1h30m"),
        (86_400, "1d"),
        (93_784, "1d2h3m4s"),
    ],
)
def test_duration_names_each_unit_once(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(45, "45s"), (150, "2m30s"), (7825, "2h10m"), (86_700, "1d"), (273_600, "3d4h")],
)
def test_age_has_two_adjacent_units(seconds: float, text: str) -> None:
    assert format_duration(seconds, max_units=2) == text


def test_instant_is_utc() -> None:
    assert format_rfc3339(0.25) == "1970-01-01T00:00:00Z"
    assert format_rfc3339(0.25, "milliseconds") == "1970-01-01T00:00:00.250Z"
