"""The matrix of nodes and plans in the console, and the changes of one plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rolloutd.cli.samples import change_of
from tests.support.replayed_fleet import ReplayedFleet
from tests.tui.harness import run_console, running_fleet, wait_for_text

CLUSTERS = [f"edge-{number:02}" for number in range(60)]
MODULES = ("cni", "dns", "ingress", "logging", "metrics", "policy", "storage")
STATES = ("done", "failed", "unknown", "drifted", "held", "pending", "in-flight", "skipped", "never")


def cluster_fleet() -> ReplayedFleet:
    """Return a fleet whose daemon knows 60 clusters and 8 modules, each at v1.10.N, and apps on its way."""
    fleet = running_fleet()
    at_pin = dict.fromkeys(CLUSTERS, "done")
    moving = {**at_pin, **{f"edge-{40 + n}": state for n, state in enumerate(STATES)}}
    older = {node: "done" if state != "done" else "replaced" for node, state in moving.items()}
    fleet.changes = {
        "changes": [
            change_of("apps", "f", "v1.11.0", **moving),
            change_of("apps", "e", "v1.10.0", **older),
            *(change_of(name, str(n), f"v1.10.{n}", **at_pin) for n, name in enumerate(MODULES)),
        ],
        "next": None,
    }
    return fleet


@pytest.mark.parametrize("size", [(80, 24), (200, 50)])
async def test_matrix_shows_clusters_and_modules(socket_dir: Path, size: tuple[int, int]) -> None:
    async with run_console(cluster_fleet(), socket_dir, size=size) as (_, pilot, _server):
        await pilot.press("m")
        text = await wait_for_text(pilot, "edge-41")
        lines = text.splitlines()
        assert max(map(len, lines)) <= size[0]
        names = next(line for line in lines if "storage" in line and "cni" in line)
        assert names.split() == ["apps", *MODULES]
        (row,) = (line for line in lines if line.split() and line.split()[0] == "edge-41")
        cells = row.split()
        is_wide = size[0] == 200
        assert len(cells) == (17 if is_wide else 9)
        assert row.index("✗") == names.index("apps"), "the cell is under its heading"
        assert "✗ v1.11.0" in row if is_wide else "✗v1.11" in row
        assert "1 failed  ? 1 unknown  ≠ 1 drifted  ‖ 1 held  · 1 pending" in text
        order = [line.split()[0] for line in lines if line.lstrip().startswith("edge-")]
        assert order[:4] == ["edge-41", "edge-42", "edge-43", "edge-44"], "the most urgent first"


@pytest.mark.parametrize(("width", "more"), [(44, "… 5 more"), (12, "NODES")])
async def test_plans_without_room_are_counted(socket_dir: Path, width: int, more: str) -> None:
    async with run_console(cluster_fleet(), socket_dir) as (_, pilot, _server):
        await pilot.press("m")
        await wait_for_text(pilot, "edge-41")
        await pilot.resize_terminal(width, 24)
        text = await wait_for_text(pilot, more)
        assert max(map(len, text.splitlines())) <= width


async def test_row_under_cursor_says_what_to_do(socket_dir: Path) -> None:
    async with run_console(cluster_fleet(), socket_dir) as (app, pilot, _server):
        await pilot.press("m")
        await wait_for_text(pilot, "edge-41")
        await pilot.press("slash", *"failed", "enter", "end")
        text = await wait_for_text(pilot, "edge-41, apps failed, from v1.10.0: rolloutctl why")
        assert "edge-42" not in text
        await pilot.press("w")
        text = await wait_for_text(pilot, "apps: failed, from v1.10.0")
        assert "failed: rolloutctl why ROLLOUT NODE" in text
        await pilot.press("escape", "enter")
        await wait_for_text(pilot, "apps-f", "edge-41")
        assert app.screen.screen_name == "node"


async def test_plan_shows_groups_and_nodes_without_change(socket_dir: Path) -> None:
    async with run_console(running_fleet(), socket_dir) as (_, pilot, _server):
        await pilot.press("m")
        text = await wait_for_text(pilot, "limits", "33 %")
        assert "1 done  1 drifted  1 never" in text
        await pilot.press("enter")
        text = await wait_for_text(pilot, "pin 3f2a9c1d4b5e")
        assert "change 0123456789ab, limits-abcde" in text
        assert "team/a" in text
        assert "1 node: n2" in text
        assert "1 node: n3" in text
        assert "rolloutctl drift ROLLOUT shows what differs" in text


async def test_work_in_flight_names_its_runner(socket_dir: Path) -> None:
    fleet = running_fleet()
    fleet.in_progress["pay000-01"]["runner"] = "flux"
    async with run_console(fleet, socket_dir, size=(132, 40)) as (_, pilot, _server):
        await wait_for_text(pilot, "kernel-x7k2p")
        await pilot.press("enter")
        await wait_for_text(pilot, "flux: Set")
        await pilot.press("n", *"/pay000-01", "enter")
        await wait_for_text(pilot, "runs by flux")
        await pilot.press("enter")
        await wait_for_text(pilot, "40 % by flux")
