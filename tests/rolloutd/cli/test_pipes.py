"""rolloutctl as a process among others: whoever reads it may go away, and what it writes to may be closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rolloutd.canned_daemon import CannedDaemon

ROOT = Path(__file__).resolve().parents[3]


def test_a_reader_that_goes_away_is_no_mistake_of_ours(daemon: CannedDaemon) -> None:
    daemon.answer("GET", "status", {"rollouts": [{"plan": "p" * 1000}] * 2000, "trouble": None})
    process = subprocess.Popen(
        [sys.executable, "-m", "rolloutd.cli", "status", "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate()
    assert (process.returncode, err) == (141, b"")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-"])
def test_closed_streams_change_no_exit_code(daemon: CannedDaemon, closed: str) -> None:
    """As a service or a cron job may have it: the order is carried out, and nothing breaks."""
    daemon.answer("GET", "rollouts", {"rollouts": []})
    command = f"{sys.executable} -m rolloutd.cli rollouts {closed}"
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
