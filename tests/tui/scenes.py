"""The pictures of docs/console.md: each a scene on a replayed fleet, with a clock that stands.

    python -m tests.tui.scenes      draws them all anew into docs/console/

The same scenes are compared with the files by a test, so a picture in the
documents is what the console shows.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from textual.pilot import Pilot

from tests.support.replayed import Fleet
from tests.tui.house import NOON, broken, console, running, shows, small, until
from tui.app import Console

PICTURES = Path(__file__).parents[2] / "docs" / "console"

Act = Callable[[Console, Pilot[None], Fleet], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Scene:
    """What is looked at, how, and what is pressed before the picture is taken."""

    name: str
    world: Callable[[], Fleet]
    act: Act
    size: tuple[int, int] = (100, 28)
    theme: str = "dark"


async def _fleet(app: Console, pilot: Pilot[None], world: Fleet) -> None:
    await shows(pilot, world.id, "vote")


async def _rollout(app: Console, pilot: Pilot[None], world: Fleet) -> None:
    await pilot.press("enter")
    await shows(pilot, "IN FLIGHT", "WAITING", "soak 1h")


async def _large(app: Console, pilot: Pilot[None], world: Fleet) -> None:
    await pilot.press("enter")
    await shows(pilot, "POOLS 500", "soak 1h", "WAITING")


async def _gate(app: Console, pilot: Pilot[None], world: Fleet) -> None:
    await pilot.press("2")
    await shows(pilot, "DIGEST", "WHAT HAS FAILED")
    await until(pilot, lambda: bool(getattr(app.screen, "shown", None)))


async def _approve(app: Console, pilot: Pilot[None], world: Fleet) -> None:
    await _gate(app, pilot, world)
    await pilot.press("a")
    await shows(pilot, "Approve proceed?")
    await pilot.press(*"seen", "space", *"it")
    app.screen.query_one("Input").cursor_blink = False  # type: ignore[attr-defined]
    await pilot.pause()


async def _node(app: Console, pilot: Pilot[None], world: Fleet) -> None:
    world.logs["sea001-01"] = LOG
    app.open_node(world.id, "sea001-01")
    await shows(pilot, "ATTEMPT 1", "Restart nginx", "ended")


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


def large() -> Fleet:
    """Return ten thousand nodes in five hundred pools, some way through."""
    world = Fleet(pools=500, per_pool=20, at=NOON)
    world.opened |= {("start", ""), ("continue", "canary")}
    world.state, world.reason = "running", None
    for place, (name, node) in enumerate(world.nodes.items()):
        number = place % 20
        reach = 4 + (place // 20 * 7) % 14
        if number < reach or node["wave"] == "canary":
            world.move(name, "isolating")
            world.move(name, "done", outcome="already-current" if place % 97 == 0 else "changed")
        elif number == reach and place // 20 % 3 != 2:
            phase = ("isolating", "maintaining", "verifying")[place // 20 % 2]
            world.move(name, phase)
            world.live[name].update(percent=float(place % 90), task="Install the driver")
        if place in (4_711, 8_080):
            world.move(name, "failed", failure="the driver did not load: exit status 1")
        world.at += 0.02
    return world


SCENES = (
    Scene("fleet", broken, _fleet),
    Scene("rollout", running, _rollout),
    Scene("rollout-80x24", running, _rollout, (80, 24)),
    Scene("rollout-light", running, _rollout, theme="light"),
    Scene("large-200x50", large, _large, (200, 50)),
    Scene("gate", broken, _gate),
    Scene("approve", broken, _approve),
    Scene("node", broken, _node),
    Scene("start", small, _fleet, (80, 24)),
)


async def draw(scene: Scene, directory: Path) -> str:
    """Return a scene as SVG."""
    world = scene.world()
    async with console(world, directory, size=scene.size, theme_name=scene.theme, still=True) as (
        app,
        pilot,
        _,
    ):
        await scene.act(app, pilot, world)
        await pilot.pause()
        return without_chance(app.export_screenshot(title="rolloutctl tui"))


def without_chance(svg: str) -> str:
    """Return a picture without what differs from run to run: the ids that tell pictures apart on one page."""
    return re.sub(r"terminal-\d+", "terminal", svg)


async def _draw_all(names: list[str], into: Path) -> None:
    into.mkdir(exist_ok=True, parents=True)
    for scene in SCENES:
        if not names or scene.name in names:
            with tempfile.TemporaryDirectory() as directory:
                (into / f"{scene.name}.svg").write_text(await draw(scene, Path(directory)))
            print(into / f"{scene.name}.svg")


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"
    time.tzset()
    asyncio.run(_draw_all(sys.argv[1:], PICTURES))
