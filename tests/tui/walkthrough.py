"""The demo from its start gate to done, driven by keys, with a picture of each step.

python -m tests.tui.walkthrough DIR      draws the pictures of 80x24 and 200x50 into DIR
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

from rolloutd.demo import scenario
from rolloutd.demo.environment import DemoEnvironment, demo_environment
from rolloutd.demo.fleet import clear_fault, set_fault
from tests.tui.terminal import ROOT, Terminal, rolloutctl_command, terminal

SIZES = ((80, 24), (200, 50))
FAILING_NODE = "n7"
HOLD_OPTION = "--hold"
SCREEN_THEME = TerminalTheme((22, 24, 29), (213, 217, 226), [(0, 0, 0)] * 8)
"""The background of lines that end early: a captured screen does not have it."""

TakeScreenshot = Callable[[str], None]


@contextmanager
def demo_at_start_gate(directory: Path) -> Iterator[tuple[DemoEnvironment, str]]:
    """Yield a demo, kept by another process, whose plan waits at its start gate."""
    command = [sys.executable, "-m", "tests.tui.walkthrough", HOLD_OPTION, str(directory)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            rollout = holder.stdout.readline().strip()
            assert rollout, "the demo did not start"
            yield DemoEnvironment(directory, directory), rollout
        finally:
            holder.stdin.close()


def keep_demo_running(directory: Path) -> None:
    """Start the demo with a broken node, submit the plan, and keep both until the input ends."""
    directory.mkdir()
    with demo_environment(directory.resolve(), nodes=12, keep=False) as demo:
        # A test kills the daemon on purpose; the demo must survive.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        set_fault(demo.fleet_directory, FAILING_NODE, scenario.FAULTS["maintaining"])
        print(scenario._submit_plan(demo), flush=True)
        sys.stdin.read()


def run_walkthrough(
    window: Terminal, demo: DemoEnvironment, rollout: str, take_screenshot: TakeScreenshot = lambda _: None
) -> None:
    """Approve start, watch the canaries, continue, resolve the failure, and wait until done."""
    window.wait_for_text(rollout, "1 for you", "waits for votes of infra (owner)")
    take_screenshot("1-waits")
    window.press("2")
    window.wait_for_text("votes missing", "CHANGE")
    take_screenshot("2-gate")
    window.press("a")
    window.wait_for_text("Approve start?")
    window.type("read it")
    take_screenshot("3-approve")
    window.press("Enter")
    window.wait_for_text("no gate waits")
    window.press("1")
    window.wait_for_text(rollout, "running")
    window.press("Enter")
    window.wait_for_text("IN FLIGHT 2")
    take_screenshot("4-canaries")
    window.wait_for_text("continue after canary", "yours")
    window.press("a")
    window.wait_for_text("Approve continue after canary?")
    window.type("canaries are fine")
    window.press("Enter")
    window.wait_for_text("FAILED 1", f"✗ {FAILING_NODE}")
    window.wait_for_text("IN FLIGHT 0", "paused")
    take_screenshot("5-failed")
    resolve_failure(window, demo, take_screenshot)
    window.press("1")
    window.wait_for_text("12 nodes changed or already current", "100 %", "12/12")
    take_screenshot("8-done")


def resolve_failure(
    window: Terminal, demo: DemoEnvironment, take_screenshot: TakeScreenshot = lambda _: None
) -> None:
    """Inspect the failed node, repair it, retry it, and approve proceed."""
    window.press("n")
    window.wait_for_text("12 nodes")
    window.press("/")
    window.wait_for_text("show nodes that contain")
    window.type(f"{FAILING_NODE} failed")
    window.press("Enter")
    window.wait_for_text("1 node,")
    window.press("Enter")
    window.wait_for_text("ATTEMPT 1", "LOG", "attempt 1")
    take_screenshot("6-node")
    look_at_node(window)
    clear_fault(demo.fleet_directory, FAILING_NODE)
    window.press("r")
    window.wait_for_text(f"Retry {FAILING_NODE}?")
    window.type("the fault was repaired")
    window.press("Enter")
    window.wait_for_text("is queued again")
    window.press("2")
    window.wait_for_text("proceed", "yours")
    window.wait_for_text("FAILURES", without="loading")
    window.press("a")
    window.wait_for_text("Approve proceed?")
    window.type("repaired")
    take_screenshot("7-proceed")
    window.press("Enter")
    window.wait_for_text("no gate waits")


def look_at_node(window: Terminal) -> None:
    """Open a shell on the failed node, over ssh, and leave it."""
    window.press("s")
    window.wait_for_text(f"Open a shell on {FAILING_NODE}?", "It runs here, as you: ssh")
    window.type("look at it")
    window.press("Enter")
    window.wait_for_text("job control turned off")
    window.type('echo "this is $ROLLOUTD_NODE"; exit 3')
    window.press("Enter")
    window.wait_for_text(f"this is {FAILING_NODE}", "ssh: exit code 3; press Enter to return")
    window.press("Enter")
    window.wait_for_text(f"the shell on {FAILING_NODE} has ended")


def render_svg(text: str, size: tuple[int, int], title: str) -> str:
    """Return a captured screen as SVG."""
    console = Console(record=True, width=size[0], file=io.StringIO(), color_system="truecolor")
    console.print(Text.from_ansi(text, no_wrap=True), end="", soft_wrap=True)
    return console.export_svg(title=title, theme=SCREEN_THEME)


def main(into: Path) -> None:
    """Drive the demo at both sizes and write the pictures."""
    for size in SIZES:
        with (
            tempfile.TemporaryDirectory(prefix="rd-") as base,
            demo_at_start_gate(Path(base) / "d") as (demo, rollout),
            terminal(Path(base)) as window,
        ):
            window.start(rolloutctl_command("--socket", str(demo.socket), "tui", "--theme", "dark"), size)

            def snap(name: str, window: Terminal = window, size: tuple[int, int] = size) -> None:
                time.sleep(0.3)  # the next frame completes what the wait saw
                file = into / f"{size[0]}x{size[1]}-{name}.svg"
                file.write_text(render_svg(window.screen(colours=True), size, "rolloutctl tui"))
                print(file)

            run_walkthrough(window, demo, rollout, snap)


if __name__ == "__main__":
    if sys.argv[1] == HOLD_OPTION:
        keep_demo_running(Path(sys.argv[2]))
    else:
        target = Path(sys.argv[1])
        target.mkdir(parents=True, exist_ok=True)
        main(target)
