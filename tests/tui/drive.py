"""The demo from its start gate to done, driven by keys alone, with a picture of each station.

python -m tests.tui.drive DIR      draws the pictures of 80x24 and 200x50 into DIR
"""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from rolloutd.demo import story
from rolloutd.demo.fleet import heal, set_fault
from rolloutd.demo.stage import Stage, staged
from tests.tui.terminal import ROOT, Terminal, rolloutctl, terminal

SIZES = ((80, 24), (200, 50))
BROKEN = "n7"
HOLD = "--hold"
GROUND = TerminalTheme((22, 24, 29), (213, 217, 226), [(0, 0, 0)] * 8)
"""What a captured screen leaves out: the ground of lines that end early."""

Snap = Callable[[str], None]


@contextmanager
def demo(directory: Path) -> Iterator[tuple[Stage, str]]:
    """Yield a stage, kept by a process of its own, on which the demo's plan waits at its start gate."""
    command = [sys.executable, "-m", "tests.tui.drive", HOLD, str(directory)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            rollout = holder.stdout.readline().strip()
            assert rollout, "the stage was not set"
            yield Stage(directory, directory), rollout
        finally:
            holder.stdin.close()


def hold(directory: Path) -> None:
    """Set the stage, submit the plan, and keep both until our input ends; one node is broken."""
    directory.mkdir()
    with staged(directory.resolve(), nodes=12, keep=False) as stage:
        # A daemon that is killed on purpose does not end the stage.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        set_fault(stage.fleet, BROKEN, story.FAULTS["maintaining"])
        print(story._submit(stage), flush=True)
        sys.stdin.read()


def walk(window: Terminal, stage: Stage, rollout: str, snap: Snap = lambda _: None) -> None:
    """Approve the start, look at the canaries, continue, settle the failure, and see it done."""
    window.shows(rollout, "1 for you", "waits for votes of infra (owner)")
    snap("1-waits")
    window.press("2")
    window.shows("VOTES", "DIGEST")
    snap("2-gate")
    window.press("a")
    window.shows("Approve start?")
    window.type("read it")
    snap("3-approve")
    window.press("Enter")
    window.shows("no gate waits")
    window.press("1")
    window.shows(rollout, "running")
    window.press("Enter")
    window.shows("IN FLIGHT 2")
    snap("4-canaries")
    window.shows("continue after canary", "yours")
    window.press("a")
    window.shows("Approve continue after canary?")
    window.type("canaries are fine")
    window.press("Enter")
    window.shows("FAILED 1", f"✗ {BROKEN}")
    window.shows("IN FLIGHT 0", "paused")
    snap("5-failed")
    settle(window, stage, snap)
    window.press("1")
    window.shows("done: 12 nodes changed or already current", "100 %", "12/12")
    snap("8-done")


def settle(window: Terminal, stage: Stage, snap: Snap = lambda _: None) -> None:
    """Look at the failed node, repair it, have it tried again and let the others go on."""
    window.press("n")
    window.shows("12 nodes")
    window.press("/")
    window.shows("show nodes that contain")
    window.type(f"{BROKEN} failed")
    window.press("Enter")
    window.shows("1 node,")
    window.press("Enter")
    window.shows("ATTEMPT 1", "LOG", "attempt 1")
    snap("6-node")
    heal(stage.fleet, BROKEN)
    window.press("r")
    window.shows(f"Retry {BROKEN}?")
    window.type("the fault was repaired")
    window.press("Enter")
    window.shows("will be tried again")
    window.press("2")
    window.shows("proceed", "yours")
    window.shows("WHAT HAS FAILED", without="reading them")
    window.press("a")
    window.shows("Approve proceed?")
    window.type("repaired")
    snap("7-proceed")
    window.press("Enter")
    window.shows("no gate waits")


def picture(text: str, size: tuple[int, int], title: str) -> str:
    """Return a captured screen as SVG."""
    console = Console(record=True, width=size[0], file=io.StringIO(), color_system="truecolor")
    console.print(Text.from_ansi(text, no_wrap=True), end="", soft_wrap=True)
    return console.export_svg(title=title, theme=GROUND)


def main(into: Path) -> None:
    """Drive the demo at both sizes and keep the pictures."""
    for size in SIZES:
        with (
            tempfile.TemporaryDirectory(prefix="rd-") as base,
            demo(Path(base) / "d") as (stage, rollout),
            terminal(Path(base)) as window,
        ):
            window.start(rolloutctl("--socket", str(stage.socket), "tui", "--theme", "dark"), size)

            def snap(name: str, window: Terminal = window, size: tuple[int, int] = size) -> None:
                time.sleep(0.3)  # what was shown first is complete a frame later
                place = into / f"{size[0]}x{size[1]}-{name}.svg"
                place.write_text(picture(window.screen(colours=True), size, "rolloutctl tui"))
                print(place)

            walk(window, stage, rollout, snap)


if __name__ == "__main__":
    if sys.argv[1] == HOLD:
        hold(Path(sys.argv[2]))
    else:
        target = Path(sys.argv[1])
        target.mkdir(parents=True, exist_ok=True)
        main(target)
