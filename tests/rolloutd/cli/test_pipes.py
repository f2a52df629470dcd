"""rolloutctl among other programs: formats of its output, closed pipes and closed streams."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rolloutd.canned_daemon import CannedDaemon
from tests.rolloutd.cli.samples import ROLLOUT, run

ROOT = Path(__file__).resolve().parents[3]


def test_a_reader_that_goes_away_is_no_mistake_of_ours(daemon: CannedDaemon) -> None:
    daemon.answer("GET", "status", {"rollouts": [{"rollout": "p" * 1000}] * 2000, "trouble": None})
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


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("json", '{"rollouts": [{"rollout": "kernel-abcde", "plan": "kernel"}]}\n'),
        ("yaml", "rollouts:\n- rollout: kernel-abcde\n  plan: kernel\n"),
        ("name", "kernel-abcde\n"),
    ],
)
def test_output_has_the_chosen_format(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], form: str, expected: str
) -> None:
    daemon.answer("GET", "rollouts", {"rollouts": [{"rollout": "kernel-abcde", "plan": "kernel"}]})
    assert run(capsys, "rollouts", "-o", form) == (0, expected, "")


def test_name_of_one_object_is_its_own(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer("GET", "rollouts/somaxconn", ROLLOUT)
    assert run(capsys, "status", "somaxconn", "-o", "name")[1] == "somaxconn-abcde\n"
    daemon.answer("GET", "status", {"rollouts": [ROLLOUT], "trouble": None, "seq": 93})
    assert run(capsys, "status", "-o", "name")[1] == "somaxconn-abcde\n"
    daemon.answer("GET", "teams/infra", {"team": "infra", "members": ["@ops"], "freezes": []})
    assert run(capsys, "team", "show", "infra", "-o", "name")[1] == "infra\n"


def test_wide_output_has_more_columns_before_the_reason(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer("GET", "status", {"rollouts": [ROLLOUT, ROLLOUT], "trouble": None})
    narrow = run(capsys, "status")[1].splitlines()[0].split()
    wide = run(capsys, "status", "-o", "wide")[1]
    headings = wide.splitlines()[0].split()
    assert set(narrow) < set(headings)
    assert headings[-1] == narrow[-1] == "REASON"
    assert "4m to 6m20s" in wide
