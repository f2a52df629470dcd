"""The demo in the console: the person approves, looks around and settles what fails, by keys.

The console is a program of its own, started on the stage's socket.  Meanwhile a
repairer watches: a node that was broken on purpose is repaired as soon as it has
failed, so that whoever has it tried again sees it pass.
"""

from __future__ import annotations

import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from rolloutd.control.client import Answer, NoDaemon, path_of
from rolloutd.control.wire import Rollout
from rolloutd.demo.fleet import heal
from rolloutd.demo.stage import Stage
from rolloutd.demo.story import begin

HINT = "the demo: a approves the start, Enter looks inside, 2 shows what is decided, ? all keys, q leaves"
"""What the console tells somebody who sees it for the first time."""

END_LIMIT_S = 5.0
"""How long the console may take to put the terminal back when the demo has to end."""

SHOW_ALL = "\x1b[?1000l\x1b[?1003l\x1b[?1006l\x1b[?2004l\x1b[?1049l\x1b[?25h"
"""Puts a terminal back whose program was ended: no mouse, no pasting, the first screen, a cursor."""


def perform(stage: Stage, faults: Mapping[str, str]) -> Rollout:
    """Open the console on a submitted plan, and return how things stand when the person leaves."""
    rollout = begin(stage, lambda _: None, faults)
    threading.Thread(target=_repair, args=(stage, set(faults)), name="repairer", daemon=True).start()
    with _terminal_kept():
        _watch([sys.executable, "-P", "-m", "tui", "--socket", str(stage.socket), "--hint", HINT])
    found: Rollout = stage.client.get(path_of("rollouts", rollout))
    return found


def _watch(command: list[str]) -> None:
    console = subprocess.Popen(command)
    try:
        console.wait()
    finally:
        if console.poll() is None:
            console.terminate()
            with suppress(subprocess.TimeoutExpired):
                console.wait(END_LIMIT_S)
            console.kill()
            sys.stdout.write(SHOW_ALL)
            sys.stdout.flush()


@contextmanager
def _terminal_kept() -> Iterator[None]:
    kept = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, kept)


def _repair(stage: Stage, broken: set[str]) -> None:
    """Repair each broken node once it has failed; ends with the daemon."""
    with suppress(NoDaemon, Answer):
        for line in stage.client.stream(path_of("events"), {"after": 0, "follow": True}):
            entry = line.get("entry") or {}
            if entry.get("event") == "PhaseMoved" and entry["fields"]["target"] == "failed":
                node = entry["node"]
                if node in broken:
                    broken.discard(node)
                    heal(stage.fleet, node)
