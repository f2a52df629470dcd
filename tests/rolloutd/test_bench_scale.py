"""The fleet of `bench scale`, small: a measurement that nobody runs for weeks must still run."""

from __future__ import annotations

import pytest

from bench import _scale_clients, _scale_fleet, scale

NODES = 30


@pytest.mark.parametrize("part", ["transitions", "pages"])
async def test_part_of_bench_gives_limited_figures(part: str) -> None:
    measure = {"transitions": _scale_fleet.measure_transitions, "pages": _scale_clients.measure_pages}[part]
    figures = await _scale_fleet.with_fleet(NODES, measure)
    assert figures
    assert set(figures) - {"transition"} <= scale.LIMITS.keys()
    assert all(value > 0 for value in figures.values())
