"""The demo in the console, where the user approves and settles failures.

The console is a separate program on the demo daemon's socket.  A thread repairs each
node that the demo broke as soon as it has failed, so that the user's retry succeeds.
"""

from __future__ import annotations

import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from rolloutd.control.client import ApiError, DaemonUnreachable, api_path
from rolloutd.control.wire import Rollout
from rolloutd.demo.environment import DemoEnvironment
from rolloutd.demo.fleet import clear_fault
from rolloutd.demo.scenario import start_rollout

CONSOLE_HINT = "the demo: a approves the start, Enter opens it, 2 shows decisions, ? all keys, q quits"
"""The console's hint for a first-time user."""

TERMINATE_TIMEOUT_S = 5.0
"""How long the console may take to reset the terminal when the demo is interrupted."""

RESET_TERMINAL = "\x1b[?1000l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?1049l\x1b[?25h"
"""Resets the terminal of a killed console: mouse and paste modes off, main screen, cursor on."""


def run_console(demo: DemoEnvironment, faults: Mapping[str, str]) -> Rollout:
    """Open the console on a submitted plan; return the rollout when the user quits."""
    rollout = start_rollout(demo, lambda _: None, faults)
    threading.Thread(target=_clear_faults, args=(demo, set(faults)), name="repairer", daemon=True).start()
    with _restore_terminal():
        _run_console_process(
            [sys.executable, "-P", "-m", "tui", "--socket", str(demo.socket), "--hint", CONSOLE_HINT]
        )
    found: Rollout = demo.client.get(api_path("rollouts", rollout))
    return found


def _run_console_process(command: list[str]) -> None:
    console = subprocess.Popen(command)
    try:
        console.wait()
    finally:
        if console.poll() is None:
            console.terminate()
            with suppress(subprocess.TimeoutExpired):
                console.wait(TERMINATE_TIMEOUT_S)
            console.kill()
            sys.stdout.write(RESET_TERMINAL)
            sys.stdout.flush()


@contextmanager
def _restore_terminal() -> Iterator[None]:
    attributes = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, attributes)


def _clear_faults(demo: DemoEnvironment, faulty_nodes: set[str]) -> None:
    """Repair each broken node once it has failed, until the daemon ends."""
    with suppress(DaemonUnreachable, ApiError):
        for line in demo.client.stream(api_path("events"), {"after": 0, "follow": True}):
            entry = line.get("entry") or {}
            if entry.get("event") == "PhaseMoved" and entry["fields"]["target"] == "failed":
                node = entry["node"]
                if node in faulty_nodes:
                    faulty_nodes.discard(node)
                    clear_fault(demo.fleet_directory, node)
