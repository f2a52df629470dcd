"""The matrix of changes and nodes in the console."""

from __future__ import annotations

from pathlib import Path

from tests.tui.harness import run_console, running_fleet, wait_for_text


async def test_changes_show_groups_and_nodes_without_change(socket_dir: Path) -> None:
    async with run_console(running_fleet(), socket_dir) as (_, pilot, _server):
        await pilot.press("m")
        text = await wait_for_text(pilot, "limits 0123456789ab 33 %")
        assert "1 done  1 drifted  1 never" in text
        assert "team/a" in text
        assert "1 node: n2" in text
        assert "1 node: n3" in text
