"""Who watches the demo: a person at a terminal, or a log.

A person sees a bar per pool and is asked at each gate; a log gets one line per
thing that happens, and the demo answers itself and says so.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.live import Live
from rich.text import Text

from rolloutd.cli.bars import REDRAWS_PER_S, picture
from rolloutd.cli.lines import Teller, event_lines
from rolloutd.cli.output import printable, say
from rolloutd.cli.views import View


class Log:
    """Lines on stdout; answers yes to everything, and says on stderr that it did."""

    def __init__(self) -> None:
        self._teller = Teller()

    def see(self, view: View) -> None:
        """Print a line per event and per change of state."""
        self._teller.see(view)

    def tell(self, text: str) -> None:
        """Print a sentence."""
        print(printable(text), flush=True)  # noqa: T201

    def agree(self, question: str) -> bool:
        """Say yes, and that nobody was asked."""
        say(f"{question} The demo says yes itself: nobody is asked.")
        return True

    def close(self) -> None:
        """Nothing is open."""


class Person:
    """Bars on a terminal, and questions between them."""

    def __init__(self, *, asks: bool) -> None:
        self._console = Console()
        self._asks = asks
        self._live: Live | None = None

    def see(self, view: View) -> None:
        """Draw how things stand, with what has happened above it."""
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=REDRAWS_PER_S)
            self._live.start()
        for text in event_lines(view):
            self._live.console.print(Text(text, style="dim"))
        self._live.update(picture(view.rollouts), refresh=True)

    def tell(self, text: str) -> None:
        """Print a sentence above the bars."""
        self._console.print(Text(printable(text), style="bold"))

    def agree(self, question: str) -> bool:
        """Ask, and draw no bars meanwhile; a bare Enter is a yes."""
        if not self._asks:
            self.tell(f"{question} The demo says yes itself: nobody is asked.")
            return True
        self.close()
        # input() would write its question to stderr, which may be elsewhere.
        print(f"\n{printable(question)} [Y/n] ", end="", flush=True)  # noqa: T201
        answer = sys.stdin.readline()
        return answer.strip().lower() in ("", "y", "yes") if answer else False

    def close(self) -> None:
        """Leave the last picture standing."""
        if self._live is not None:
            self._live.stop()
            self._live = None
