"""What is left after a year of weekly rollouts: as much as `keep` keeps, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolloutd.store import SqliteBackend, compare_with_audit
from rolloutd.store.sqlite import database
from tests.support.simulated_year import KEPT_WEEKS, simulate_year

NODES = 100


@pytest.mark.long
async def test_year_leaves_what_keep_keeps(tmp_path: Path) -> None:
    weeks = await simulate_year(tmp_path, NODES)
    settled = weeks[KEPT_WEEKS + 1 :]
    assert {each.closed_rollouts for each in settled} == {KEPT_WEEKS - 1}
    assert {each.rollouts_in_memory for each in weeks} == {0}
    sizes = [each.table_bytes for each in settled]
    assert max(sizes) <= 1.05 * min(sizes)
    assert {each.free_bytes for each in weeks} == {0}
    assert compare_with_audit(SqliteBackend(tmp_path / database.FILE_NAME)).ok
