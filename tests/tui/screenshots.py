"""The pictures of docs/console.md: scenes on a replayed fleet with a fixed clock.

    python -m tests.tui.screenshots      draws all pictures into docs/console/

A test compares the files with the scenes.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from tests.support.replayed_fleet import ReplayedFleet
from tests.tui.harness import (
    NOON,
    paused_fleet,
    run_console,
    running_fleet,
    start_gate_fleet,
    wait_for_text,
    wait_until,
)
from tui.app import Console

SCREENSHOT_DIR = Path(__file__).parents[2] / "docs" / "console"

SceneSteps = Callable[[Console, Pilot[None], ReplayedFleet], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Scene:
    """A fleet, the keys pressed before the picture, and the size and theme of the terminal."""

    name: str
    fleet: Callable[[], ReplayedFleet]
    steps: SceneSteps
    size: tuple[int, int] = (100, 28)
    theme: str = "dark"
    ascii_only: bool = False
    no_color: bool = False


async def _fleet(app: Console, pilot: Pilot[None], fleet: ReplayedFleet) -> None:
    await wait_for_text(pilot, fleet.id, "vote")


async def _rollout(app: Console, pilot: Pilot[None], fleet: ReplayedFleet) -> None:
    await pilot.press("enter")
    await wait_for_text(pilot, "IN FLIGHT", "WAITING", "soak 1h")


async def _large(app: Console, pilot: Pilot[None], fleet: ReplayedFleet) -> None:
    await pilot.press("enter")
    await wait_for_text(pilot, "POOLS 500", "soak 1h", "WAITING")
    await wait_until(pilot, lambda: app.model.history(fleet.id).loaded_from <= NOON)


async def _timeline(app: Console, pilot: Pilot[None], fleet: ReplayedFleet) -> None:
    await pilot.press("enter")
    await wait_for_text(pilot, "FAILED 1", "15s a column", "soak 1h", "WAITING")
    await wait_until(pilot, lambda: app.model.history(fleet.id).is_complete)


async def _moment(app: Console, pilot: Pilot[None], fleet: ReplayedFleet) -> None:
    await _timeline(app, pilot, fleet)
    await pilot.press("at", *"18:48:45", "enter")
    await wait_for_text(pilot, "AT 2026-11-20 18:48:45", "IN FLIGHT 2")


async def _gate(app: Console, pilot: Pilot[None], fleet: ReplayedFleet) -> None:
    await pilot.press("2")
    await wait_for_text(pilot, "DIGEST", "FAILURES 1: an approval covers these")


async def _approve(app: Console, pilot: Pilot[None], fleet: ReplayedFleet) -> None:
    await _gate(app, pilot, fleet)
    await pilot.press("a")
    await wait_for_text(pilot, "Approve proceed?")
    await pilot.press(*"seen", "space", *"it")
    app.screen.query_one("Input").cursor_blink = False  # type: ignore[attr-defined]
    await pilot.pause()


async def _node(app: Console, pilot: Pilot[None], fleet: ReplayedFleet) -> None:
    fleet.logs["sea001-01"] = LOG
    app.open_page("node", fleet.id, "sea001-01")
    await wait_for_text(pilot, "ATTEMPT 1", "Restart nginx", "ended")


LOG = [
    {"offset": number, "at": f"2026-11-20T18:45:{number * 3:02}.000Z", "kind": kind, "text": text}
    for number, (kind, text) in enumerate(
        [
            ("begun", "run run.configure"),
            ("task", "Gather facts"),
            ("ok", "facts of sea001-01"),
            ("task", "Set the values that differ"),
            ("changed", "net.core.somaxconn: 4096 → 65535"),
            ("task", "Write the values for every boot"),
            ("changed", "/etc/sysctl.d/90-somaxconn.conf"),
            ("task", "Restart nginx"),
            ("failed", "nginx did not come back: exit status 1"),
        ],
        start=1,
    )
]


def large_fleet() -> ReplayedFleet:
    """Return ten thousand nodes in five hundred pools, about half of them done."""
    fleet = ReplayedFleet(pools=500, per_pool=20, at=NOON)
    fleet.open_gates |= {("start", ""), ("continue", "canary")}
    fleet.state, fleet.reason = "running", None
    for index, (name, node) in enumerate(fleet.nodes.items()):
        number = index % 20
        reach = 4 + (index // 20 * 7) % 14
        if number < reach or node["wave"] == "canary":
            fleet.move(name, "isolating")
            fleet.move(name, "done", outcome="already-current" if index % 97 == 0 else "changed")
        elif number == reach and index // 20 % 3 != 2:
            phase = ("isolating", "maintaining", "verifying")[index // 20 % 2]
            fleet.move(name, phase)
            fleet.in_progress[name].update(percent=float(index % 90), task="Install the driver")
        if index in (4_711, 8_080):
            fleet.move(name, "failed", failure="the driver did not load: exit status 1")
        fleet.at += 0.02
    return fleet


SCENES = (
    Scene("fleet", paused_fleet, _fleet),
    Scene("rollout", running_fleet, _rollout),
    Scene("rollout-80x24", running_fleet, _rollout, (80, 24)),
    Scene("rollout-light", running_fleet, _rollout, theme="light"),
    Scene("rollout-no-colour-80x24", running_fleet, _rollout, (80, 24), no_color=True),
    Scene("rollout-ascii-80x24", running_fleet, _rollout, (80, 24), ascii_only=True),
    Scene("timeline-200x50", paused_fleet, _timeline, (200, 50)),
    Scene("timeline-no-colour-200x50", paused_fleet, _timeline, (200, 50), no_color=True),
    Scene("timeline-ascii-200x50", paused_fleet, _timeline, (200, 50), ascii_only=True),
    Scene("moment-200x50", paused_fleet, _moment, (200, 50)),
    Scene("large-200x50", large_fleet, _large, (200, 50)),
    Scene("gate", paused_fleet, _gate),
    Scene("approve", paused_fleet, _approve),
    Scene("node", paused_fleet, _node),
    Scene("start", start_gate_fleet, _fleet, (80, 24)),
)


async def render_scene(scene: Scene, directory: Path) -> str:
    """Return a scene as SVG."""
    fleet = scene.fleet()
    chosen: dict[str, Any] = {"size": scene.size, "theme_name": scene.theme, "ascii_only": scene.ascii_only}
    with no_color() if scene.no_color else nullcontext():
        async with run_console(fleet, directory, still=True, **chosen) as (app, pilot, _):
            await scene.steps(app, pilot, fleet)
            await pilot.pause()
            return normalize_ids(app.export_screenshot(title="rolloutctl tui"))


@contextmanager
def no_color() -> Iterator[None]:
    """Set NO_COLOR, which the console reads when it starts."""
    os.environ["NO_COLOR"] = "1"
    try:
        yield
    finally:
        del os.environ["NO_COLOR"]


def normalize_ids(svg: str) -> str:
    """Return a picture without the ids that differ from run to run."""
    return re.sub(r"terminal-\d+", "terminal", svg)


async def _render_all(names: list[str], into: Path) -> None:
    into.mkdir(exist_ok=True, parents=True)
    for scene in SCENES:
        if not names or scene.name in names:
            with tempfile.TemporaryDirectory() as directory:
                (into / f"{scene.name}.svg").write_text(await render_scene(scene, Path(directory)))
            print(into / f"{scene.name}.svg")


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"
    time.tzset()
    asyncio.run(_render_all(sys.argv[1:], SCREENSHOT_DIR))
