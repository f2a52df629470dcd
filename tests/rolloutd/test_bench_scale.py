"""The fleet of `bench scale`, small: a measurement that nobody runs for weeks must still run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_ended_bench_leaves_nothing(tmp_path: Path) -> None:
    command, env = [sys.executable, "-m", "bench", "scale", "--nodes", "300"], os.environ
    with subprocess.Popen(
        command, env={**env, "TMPDIR": str(tmp_path)}, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr is not None
        assert "measured" in running.stderr.readline()  # the first part; the next one runs now
        assert list(tmp_path.iterdir())
        running.terminate()
        running.wait(30)
    assert not list(tmp_path.iterdir())


def test_figures_above_limit_or_missing_are_problems() -> None:
    within = {name: limit or 1.0 for name, (_, limit) in scale.LIMITS.items() if name != "decision"}
    values = within | {"idle cpu": 1.5}
    figures = [scale.Figure(name, NODES, value, *scale.LIMITS[name]) for name, value in values.items()]
    problems = list(scale.find_problems(figures, (NODES,)))
    assert problems == [
        "decision of 30 nodes: not measured",
        "idle cpu of 30 nodes: 1.5 % of a core, the limit is 1",
    ]
