"""Runs that ended after a backup, when that backup is restored."""

from __future__ import annotations

import json
from pathlib import Path

from machines.model.events import RequestDenied
from machines.model.rollout import DAEMON
from rolloutd.adapters.ansible.forgotten_runs import set_aside
from rolloutd.service.reload import TeamPlanCompiler
from rolloutd.store import backup, open_store
from tests.support.forked_process import ADMIN, run_forked


def make_run(state_dir: Path, name: str, began_at: float | None) -> None:
    """Make the directory of a run, which has ended if it says when it began."""
    directory = state_dir / "runs" / name
    directory.mkdir(parents=True)
    if began_at is not None:
        status = {"ended": "exit", "code": 0, "began_at": began_at, "duration_s": 1.0, "left": 0}
        (directory / "status").write_text(json.dumps(status))


async def test_restored_daemon_takes_no_result_of_a_forgotten_run(tmp_path: Path) -> None:
    """Its next run of that place has the same name; the node may have been rolled back meanwhile."""
    state_dir = tmp_path / "state"
    state_dir.mkdir(mode=0o700)
    store = await open_store(state_dir, compile_plan=TeamPlanCompiler({}))
    await store.commit([RequestDenied(DAEMON, "one", "why", 1.0)], actor=DAEMON, cause="test", at=1.0)
    await store.close()
    backup(state_dir, tmp_path / "copy.sqlite")
    make_run(state_dir, "R.n1.1.configure.1@m", 0.5)
    make_run(state_dir, "R.n2.1.configure.1@m", 2.0)
    make_run(state_dir, "R.n3.1.configure.1@m", None)
    config = tmp_path / "config.yaml"
    config.write_text(f"{{state_dir: {state_dir}, socket: {tmp_path}/s, inventory: []}}")
    words = ["restore", f"--config={config}", f"--file={tmp_path}/copy.sqlite", "--json"]
    done = run_forked(ADMIN, words, timeout_s=120.0)
    assert done.returncode == 0, done.stderr
    restored = json.loads(done.stdout)
    assert restored["forgotten_runs"] == 1
    assert "1 run after the backup: not known, so begun again" in done.stderr
    assert sorted(path.name for path in (state_dir / "runs").iterdir()) == [
        "R.n1.1.configure.1@m",
        f"R.n2.1.configure.1@m.forgotten-{restored['epoch']}",
        "R.n3.1.configure.1@m",
    ]


def test_run_that_the_restored_database_knows_keeps_its_name(tmp_path: Path) -> None:
    make_run(tmp_path, "R.n1.1.configure.1@m", 2.0)
    runs_dir = tmp_path / "runs"
    assert set_aside(runs_dir, known={"R.n1.1.configure.1@m"}, since=1.0, suffix="forgotten-2") == 0
    assert set_aside(runs_dir, known=set(), since=1.0, suffix="forgotten-2") == 1
