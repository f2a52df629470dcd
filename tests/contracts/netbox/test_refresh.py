"""The daemon's refresh while NetBox fails in each way: the fleet stays, the reason is shown, it recovers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from aiohttp import web

from rolloutd.engine.background.inventory_refresh import InventoryRefresher
from tests.contracts.netbox.backends import SHORT, Answer, answer_always, fake_of, open_fake
from tests.rolloutd.control_environment import control_environment
from tests.support.fake_netbox import Fleet
from tests.support.fake_netbox.server import V2

DEVICES = "/api/dcim/devices/"


async def hang(_: web.Request) -> web.StreamResponse | None:
    await asyncio.Event().wait()
    return None


FAULTS: dict[str, Answer] = {
    "no answer in 2 tries of 0.5 s; check the server, and the scheme of `url`": hang,
    "it answers without JSON, as a login page does; check `url` and any proxy": answer_always(
        DEVICES, lambda: web.Response(text="<html>", content_type="text/html")
    ),
    f"0 of 60 objects came from {DEVICES}; the next refresh reads them again": answer_always(
        DEVICES, lambda: web.json_response({"count": 60, "next": None, "results": []})
    ),
    "no object matches; check `filter` and the token's rights": answer_always(
        DEVICES, lambda: web.json_response({"count": 0, "next": None, "results": []})
    ),
    "HTTP status 502; check the server": answer_always(DEVICES, lambda: web.Response(status=502)),
}


async def test_failing_netbox_changes_no_node_and_recovers(tmp_path: Path) -> None:
    (tmp_path / "daemon").mkdir()
    async with (
        open_fake(tmp_path, Fleet.of(60)) as server,
        control_environment(tmp_path / "daemon") as inside,
    ):
        source = server.inventory(limits=SHORT, objects=["devices"])
        refresher, fake = InventoryRefresher(inside.state, [source]), fake_of(server)
        await refresher.refresh()
        status, known = inside.state.sources[source.source], dict(inside.state.index.nodes)
        assert len(known) == 60
        for problem, fault in FAULTS.items():
            fake.intercept = fault
            await refresher.refresh()
            assert status.error == f"netbox/netbox: {problem}"
            assert dict(inside.state.index.nodes) == known
            fake.intercept = None
            await refresher.refresh()
            assert (status.error, status.nodes) == ("", 60)
        fake.tokens[V2].may_view = False
        await refresher.refresh()
        assert "it refuses the token (You do not have permission" in status.error
        assert dict(inside.state.index.nodes) == known
        fake.tokens[V2].may_view = True
        await refresher.refresh()
        assert status.error == ""
