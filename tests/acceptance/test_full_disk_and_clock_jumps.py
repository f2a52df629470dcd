"""The real daemon on a full disk, and under a clock that jumps: nothing is lost, nothing runs twice."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rolloutd.control.client import ApiError
from rolloutd.store import SqliteBackend
from tests.support.daemon_environment import CHANGE_PLAYBOOK, DaemonEnvironment, fleet_labels, plan

pytestmark = pytest.mark.servers

FAKETIME = next(Path("/usr/lib").rglob("libfaketimeMT.so.1"), None)
DISK = "100m"

PLAYBOOK = (
    CHANGE_PLAYBOOK
    + """\
    - name: a module, which Ansible writes to its temporary files first
      ansible.builtin.stat: {path: /}
"""
)
HOUR_S = 3600


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
def test_full_disk_fails_no_run_and_loses_nothing(tmp_path: Path) -> None:
    """A run that is in progress ends well; nothing starts, and `why` names the disk, until there is space."""
    made = DaemonEnvironment(tmp_path, fleet_labels(2, 1, 1))
    (tmp_path / "state").mkdir()
    hold = Path(f"{made.log_file}.hold")
    with small_disk(tmp_path / "state"), running(made):
        hold.touch()
        rollout = submit(made, "full", playbook=PLAYBOOK)
        made.vote(rollout, "start")
        made.wait_until(lambda: made.spans(), "the first playbook runs")
        filler = tmp_path / "state" / "filler"
        fill(filler)
        hold.unlink()
        made.wait_for_gate(rollout, "continue")
        assert [span.end is not None for span in made.spans()] == [True]
        made.vote(rollout, "continue")
        made.wait_until(lambda: why(made, rollout, "n2")["reason"]["code"] == "disk-full", "it says why")
        answer = why(made, rollout, "n2")
        assert "the daemon's disk is full" in answer["reason"]["text"]
        assert "nothing starts" in answer["trouble"]
        fill(tmp_path / "state" / "filler2")
        with pytest.raises(ApiError) as refused:
            write_on(made)
        assert refused.value.status == 503
        assert "disk" in refused.value.body["error"] or "full" in refused.value.body["error"]
        assert made.client.get("/v1/health")["version"], "the daemon lives"
        assert "disk" in why(made, rollout, "n2")["trouble"]
        filler.unlink()
        made.wait_until(lambda: release(made), "it writes again")
        made.wait_until(lambda: made.status(rollout)["state"] == "done", "the rollout ends")
        assert sorted(span.node for span in made.spans()) == ["n1", "n2"]
        verdict = SqliteBackend(tmp_path / "state" / "rolloutd.sqlite").verify_chain()
        assert verdict.ok, verdict.message


@pytest.mark.long
@pytest.mark.skipif(FAKETIME is None, reason="needs libfaketime (Debian: faketime)")
def test_a_clock_that_jumps_runs_nothing_twice(tmp_path: Path) -> None:
    """An hour back and two days forth while a playbook runs: each node once, the audit in order."""
    made = DaemonEnvironment(tmp_path, fleet_labels(2, 1, 1))
    offset = tmp_path / "offset"
    offset.write_text("+0\n")
    made.environment = {
        "LD_PRELOAD": str(FAKETIME),
        "FAKETIME_TIMESTAMP_FILE": str(offset),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    with running(made):
        rollout = submit(made, "clock", work_s=4)
        made.vote(rollout, "start")
        made.wait_until(lambda: made.spans(), "the first playbook runs")
        for jump_s in (-HOUR_S, 48 * HOUR_S, 0):
            offset.write_text(f"{jump_s:+d}\n")
            made.wait_until(lambda: made.client.get("/v1/health"), "it answers")
            time.sleep(0.5)
        made.wait_for_gate(rollout, "continue")
        made.vote(rollout, "continue")
        made.wait_until(lambda: made.status(rollout)["state"] == "done", "the rollout ends")
        assert sorted(span.node for span in made.spans()) == ["n1", "n2"]
        verdict = SqliteBackend(tmp_path / "state" / "rolloutd.sqlite").verify_chain()
        assert verdict.ok, verdict.message


@contextmanager
def running(made: DaemonEnvironment) -> Iterator[None]:
    """Start nodes and daemon; end them."""
    try:
        made.start_nodes()
        made.write_settings()
        made.start_daemon()
        yield
    finally:
        made.stop()


@contextmanager
def small_disk(directory: Path) -> Iterator[None]:
    """Mount a disk of a few megabytes."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=700", "tmpfs", str(directory)], check=True
    )
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(path: Path) -> None:
    """Take all the room there is."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return


def why(made: DaemonEnvironment, rollout: str, node: str) -> Any:
    return made.client.get(f"/v1/rollouts/{rollout}/nodes/{node}/why")


def submit(made: DaemonEnvironment, name: str, *, work_s: float = 0, playbook: str = CHANGE_PLAYBOOK) -> str:
    """Submit a plan whose first node is the canary."""
    variables = {"log_file": str(made.log_file), "work_s": work_s}
    spec: dict[str, Any] = plan(name, maintain={"playbook": "change.yml", "vars": variables})
    return made.submit(spec, {"change.yml": playbook})


def write_on(made: DaemonEnvironment) -> None:
    """Hold and release until the room that the database's own log has left is used up."""
    for _ in range(5_000):
        made.client.put("/v1/holds", {"node": "n2", "id": "x", "reason": "x" * 900})
        made.client.delete("/v1/holds", {"node": "n2", "id": "x"})


def release(made: DaemonEnvironment) -> bool:
    """Release what the full disk may have left held, as a sign that the store writes again."""
    made.client.put("/v1/holds", {"node": "n2", "id": "x", "reason": "is there room?"})
    made.client.delete("/v1/holds", {"node": "n2", "id": "x"})
    return True
