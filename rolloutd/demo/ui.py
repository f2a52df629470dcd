"""User interfaces of the demo: bars on a terminal, a log, or the console.

The terminal shows a bar per pool and asks at each gate.  The log gets one line per
event, and the demo answers its own questions.  The console is a separate program on
the demo daemon's socket; a thread repairs each node that the demo broke as soon as it
has failed, so that the user's retry succeeds.
"""

from __future__ import annotations

import subprocess
import sys
import termios
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rolloutd.cli.follow import EventPrinter, WatchUpdate, event_lines
from rolloutd.cli.output import print_message, sanitize
from rolloutd.cli.progress_bars import REDRAWS_PER_S, render_rollouts
from rolloutd.control.client import ApiError, DaemonUnreachable, api_path
from rolloutd.control.rollouts.wire import Rollout
from rolloutd.demo.environment import DemoEnvironment
from rolloutd.demo.fleet import clear_fault
from rolloutd.demo.scenario import start_rollout


class LogUi:
    """Lines on stdout; reports on stderr each question that it answers with yes."""

    def __init__(self) -> None:
        self.show_update = EventPrinter().print_update

    def print_message(self, text: str) -> None:
        print(sanitize(text), flush=True)  # noqa: T201

    def confirm(self, question: str) -> bool:
        print_message(f"{question} The demo answers yes.")
        return True

    def close(self) -> None:
        """Nothing is open."""


class TerminalUi:
    def __init__(self, *, interactive: bool) -> None:
        self._console = Console()
        self._interactive = interactive
        self._live: Live | None = None

    def show_update(self, update: WatchUpdate) -> None:
        """Draw the bars, with the new events above them."""
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=REDRAWS_PER_S)
            self._live.start()
        for text in event_lines(update):
            self._live.console.print(Text(text, style="dim"))
        self._live.update(render_rollouts(update.rollouts), refresh=True)

    def print_message(self, text: str) -> None:
        self._console.print(Text(sanitize(text), style="bold"))

    def confirm(self, question: str) -> bool:
        """Ask without drawing bars meanwhile; Enter alone is a yes."""
        if not self._interactive:
            self.print_message(f"{question} The demo answers yes.")
            return True
        self.close()
        # input() writes its prompt to stderr if that is another terminal.
        print(f"\n{sanitize(question)} [Y/n] ", end="", flush=True)  # noqa: T201
        answer = sys.stdin.readline()
        return answer.strip().lower() in ("", "y", "yes") if answer else False

    def close(self) -> None:
        """Keep the last picture on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None


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
