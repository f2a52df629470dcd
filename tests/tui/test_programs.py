"""A shell and a pager in a real terminal, while the console is suspended."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.replay_server import ReplayServer
from tests.support.replayed_fleet import ReplayedFleet
from tests.tui.harness import paused_fleet
from tests.tui.terminal import Terminal, terminal

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")

PAGER = "PAGER=sh -c 'cat; echo PAGED; read key < /dev/tty'"


@contextmanager
def console_in_terminal(fleet: ReplayedFleet, directory: Path) -> Iterator[Terminal]:
    server = ReplayServer(fleet, directory / "s")
    try:
        with terminal(directory) as window:
            state = f"XDG_STATE_HOME={directory}"
            console = [sys.executable, "-P", "-m", "tui", "--socket", str(directory / "s")]
            window.start(["env", state, PAGER, *console], (80, 24))
            window.wait_for_text("kernel-x7k2p", "for you")
            yield window
    finally:
        server.close()


def test_shell_takes_the_terminal_and_gives_it_back(socket_dir: Path) -> None:
    fleet = paused_fleet()
    fleet.whoami["admin"] = True
    fleet.shell = ["sh", "-c", "echo shell of $0; read code; exit $code", "sea001-01"]
    with console_in_terminal(fleet, socket_dir) as window:
        window.press("Enter")
        window.wait_for_text("FAILED 1", "▌ ✗ sea001-01")
        for code, after in (("0", "has ended"), ("7", "sh: exit code 7; press Enter to return")):
            window.press("s")
            window.wait_for_text("Open a shell on sea001-01?", "It runs here, as you: sh -c")
            window.type("disk")
            window.press("Enter")
            window.wait_for_text("shell of sea001-01", without="kernel-x7k2p")
            window.type(code)
            window.press("Enter")
            window.wait_for_text(after)
        # Ctrl-C is for the program, and must not end the console.
        window.press("C-c", "Enter")
        window.wait_for_text("FAILED 1", "has ended")
    posts = [each for each in fleet.requests if each[0] == "POST"]
    assert posts == [("POST", "/v1/nodes/sea001-01/shell", {"reason": "disk"})] * 2


def test_plan_is_shown_in_the_pager(socket_dir: Path) -> None:
    with console_in_terminal(paused_fleet(), socket_dir) as window:
        window.press("e")
        window.wait_for_text("digest: b281f48a", "PAGED")
        window.press("Enter")
        window.wait_for_text("kernel-x7k2p", "p pause")
