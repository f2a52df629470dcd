"""Programs that take the terminal while the console is suspended: a shell on a node, and a pager."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from textual.app import App, SuspendNotSupported


def run_program(app: App[None], command: Sequence[str], text: str | None = None) -> str:
    """Run a program with this terminal and a text as its input; return why it could not run."""
    try:
        with app.suspend(), _keeping_interrupts_from_us():
            code = subprocess.run(command, input=text, text=True, check=False).returncode
            if code and text is None:
                # Else the console would cover what ssh says at once.
                with suppress(EOFError):
                    input(f"{command[0]}: exit code {code}; press Enter to return to the console ")
    except SuspendNotSupported:
        return f"{command[0]}: it needs a terminal of its own; run {shlex.join(command)} there"
    except OSError as error:
        return f"{command[0]}: {error.strerror}; install it here"
    return ""


def has_terminal(app: App[None]) -> bool:
    """Return whether programs can take the terminal: a browser has none."""
    return app._driver is not None and app._driver.can_suspend


def pager_command() -> Sequence[str]:
    """Return the user's pager, else less; nothing if there is none."""
    command = shlex.split(os.environ.get("PAGER", "")) or ["less"]
    return command if shutil.which(command[0]) is not None else ()


@contextmanager
def _keeping_interrupts_from_us() -> Iterator[None]:
    # The terminal sends Ctrl-C to both processes; a handler, unlike SIG_IGN, is not inherited by the program.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
