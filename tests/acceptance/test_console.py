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

from rolloutd.control.client import Client, api_path
from rolloutd.demo.environment import DemoEnvironment, _start_process
from tests.tui.terminal import Terminal, rolloutctl_command, terminal, wait_for_any_text
from tests.tui.walkthrough import FAILING_NODE, demo_at_start_gate, resolve_failure

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux"),
]


@pytest.mark.long
def test_two_consoles_survive_double_vote_daemon_kill_failure(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    base = tmp_path_factory.mktemp("c")
    (base / "a").mkdir()
    (base / "b").mkdir()
    with (
        demo_at_start_gate(base / "d") as (stage, rollout),
        terminal(base / "a") as small,
        terminal(base / "b") as large,
    ):
        small.start(rolloutctl_command("--socket", str(stage.socket), "tui"), (80, 24))
        large.start(rolloutctl_command("--socket", str(stage.socket), "tui"), (200, 50))
        _both_vote_at_once((small, large), stage, rollout)
        for window in (small, large):
            window.press("1")
            window.wait_for_text(rollout, "running")
            window.press("Enter")
        wait_for_any_text((small, large), "IN FLIGHT 2")
        with _killed_and_returned((small, large), stage):
            _to_the_end(small, large, stage, rollout)


def _to_the_end(small: Terminal, large: Terminal, stage: DemoEnvironment, rollout: str) -> None:
    _continue(small, large)
    for window in (small, large):
        window.wait_for_text("FAILED 1", f"✗ {FAILING_NODE}", "IN FLIGHT 0", "paused")
    resolve_failure(large, stage)
    for window in (small, large):
        window.press("1")
        window.wait_for_text("12 nodes changed or already current", "100 %", "12/12")
        window.press("q")
    status = Client(stage.socket).get(api_path("rollouts", rollout))
    assert (status["state"], status["done"]) == ("done", 12)
    shells = Client(stage.socket).get(api_path("audit"), {"kind": "ShellOpened"})["entries"]
    assert [(each["entry"]["node"], each["entry"]["fields"]["reason"]) for each in shells] == [
        (FAILING_NODE, "look at it")
    ]


def _both_vote_at_once(windows: tuple[Terminal, Terminal], stage: DemoEnvironment, rollout: str) -> None:
    for number, window in enumerate(windows):
        window.wait_for_text(rollout, "1 for you")
        window.press("a")
        window.wait_for_text("Approve start?")
        window.type(f"console {number}")
    for window in windows:
        window.press("Enter")
    told = wait_for_any_text(windows, "you approved start", "refused:")
    assert sorted(told) == ["refused:", "you approved start"]
    for window in windows:
        window.wait_for_text("running", without="Approve start?")
    gates = Client(stage.socket).get(api_path("rollouts", rollout))["gates"]
    assert [(gate["state"], len(gate["votes"])) for gate in gates if gate["gate"] == "start"] == [("open", 1)]


@contextmanager
def _killed_and_returned(windows: tuple[Terminal, Terminal], stage: DemoEnvironment) -> Iterator[None]:
    """Kill the daemon and start it again; whatever becomes of the test, the second one ends with it."""
    health = Client(stage.socket).get(api_path("health"))
    os.kill(health["pid"], signal.SIGKILL)
    for window in windows:
        window.wait_for_text("✗ offline", "stale: state of")
    daemon = _start_process(stage, "daemon", "rolloutd", "--config", str(stage.directory / "config.yaml"))
    try:
        for window in windows:
            window.wait_for_text("● live", "of 12 changed", without="✗ offline")
        assert Client(stage.socket).get(api_path("health"))["epoch"] == health["epoch"] + 1
        yield
    finally:
        daemon.terminate()
        daemon.wait()


def _continue(asks: Terminal, sees: Terminal) -> None:
    for window in (asks, sees):
        window.wait_for_text("4 of 12 changed", "continue after canary", "yours")
    asks.press("a")
    asks.wait_for_text("Approve continue after canary?")
    asks.type("canaries are fine")
    asks.press("Enter")
    wait_for_any_text((asks, sees), "4 in flight", without="yours")


def test_a_console_outside_any_terminal_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        rolloutctl_command("tui"), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no terminal" in done.stderr
