"""Seeds of the simulation whose daemons have their store in a real PostgreSQL.

ROLLOUTD_TEST_POSTGRESQL_SEEDS=40 python -m pytest tests/sim/test_postgresql.py runs more of them.
"""

from __future__ import annotations

import os

import pytest

from tests.sim import workspace
from tests.sim.seeds import run_seed
from tests.support.postgresql import Postgresql

SEEDS = int(os.environ.get("ROLLOUTD_TEST_POSTGRESQL_SEEDS", "2"))
"""Each takes some seconds of real round trips."""


@pytest.mark.long
@pytest.mark.servers("postgresql")
@pytest.mark.parametrize("seed", range(SEEDS))
def test_seed_on_postgresql_finds_no_violation(
    postgresql: Postgresql, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(workspace, "postgresql", postgresql.address(postgresql.emptied_database()))
    result = run_seed(seed)
    assert not result.violations, result
