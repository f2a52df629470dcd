"""The console and the command line, for a whole faulted rollout: every figure agrees within a second.

The machine may be busy, so a difference counts only if it lasts over redraws of the
console and answers of the command line, with the age that the console may reach.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from rolloutd.demo.environment import DemoEnvironment
from tests.support.waiting import wait_until
from tests.tui import figures
from tests.tui.figures import Figures
from tests.tui.terminal import ROOT, TIMEOUT_S, Terminal, rolloutctl_command, terminal
from tests.tui.walkthrough import FAILING_NODE, demo_at_start_gate, run_walkthrough
from tui.state.fetch_queue import COST_FACTOR

pytestmark = [
    pytest.mark.servers,
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux"),
]

LIMIT_S = 1.0
"""The longest difference."""

MIN_REFRESHES = 3
"""Redraws of the console, and answers of the command line, over which a difference lasts before it counts."""

CAPTURE_INTERVAL_S = 0.2

USUAL_GAP_S = 0.3
"""Between two answers of the command line; what is longer is the machine's, and no difference."""

NEIGHBOURHOOD_S = 3.0

_PHASES = (None, "isolating", "maintaining", "verifying")


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures that were read between two instants; a screen was drawn earlier, and shows an age."""

    began: float
    ended: float
    figures: Figures
    drawn: float = 0.0
    age: float = 0.0


def test_console_and_command_line_agree_within_a_second(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.mktemp("f")
    for name in ("a", "b"):
        (base / name).mkdir()
    with (
        demo_at_start_gate(base / "d") as (demo, rollout),
        terminal(base / "a") as driven,
        terminal(base / "b") as watched,
    ):
        command = rolloutctl_command("--socket", str(demo.socket), "tui", "--theme", "dark")
        driven.start(command, (80, 24))
        watched.start(command, (200, 50))
        watched.wait_for_text(rollout, "1 for you")
        watched.press("Enter", "t")
        watched.wait_for_text("POOLS 6")
        with _statuses(demo, rollout) as statuses, _captures(driven, watched) as screens:

            def compare_failure(name: str) -> None:
                # The walkthrough settles the failure: both surfaces must have been read before.
                if name == "5-failed":
                    wait_until(lambda: any(each.figures.get("failed") == 1.0 for each in screens))
                    wait_until(lambda: statuses[-1].figures["failed"] == 1.0)

            run_walkthrough(driven, demo, rollout, compare_failure)
            watched.wait_for_text("done:", "100 %  12 of 12 changed", "0 pending")
            time.sleep(LIMIT_S)  # the last second is compared too
    _assert_all_was_seen(screens)
    assert _differences(screens, statuses) == []


@pytest.mark.parametrize(
    ("redraw_s", "answer_s", "is_found"),
    [(0.2, 0.02, True), (3.0, 0.02, False), (0.2, 3.0, False)],
    ids=["stale figure", "console without CPU time", "daemon without CPU time"],
)
def test_stale_figure_is_found_unless_the_machine_is_busy(
    redraw_s: float, answer_s: float, is_found: bool
) -> None:
    screens, statuses = [], []
    for number in range(60):
        at = number / 10
        screens.append(Sample(at, at, {"done": 3.0}, drawn=at // redraw_s * redraw_s, age=0.5))
    answers = int(6 / (answer_s + 0.1))
    for number in range(answers):
        at = number * (answer_s + 0.1)
        statuses.append(Sample(at, at + answer_s, {"done": 3.0 if at < 1 else 4.0}))
    assert bool(_differences(screens, statuses)) is is_found


def _assert_all_was_seen(screens: Sequence[Sample]) -> None:
    seen = Counter(f"{name} {value}" for screen in screens for name, value in screen.figures.items())
    for state in ("awaiting-approval", "running", "paused", "done"):
        assert seen[f"state {state}"], state
    for name in (
        f"phase of {FAILING_NODE} maintaining",
        "votes 1.0",
        "failed 1.0",
        "done 12.0",
        "percent 100.0",
    ):
        assert seen[name], name
    assert {name for screen in screens for name in screen.figures} >= {"work", "used of rack/r1", "pending"}


@dataclass(slots=True)
class Difference:
    """A figure on the screen that the command line does not say."""

    first: Sample
    redraws: set[float]

    def lasts(self, screen: Sample, statuses: Sequence[Sample]) -> bool:
        """Return whether neither surface has corrected it by itself."""
        answers = sum(self.first.ended <= each.began and each.ended <= screen.began for each in statuses)
        is_long = screen.drawn - self.first.began > LIMIT_S
        return is_long and min(len(self.redraws), answers) > MIN_REFRESHES


def _differences(screens: Sequence[Sample], statuses: Sequence[Sample]) -> list[str]:
    """Return each figure that the console kept showing and the command line did not say."""
    found = []
    wrong: dict[tuple[str, str], tuple[object, Difference]] = {}
    for screen in screens:
        page, recent = screen.figures.get("page", ""), _statuses_near(screen, statuses)
        names = screen.figures.keys() - {"page"}
        if page:
            names |= set.intersection(
                *({name for name in each if name.startswith("phase")} for each in recent)
            )
        for name in sorted(names):
            shown, said = screen.figures.get(name), [each.get(name) for each in recent]
            before = wrong.pop((page, name), None)
            if _agrees(name, shown, said):
                continue
            is_same = before is not None and before[0] == shown
            difference = before[1] if before is not None and is_same else Difference(screen, set())
            difference.redraws.add(screen.drawn)
            wrong[page, name] = shown, difference
            if difference.lasts(screen, statuses):
                found.append(f"{screen.began - statuses[0].began:.1f} s: {name}: {shown}, not {said}")
    return found


def _statuses_near(screen: Sample, statuses: Sequence[Sample]) -> list[Figures]:
    """Return what the command line said when a screen could have been true."""
    slack = _slack(statuses, screen)
    since = screen.drawn - min(screen.age, _allowed_age(statuses, screen)) - LIMIT_S - slack
    until = screen.ended + LIMIT_S + slack
    return [each.figures for each in statuses if each.ended >= since and each.began <= until]


def _allowed_age(statuses: Sequence[Sample], screen: Sample) -> float:
    """Return how old the console's state may be: it pauses longer after slow responses."""
    took = [each.ended - each.began for each in statuses if abs(each.ended - screen.began) < NEIGHBOURHOOD_S]
    return COST_FACTOR * max(took, default=0.0)


