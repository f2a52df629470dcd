"""What a real daemon removes from its disk, and what it says of it afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon_environment import (
    CHANGE_PLAYBOOK,
    DaemonEnvironment,
    daemon_environment,
    fleet_labels,
    plan,
)

pytestmark = pytest.mark.servers


def test_runs_removed_after_retention_or_rollout_delete(tmp_path: Path) -> None:
    with daemon_environment(tmp_path, fleet_labels(1, 1, 1), observe_within="1s") as made:
        runs = made.directory / "state" / "runs"
        first = walked(made, "first")
        kept = names(runs)
        assert [name.partition(".")[0] for name in kept] == [first]
        assert "begin" in logs(made, first)
        second = walked(made, "second")
        made.client.delete(f"/v1/rollouts/{second}")
        made.wait_until(lambda: names(runs) == kept, "the deleted one's runs go")
        made.kill_daemon()
        (runs / ".gone-half").mkdir()
        made.write_settings(**made.settings, keep={"runs": "1s"})
        made.start_daemon()
        made.wait_until(lambda: not names(runs), "the first one's runs go as well")
        said = logs(made, first)
        assert "the output was removed 1s after the rollout's end (`keep` in the settings)" in said
        assert "run run.configure: ok" in said
        exported = tmp_path / "export.tar.gz"
        ctl(made, "audit", "export", first, "--output", str(exported))
        told = subprocess.run(
            ["tar", "-xzOf", exported, f"{first}/nodes/n1.log"], capture_output=True, check=True
        )
        assert b"`keep` in the settings" in told.stdout


def names(runs: Path) -> list[str]:
    """Return what is there besides the links of kept connections."""
    return sorted(path.name for path in runs.iterdir() if path.name != ".connections")


def walked(made: DaemonEnvironment, name: str) -> str:
    """Walk the one node through a change and return the rollout."""
    spec = plan(name, soak="1s", maintain={"playbook": "change.yml", "vars": variables(made)})
    rollout = made.submit(spec, {"change.yml": CHANGE_PLAYBOOK})
    made.vote(rollout, "start")
    made.wait_for_gate(rollout, "continue")
    made.vote(rollout, "continue")
    made.wait_until(lambda: made.status(rollout)["state"] == "done", "the rollout is done")
    return rollout


def variables(made: DaemonEnvironment) -> dict[str, object]:
    """Return what the playbook of the suite wants to know."""
    return {"log_file": str(made.log_file), "work_s": 0}


def logs(made: DaemonEnvironment, rollout: str) -> str:
    """Return what `logs` prints."""
    return ctl(made, "logs", rollout, "n1")


def ctl(made: DaemonEnvironment, *words: str) -> str:
    """Run rolloutctl and return its output."""
    command = [sys.executable, "-m", "rolloutd.cli", "--socket", str(made.directory / "s"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
