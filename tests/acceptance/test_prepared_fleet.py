"""Many real nodes prepared at once: the rate of all, what a second rollout costs, and a forced stage.

`python -m bench.prepare` does the same over 200 nodes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.prepared_fleet import prepared_fleet

MIB = 1 << 20
NODES = 16
RATE_MIB = 8

pytestmark = [pytest.mark.servers, pytest.mark.long]


def test_fleet_is_prepared_at_the_rate_and_only_once(tmp_path: Path) -> None:
    with prepared_fleet(tmp_path, NODES, size=2 * MIB, rate=f"{RATE_MIB}MiB/s") as fleet:
        first = fleet.prepare()
        assert first.states == {("stage", "done"): NODES, ("install", "done"): 2}
        assert 0.9 * RATE_MIB < first.rate_bps() / MIB < 1.1 * RATE_MIB
        again = fleet.prepare(supersede=True, again=True)
        assert again.states == {("stage", "skipped"): NODES, ("install", "skipped"): 2}
        assert again.cpu_s < 0.05 * NODES
        forced = fleet.prepare(supersede=True, again=True, force_stages=["install"])
        assert forced.states == {("stage", "skipped"): NODES, ("install", "done"): 2}
        assert fleet.installed() == {"n1": 2, "n2": 2}
