"""How times and values are told."""

from __future__ import annotations

import pytest

from tui import wording


@pytest.mark.parametrize(
    ("path", "told", "text"),
    [
        ("soak", 3_600.0, "1h"),
        ("maintain[0].timeout", 5_405, "1h30m5s"),
        ("limits.isolate", 900, "15m"),
        ("maintain[0].vars.somaxconn", 65_535, "65535"),
        ("verify[0].reachable.within", 0, "0s"),
        ("gates.start.four_eyes", False, "false"),
        ("canary", None, "-"),
    ],
)
def test_a_value_of_a_plan_reads_as_in_its_file(path: str, told: object, text: str) -> None:
    assert wording.value(path, told) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(48, "48s"), (119, "1m"), (720, "12m"), (11_100, "3h05"), (10_800, "3h"), (400_000, "4d")],
)
def test_a_span_has_five_characters_at_most(seconds: float, text: str) -> None:
    assert wording.span(seconds) == text
