"""User interfaces of the demo: a terminal, or a log.

The terminal shows a bar per pool and asks at each gate.  The log gets one line per
event, and the demo answers its own questions.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rolloutd.cli.follow import EventPrinter, WatchUpdate, event_lines
from rolloutd.cli.output import print_message, sanitize
from rolloutd.cli.progress_bars import REDRAWS_PER_S, render_rollouts


class LogUi:
    """Lines on stdout; reports on stderr each question that it answers with yes."""

    def __init__(self) -> None:
        self._printer = EventPrinter()

    def show_update(self, update: WatchUpdate) -> None:
        self._printer.print_update(update)

    def print_message(self, text: str) -> None:
        print(sanitize(text), flush=True)  # noqa: T201

    def confirm(self, question: str) -> bool:
        print_message(f"{question} The demo answers yes.")
        return True

    def close(self) -> None:
        """Nothing is open."""


class TerminalUi:
    """Bars and questions on a terminal."""

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
