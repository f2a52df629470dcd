"""Many real nodes prepared at once: the rate of all, what a second rollout costs, and a forced stage.

`python -m bench.prepare` does the same over 200 nodes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rolloutd.engine.preparation.rate_limit import BURST_S
from tests.support.prepared_fleet import prepared_fleet

MIB = 1 << 20
NODES = 16
SIZE_MIB = 2
RATE_MIB = 8

pytestmark = [pytest.mark.servers, pytest.mark.long]


def test_fleet_is_prepared_at_the_rate_and_only_once(tmp_path: Path) -> None:
    with prepared_fleet(tmp_path, NODES, size=SIZE_MIB * MIB, rate=f"{RATE_MIB}MiB/s") as fleet:
        first = fleet.prepare()
        assert first.states == {("stage", "done"): NODES, ("install", "done"): 2}
        # A slow machine takes longer; what the limit allows is for the tests of RateLimit and the bench.
        assert first.transfer_s() >= NODES * SIZE_MIB / RATE_MIB - BURST_S
        again = fleet.prepare(supersede=True, again=True)
        assert again.states == {("stage", "skipped"): NODES, ("install", "skipped"): 2}
        assert again.cpu_s < first.cpu_s / 2
        forced = fleet.prepare(supersede=True, again=True, force_stages=["install"])
        assert forced.states == {("stage", "skipped"): NODES, ("install", "done"): 2}
        assert fleet.installed() == {"n1": 2, "n2": 2}
