"""Pages of a fleet with names as data centres have them: long, and alike at their beginnings."""

from __future__ import annotations

from pathlib import Path

import pytest

from rolloutd.control import response_text
from tests.support.replayed_fleet import ReplayedFleet, forecast_of
from tests.tui.harness import NOON, list_text, paused_fleet, run_console, screen_text, wait_for_text
from tui.formatting.lines import cell_len, column, fit_name, shorten

PREFIX, DOMAIN = "compute-rack-042-unit-17-", ".prod.frankfurt.example.net"
TEAM = "payments-and-settlement-platform"
MESSAGE = "nginx did not come back: exit status 1"


def long_fleet() -> ReplayedFleet:
    """Return a paused rollout whose ids and names of nodes and teams are long."""
    fleet = ReplayedFleet(pools=2, per_pool=6, at=NOON, name="raise-somaxconn-on-all-workers-of-frankfurt")
    nodes = list(fleet.nodes.values())
    fleet.nodes.clear()
    for number, node in enumerate(nodes, start=1):
        name = f"{PREFIX}n{number}{DOMAIN}"
        fleet.nodes[name] = {**node, "node": name, "team": TEAM}
    fleet.open_gates |= {("start", ""), ("continue", "canary")}
    failed = f"{PREFIX}n1{DOMAIN}"
    for phase in ("isolating", "maintaining"):
        fleet.at += 10
        fleet.move(failed, phase)
    fleet.move(failed, "failed", failure=f"task failed on {failed}: {MESSAGE}")
    fleet.state = "paused"
    fleet.reason = {
        "code": "node-failed",
        "text": f"{failed} failed in run.configure: {MESSAGE}",
        "since": "2026-11-20T18:49:00.000Z",
        "lifted_by": f"rolloutctl approve {fleet.id} proceed --reason ...",
        "subject": fleet.id,
        "params": {},
        "remedy": None,
    }
    return fleet


@pytest.mark.parametrize(
    ("name", "width", "shown"),
    [
        ("n17", 6, "n17   "),
        ("n17.prod.example.net", 8, "n17…    "),
        (f"{PREFIX}n17{DOMAIN}", 29, f"{PREFIX}n17…"),
        (f"{PREFIX}n17{DOMAIN}", 16, "compute-…-17-n17"),
        ("ansible:/etc/ansible/hosts.yml", 16, "ansible:…sts.yml"),
        ("büro-節節節節節節節節", 10, "bür…節節節"),
        ("abc", 2, "a…"),
    ],
)
def test_long_name_keeps_its_ends(name: str, width: int, shown: str) -> None:
    fitted = fit_name(name, width)
    assert cell_len(fitted) == width
    assert fitted.rstrip() == shown.rstrip()


def test_text_that_fits_keeps_its_names() -> None:
    text = f"{PREFIX}n1{DOMAIN}: failed"
    assert shorten(text, 100) == text
    assert shorten(text, 60) == "compute-rack…-unit-17-n1: failed"


def test_column_is_not_cut_in_a_full_line() -> None:
    assert column(f"{PREFIX}n1{DOMAIN}", 12, 4_000) == f"{PREFIX}n1{DOMAIN} "


@pytest.mark.parametrize("size", [(80, 24), (132, 40)])
async def test_names_of_nodes_differ_on_the_screen(socket_dir: Path, size: tuple[int, int]) -> None:
    fleet = long_fleet()
    async with run_console(fleet, socket_dir, size=size) as (app, pilot, _):
        await pilot.press("enter", "n")
        text = await wait_for_text(pilot, "12 nodes", "failed")
        for number in range(1, 13):
            assert f"-n{number}" in text
        assert "payments-a…canary" not in text, "columns have a blank between them"
        await pilot.press("w")
        await wait_for_text(pilot, "▸ full line")
        assert f"{PREFIX}n1{DOMAIN}" in list_text(app, "#body")
        await pilot.press("4")
        text = await wait_for_text(pilot, "entries, the latest first")
        assert "maintaining" in text, "a long name hides what happened"


