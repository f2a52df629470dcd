"""A real terminal for the console: tmux, keys in, screen out."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tui.operations.dialog import LOADING

ROOT = Path(__file__).parents[2]

TIMEOUT_S = 120.0
"""How long anything may take to appear; seconds are usual, a loaded machine is slow."""

POLL_INTERVAL_S = 0.05


class Terminal:
    """One window of a tmux server of our own."""

    def __init__(self, socket: Path) -> None:
        self._tmux = ["tmux", "-S", str(socket), "-f", "/dev/null"]

    def start(self, command: Sequence[str], size: tuple[int, int]) -> None:
        """Run a command in a window of that size."""
        environment = {
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
            "PYTHONPATH": str(ROOT),
            "LANG": "C.UTF-8",
            # Some shells export a size; the console asks the terminal.
            "COLUMNS": "70",
            "LINES": "20",
        }
        words = ["env", *(f"{name}={value}" for name, value in environment.items()), *command]
        size_words = ["-x", str(size[0]), "-y", str(size[1])]
        self._run("new-session", "-d", *size_words, shlex.join(words), ";", "set", "remain-on-exit", "on")

    def press(self, *keys: str) -> None:
        """Press keys, by tmux's names for them."""
        self._run("send-keys", *keys)

    def type(self, text: str) -> None:
        """Type a text."""
        self._run("send-keys", "-l", text)

    def screen(self, *, colours: bool = False) -> str:
        """Return what is on the screen."""
        return self._run("capture-pane", "-p", *(["-e"] if colours else []))

    def wait_for_text(self, *texts: str, without: str | None = None) -> str:
        """Wait until all texts are on the screen, and a dialog is loaded; return the screen."""
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until:
            shown = self.screen()
            is_complete = LOADING not in shown and (without is None or without not in shown)
            if is_complete and all(text in shown for text in texts):
                return shown
            time.sleep(POLL_INTERVAL_S)
        raise AssertionError(f"{texts} never appeared:\n{self.screen()}")

    def has_ended(self) -> bool:
        """Say whether the command has ended."""
        return self._run("display", "-p", "#{pane_dead}").strip() == "1"

    def close(self) -> None:
        """End the server and what runs in it."""
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, check=False)

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            [*self._tmux, *words], capture_output=True, text=True, check=True, env=os.environ
        )
        return done.stdout


def wait_for_any_text(windows: Sequence[Terminal], *texts: str, without: str | None = None) -> list[str]:
    """Wait until each window has shown one of the texts; return which one each has shown.

    They are looked at in turn, so what passes by in one is not missed while another is waited for.
    """
    shown: list[str] = ["" for _ in windows]
    until = time.monotonic() + TIMEOUT_S
    while not all(shown):
        for number, window in enumerate(windows):
            screen = window.screen()
            if not shown[number] and (without is None or without not in screen):
                shown[number] = next((text for text in texts if text in screen), "")
        if time.monotonic() > until:
            raise AssertionError(f"{texts}: {shown}:\n" + "\n".join(each.screen() for each in windows))
        time.sleep(POLL_INTERVAL_S)
    return shown


@contextmanager
def terminal(directory: Path) -> Iterator[Terminal]:
    """Yield a terminal whose end ends everything in it."""
    window = Terminal(directory / "t")
    try:
        yield window
    finally:
        window.close()


def rolloutctl_command(*words: str) -> list[str]:
    """Return the command line of rolloutctl as it is here."""
    return [sys.executable, "-P", "-m", "rolloutd.cli", *words]
