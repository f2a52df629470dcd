"""Answers of a source that come while an admin accepts an earlier one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from machines.model.trust_events import InventoryAccepted
from rolloutd.engine.background.inventory_refresh import InventoryRefresher
from rolloutd.errors import Refused
from tests.rolloutd.control_environment import control_environment
from tests.rolloutd.engine.background.test_inventory_identity import FLEET, P1, ObjectSource
from tests.rolloutd.engine.background.test_inventory_trust import ADAM, ALL, Source, fleet


def during_next_call(owner: Any, method: str, act: Callable[[], Awaitable[None]]) -> None:
    """Let something happen once, between the end of the next call of a method and its answer."""
    call = getattr(owner, method)

    async def called(*args: Any, **named: Any) -> Any:
        delattr(owner, method)
        answer = await call(*args, **named)
        await act()
        return answer

    setattr(owner, method, called)


@pytest.mark.parametrize("count", [2, 18], ids=["held too", "takes effect"])
async def test_answer_given_during_accept_is_not_accepted(tmp_path: Path, count: int) -> None:
    async with control_environment(tmp_path) as inside:
        hosts = Source("hosts", ALL | fleet(20))
        refresher = InventoryRefresher(inside.state, [hosts])
        await refresher.refresh()
        hosts.nodes = ALL | fleet(10)
        await refresher.refresh()
        hosts.nodes = ALL | fleet(count)
        reader = refresher._readers["hosts"]
        during_next_call(reader, "_judge", reader.query)
        with pytest.raises(Refused, match="hosts: it has answered again meanwhile; read"):
            await refresher.accept("hosts", ADAM, "ten are scrapped")
        await refresher.refresh()
        known = len(ALL) + (20 if count == 2 else count)
        assert len(inside.state.index.nodes) == known
        held = inside.state.sources["hosts"].held
        assert (held is None) == (count == 18)
        if held is not None:
            await refresher.accept("hosts", ADAM, "eighteen are scrapped")
            assert len(inside.state.index.nodes) == len(ALL) + count
            entries = await inside.state.store.read_audit(event=InventoryAccepted.__name__)
            assert sorted('"removed":18' in entry.text for entry in entries) == [False, True]


async def test_answer_judged_during_pin_keeps_accepted_name(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        netbox = ObjectSource(dict(FLEET))
        refresher = InventoryRefresher(inside.state, [netbox])
        await refresher.refresh()
        netbox.names[P1] = "z1"
        await refresher.refresh()
        reader = refresher._readers["netbox"]
        during_next_call(reader, "_judge", lambda: refresher.pin_identity("p1", ADAM, "renamed"))
        await refresher.refresh()
        assert set(inside.state.index.nodes) == {"z1", *ALL} - {"p1"}
        assert not inside.state.index.nodes["z1"].conflicts


@pytest.mark.parametrize("during", ["comparison", "write"])
async def test_rename_that_commit_lacks_waits_for_next(tmp_path: Path, during: str) -> None:
    async with control_environment(tmp_path) as inside:
        netbox, other = ObjectSource(dict(FLEET)), Source("other", {"p2": ALL["p2"]})
        refresher = InventoryRefresher(inside.state, [netbox, other])
        await refresher.refresh()
        rollout = await inside.start()
        before = inside.state.index.target(rollout, "p1")
        netbox.names[P1] = "z1"
        await refresher.refresh()
        # The name is accepted while an answer is held, so it counts in the next answer.
        netbox.names = {P1: "z1"}
        await refresher.refresh()
        await refresher.pin_identity("p1", ADAM, "renamed")
        netbox.names = FLEET | {P1: "z1"}
        other.nodes = {"p2": ALL["p2"], "a0": ALL["p2"]}
        query = refresher._readers["netbox"].query
        if during == "comparison":
            during_next_call(refresher, "_compare", query)
        else:
            during_next_call(inside.state.store, "commit", query)
        await refresher.refresh("other")
        await refresher.refresh()
        assert set(inside.state.index.nodes) == {"a0", "z1", *ALL} - {"p1"}
        target = inside.state.index.target(rollout, "z1")
        assert (target.wave, target.position, target.joined) == (before.wave, before.position, False)
