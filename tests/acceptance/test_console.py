"""The console in real terminals, against the real daemon and the demo's fleet, by keys alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rolloutd.control.client import Client, path_of
from rolloutd.demo.stage import Stage, _start
from tests.tui.drive import BROKEN, demo, settle
from tests.tui.terminal import Terminal, all_show, rolloutctl, terminal

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux"),
]


@pytest.mark.long
def test_two_consoles_see_a_rollout_through_a_double_vote_a_killed_daemon_and_a_failure(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    base = tmp_path_factory.mktemp("c")
    (base / "a").mkdir()
    (base / "b").mkdir()
    with demo(base / "d") as (stage, rollout), terminal(base / "a") as small, terminal(base / "b") as large:
        small.start(rolloutctl("--socket", str(stage.socket), "tui"), (80, 24))
        large.start(rolloutctl("--socket", str(stage.socket), "tui"), (200, 50))
        _both_vote_at_once((small, large), stage, rollout)
        for window in (small, large):
            window.press("1")
            window.shows(rollout, "running")
            window.press("Enter")
        all_show((small, large), "IN FLIGHT 2")
        with _killed_and_returned((small, large), stage):
            _to_the_end(small, large, stage, rollout)


def _to_the_end(small: Terminal, large: Terminal, stage: Stage, rollout: str) -> None:
    _continue(small, large)
    for window in (small, large):
        window.shows("FAILED 1", f"✗ {BROKEN}", "IN FLIGHT 0", "paused")
    settle(large, stage)
    for window in (small, large):
        window.press("1")
        window.shows("done: 12 nodes changed or already current", "100 %", "12/12")
        window.press("q")
    status = Client(stage.socket).get(path_of("rollouts", rollout))
    assert (status["state"], status["done"]) == ("done", 12)


def _both_vote_at_once(windows: tuple[Terminal, Terminal], stage: Stage, rollout: str) -> None:
    for number, window in enumerate(windows):
        window.shows(rollout, "1 for you")
        window.press("a")
        window.shows("Approve start?")
        window.type(f"console {number}")
    for window in windows:
        window.press("Enter")
    told = all_show(windows, "you said yes at start", "refused:")
    assert sorted(told) == ["refused:", "you said yes at start"]
    for window in windows:
        window.shows("running", without="Approve start?")
    gates = Client(stage.socket).get(path_of("rollouts", rollout))["gates"]
    assert [(gate["state"], len(gate["votes"])) for gate in gates if gate["gate"] == "start"] == [("open", 1)]


@contextmanager
def _killed_and_returned(windows: tuple[Terminal, Terminal], stage: Stage) -> Iterator[None]:
    """Kill the daemon and start it again; whatever becomes of the test, the second one ends with it."""
    health = Client(stage.socket).get(path_of("health"))
    os.kill(health["pid"], signal.SIGKILL)
    for window in windows:
        window.shows("✗ lost", "stale: what is shown is of")
    daemon = _start(stage, "daemon", "rolloutd", "--config", str(stage.directory / "config.yaml"))
    try:
        for window in windows:
            window.shows("● live", "of 12 done", without="✗ lost")
        assert Client(stage.socket).get(path_of("health"))["epoch"] == health["epoch"] + 1
        yield
    finally:
        daemon.terminate()
        daemon.wait()


def _continue(asks: Terminal, sees: Terminal) -> None:
    for window in (asks, sees):
        window.shows("4 of 12 done", "continue after canary", "yours")
    asks.press("a")
    asks.shows("Approve continue after canary?")
    asks.type("canaries are fine")
    asks.press("Enter")
    all_show((asks, sees), "4 in flight", without="yours")


def test_a_console_outside_any_terminal_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        rolloutctl("tui"), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "needs a terminal" in done.stderr