def _agrees(name: str, shown: object, said: Sequence[object]) -> bool:
    """Return whether the command line said it, or may have passed it between two answers."""
    if shown in said:
        return True
    if name.startswith("phase of"):
        return any(
            _PHASES.index(before) < _PHASES.index(shown) < (_PHASES.index(after) or len(_PHASES))
            for before, after in pairwise(said)
        )
    numbers = [each for each in said if isinstance(each, float)]
    if not isinstance(shown, float) or not numbers:
        return False
    # A run's percentage begins again with each step, and is absent without a run.
    of_run = [each if isinstance(each, float) else 0.0 for each in said]
    has_restarted = name.startswith("percent of") and any(
        after < before for before, after in pairwise(of_run)
    )
    return min(numbers) <= shown <= (100.0 if has_restarted else max(numbers))


def _slack(statuses: Sequence[Sample], screen: Sample) -> float:
    """Return how much longer than usual the machine let the command line wait around a screen."""
    near = [each for each in statuses if abs(each.ended - screen.began) < NEIGHBOURHOOD_S]
    gaps = [after.ended - before.ended for before, after in pairwise(near)]
    return max(0.0, screen.ended - screen.began, *(gap - USUAL_GAP_S for gap in gaps))


@contextmanager
def _statuses(demo: DemoEnvironment, rollout: str) -> Iterator[list[Sample]]:
    """Collect what `rolloutctl status -o json` says meanwhile."""
    words = [sys.executable, "-P", "-m", "tests.tui.figures", str(demo.socket), rollout]
    samples: list[Sample] = []
    has_begun = threading.Event()

    def read(lines: Iterator[str]) -> None:
        for line in lines:
            each = json.loads(line)
            samples.append(Sample(each["began"], each["ended"], figures.status_figures(each["status"])))
            has_begun.set()

    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=_environment()
    ) as sampler:
        assert sampler.stdin is not None
        assert sampler.stdout is not None
        reader = threading.Thread(target=read, args=(iter(sampler.stdout),))
        reader.start()
        try:
            assert has_begun.wait(TIMEOUT_S), "the command line said nothing"
            yield samples
        finally:
            sampler.stdin.close()
            reader.join()


@contextmanager
def _captures(driven: Terminal, watched: Terminal) -> Iterator[list[Sample]]:
    """Collect what both consoles show meanwhile."""
    samples: list[Sample] = []
    drawn: dict[Terminal, tuple[str, float]] = {}
    stopped = threading.Event()

    def capture(window: Terminal, parse: Callable[[str], Figures]) -> None:
        began = time.monotonic()
        screen = window.screen()
        if window not in drawn or drawn[window][0] != screen:
            drawn[window] = (screen, began)
        age = figures.shown_age(screen)
        samples.append(Sample(began, time.monotonic(), parse(screen), drawn[window][1], age))

    def run() -> None:
        while not stopped.wait(CAPTURE_INTERVAL_S):
            capture(driven, figures.fleet_page_figures)
            capture(watched, figures.rollout_page_figures)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield samples
    finally:
        stopped.set()
        thread.join()


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT), "PATH": str(Path(sys.executable).parent)}