@pytest.mark.parametrize("size", [(80, 24), (132, 40)])
async def test_node_page_says_all_of_its_state_once(socket_dir: Path, size: tuple[int, int]) -> None:
    fleet = long_fleet()
    async with run_console(fleet, socket_dir, size=size) as (app, pilot, _):
        await wait_for_text(pilot, "1 vote missing")
        app.open_page("node", fleet.id, f"{PREFIX}n1{DOMAIN}")
        text = await wait_for_text(pilot, "ATTEMPT 1", "out of service")
        assert " ".join(text.split()).count(MESSAGE) == 1
        app.pop_screen()
        app.open_page("node", fleet.id, f"{PREFIX}n2{DOMAIN}")
        text = await wait_for_text(pilot, "ended by rolloutctl approve")
        assert "proceed --reason ..." in " ".join(text.split())


async def test_wrapped_yaml_keeps_its_form(socket_dir: Path) -> None:
    fleet = long_fleet()
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await pilot.press("enter", "n")
        await wait_for_text(pilot, "12 nodes")
        await pilot.press("y")
        await wait_for_text(pilot, "node: compute")
        lines = list_text(app, "#body").splitlines()
        start = next(number for number, line in enumerate(lines) if "lifted_by" in line)
        assert lines[start + 1].startswith("   "), "what belongs to a key stands under it"
        assert not any(line.rstrip().endswith("-") for line in lines), "a name is broken at no hyphen"


async def test_page_of_a_text_keeps_its_tab(socket_dir: Path) -> None:
    async with run_console(paused_fleet(), socket_dir, size=(80, 24)) as (_, pilot, _server):
        await pilot.press("4")
        await wait_for_text(pilot, "entries, the latest first")
        await pilot.press("w")
        text = await wait_for_text(pilot, "▸ entry")
        assert "fleet" not in text.splitlines()[0]


async def test_result_of_the_audit_check_is_not_cut(socket_dir: Path) -> None:
    async with run_console(paused_fleet(), socket_dir, size=(60, 24)) as (_, pilot, _server):
        await pilot.press("4")
        await wait_for_text(pilot, "entries, the latest first")
        await pilot.press("v")
        text = await wait_for_text(pilot, "✓ intact")
        assert "each one hashed over the one before" in " ".join(text.split())


async def test_forecast_shows_no_date_of_today(socket_dir: Path) -> None:
    fleet = long_fleet()
    fleet.forecast = forecast_of(fleet.id)
    fleet.forecast["bottleneck"]["saves_s"] = 0.4
    async with run_console(fleet, socket_dir, size=(80, 40)) as (_, pilot, _server):
        await pilot.press("2")
        await wait_for_text(pilot, "DIGEST")
        await pilot.press("i")
        text = await wait_for_text(pilot, "closed-01", "bottleneck")
        assert "it ends no earlier" in text
        assert "never, as things are" in text
        assert "…" not in text.split("WAVES")[1], "an instant is not cut"


async def test_failure_of_a_stage_is_readable_at_80_columns(socket_dir: Path) -> None:
    fleet = long_fleet()
    row = {"content": "", "bytes": 0, "attempt": 3, "seconds": 65.0, "forced": False}
    text = "the disk is full: 12 MiB are free, 5 GiB are needed"
    fleet.preparations = [
        {**row, "node": f"{PREFIX}n2{DOMAIN}", "stage": "kernel-image", "state": "failed", "text": text}
    ]
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await wait_for_text(pilot, "1 vote missing")
        app.open_page("preparation", fleet.id)
        await wait_for_text(pilot, "kernel-image", "attempt 3", text)


async def test_comparison_without_canaries_says_why(socket_dir: Path) -> None:
    fleet = long_fleet()
    empty = {"canaries": [], "low_s": None, "high_s": None, "nodes": []}
    fleet.comparison = {**fleet.comparison, **empty}
    async with run_console(fleet, socket_dir) as (app, pilot, _):
        await wait_for_text(pilot, "1 vote missing")
        app.open_page("comparison", fleet.id)
        await wait_for_text(pilot, response_text.describe_canaries(fleet.comparison)[:60])
        assert "nothing to compare with" in " ".join(screen_text(app).split())
