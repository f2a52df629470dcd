"""`--watch`: run a reading command again after each change, and print what differs from before.

The event stream only notifies.  Time changes reasons too, so it asks again at intervals.
"""

from __future__ import annotations

import io
import queue
import sys
import threading
from contextlib import redirect_stdout, suppress
from typing import NoReturn

from rolloutd.cli.command_group import Handler, Invocation, is_terminal
from rolloutd.cli.output import print_now
from rolloutd.cli.reconnect import Line
from rolloutd.cli.watch_updates import next_batch, queue_events
from rolloutd.control.client import DaemonUnreachable

INTERVAL_S = 10.0
"""Between two questions without an event."""

CLEAR = "\x1b[H\x1b[2J"


class _Screen(io.StringIO):
    """A buffer that looks like the real stdout, so that colours and widths stay."""

    def __init__(self) -> None:
        super().__init__()
        self.is_terminal = is_terminal()

    def isatty(self) -> bool:
        return self.is_terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.__stdout__.encoding if sys.__stdout__ is not None else "utf-8"


def repeat_on_change(handler: Handler, call: Invocation) -> NoReturn:
    """Run the command until interrupted; raises what its first run raises."""
    lines: queue.Queue[Line | Exception] = queue.Queue()
    shown = _capture(handler, call)
    _show(shown)
    threading.Thread(
        target=queue_events, args=(call.client, None, lines, threading.Event()), name="events", daemon=True
    ).start()
    while True:
        with suppress(queue.Empty):
            next_batch(lines, INTERVAL_S)
        # While the daemon is away, the last answer stays; the event thread reconnects or gives up.
        with suppress(DaemonUnreachable):
            text = _capture(handler, call)
            if text != shown:
                shown = text
                _show(shown)


def _capture(handler: Handler, call: Invocation) -> str:
    screen = _Screen()
    with redirect_stdout(screen):
        handler(call)
    return screen.getvalue()


def _show(text: str) -> None:
    print_now(f"{CLEAR}{text}" if is_terminal() else text.rstrip("\n"))
