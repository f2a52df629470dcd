"""Durations, names and bars as text."""

from __future__ import annotations

import pytest

from tui.formatting import formatting
from tui.formatting.ascii_filter import to_ascii
from tui.formatting.lines import justify, line_text, progress_bar


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(48, "48s"), (119, "1m"), (720, "12m"), (11_100, "3h05"), (10_800, "3h"), (400_000, "4d")],
)
def test_duration_has_five_characters_at_most(seconds: float, text: str) -> None:
    assert formatting.format_duration(seconds) == text


@pytest.mark.parametrize("width", [12, 40])
def test_bar_in_ascii_tells_done_from_in_flight(width: int) -> None:
    bar = progress_bar([(0.25, "ok"), (0.25, "bad"), (0.25, "run")], width)
    assert len(set(to_ascii(line_text(bar)))) == 4


def test_cut_text_does_not_touch_the_text_at_the_right() -> None:
    line = justify([("exit status 1 of the driver", "")], [("0:31", "")], 20)
    assert line_text(line) == "exit status 1 … 0:31"
