"""The question which rollouts are live costs what is unfinished, and not the history."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from rolloutd.store.queries import IS_LIVE
from rolloutd.store.sqlite import database


def test_live_rollouts_found_without_finished_targets(tmp_path: Path) -> None:
    with closing(database.open_writer(tmp_path / "db")) as connection:
        plan = connection.execute(f"EXPLAIN QUERY PLAN SELECT id FROM rollout WHERE {IS_LIVE}").fetchall()
    steps = [step for *_, step in plan if step.startswith(("SCAN target", "SEARCH target"))]
    assert any("target_unfinished" in step for step in steps)
    by_rollout = "PRIMARY KEY (rollout=?)"  # it would read all targets of each rollout
    assert not [step for step in steps if step.endswith(by_rollout)], plan
