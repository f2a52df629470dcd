"""Answers of a source that come while an admin accepts an earlier one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from machines.model.node import ConflictKind
from machines.model.trust_events import InventoryAccepted
from rolloutd.engine.background.inventory_refresh import InventoryRefresher
from rolloutd.errors import Refused, StoreFailed
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


def begin_during_next_call(
    owner: Any, method: str, begun: Callable[[], Coroutine[Any, Any, None]]
) -> list[asyncio.Task[None]]:
    """Begin it as during_next_call() does, and let it wait; return a list that then has its task."""
    tasks: list[asyncio.Task[None]] = []

    async def begin() -> None:
        tasks.append(asyncio.create_task(begun()))
        await asyncio.wait(tasks, timeout=0)

    during_next_call(owner, method, begin)
    return tasks


async def test_accept_during_new_answer_leaves_no_audit_entry(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        hosts = Source("hosts", ALL | fleet(20))
        refresher = InventoryRefresher(inside.state, [hosts])
        await refresher.refresh()
        hosts.nodes = ALL | fleet(10)
        await refresher.refresh()
        hosts.nodes = ALL | fleet(2)
        accept = partial(refresher.accept, "hosts", ADAM, "ten are scrapped")
        accepted = begin_during_next_call(refresher._readers["hosts"], "_judge", accept)
        await refresher.refresh()
        with pytest.raises(Refused, match="hosts: it has answered again meanwhile; read"):
            await accepted[0]
        assert len(inside.state.index.nodes) == len(ALL) + 20
        assert not await inside.state.store.read_audit(event=InventoryAccepted.__name__)


async def test_accept_during_equal_answer_takes_effect_once(tmp_path: Path) -> None:
    """Its audit entry has the instant when it took effect."""
    async with control_environment(tmp_path) as inside:
        hosts = Source("hosts", ALL | fleet(20))
        refresher = InventoryRefresher(inside.state, [hosts])
        await refresher.refresh()
        hosts.nodes = ALL | fleet(10)
        await refresher.refresh()
        accepted: list[asyncio.Task[None]] = []

        async def accept() -> None:
            accept_now = (refresher.accept("hosts", ADAM, "ten are scrapped") for _ in range(2))
            accepted.extend(map(asyncio.create_task, accept_now))
            await asyncio.wait(accepted, timeout=0)
            inside.clock.advance(5)

        during_next_call(refresher._readers["hosts"], "_judge", accept)
        await refresher.refresh()
        await accepted[0]
        with pytest.raises(Refused, match="hosts: no answer is held; there is nothing to accept"):
            await accepted[1]
        assert len(inside.state.index.nodes) == len(ALL) + 10
        (entry,) = await inside.state.store.read_audit(event=InventoryAccepted.__name__)
        assert json.loads(entry.text)["fields"]["at"] == inside.clock.now()


@pytest.mark.parametrize("count", [2, 18], ids=["held too", "takes effect"])
async def test_answer_during_accept_waits_for_it(tmp_path: Path, count: int) -> None:
    async with control_environment(tmp_path) as inside:
        hosts = Source("hosts", ALL | fleet(20))
        refresher = InventoryRefresher(inside.state, [hosts])
        await refresher.refresh()
        hosts.nodes = ALL | fleet(10)
        await refresher.refresh()
        hosts.nodes = ALL | fleet(count)
        refreshed = begin_during_next_call(refresher._readers["hosts"], "_judge", refresher.refresh)
        await refresher.accept("hosts", ADAM, "ten are scrapped")
        await refreshed[0]
        (entry,) = await inside.state.store.read_audit(event=InventoryAccepted.__name__)
        assert '"removed":10' in entry.text
        held = inside.state.sources["hosts"].held
        assert len(inside.state.index.nodes) == len(ALL) + (10 if count == 2 else 18)
        assert (None if held is None else len(held.removed)) == (8 if count == 2 else None)


async def test_answer_judged_during_pin_keeps_accepted_name(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        netbox = ObjectSource(dict(FLEET))
        refresher = InventoryRefresher(inside.state, [netbox])
        await refresher.refresh()
        netbox.names[P1] = "z1"
        await refresher.refresh()
        pin = partial(refresher.pin_identity, "p1", ADAM, "renamed")
        pinned = begin_during_next_call(refresher._readers["netbox"], "_judge", pin)
        await refresher.refresh()
        await pinned[0]
        assert set(inside.state.index.nodes) == {"z1", *ALL} - {"p1"}
        assert not inside.state.index.nodes["z1"].conflicts


async def test_pin_accepts_no_name_that_was_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with control_environment(tmp_path) as inside:
        netbox = ObjectSource(dict(FLEET))
        refresher = InventoryRefresher(inside.state, [netbox])
        await refresher.refresh()
        netbox.names[P1] = "z1"
        with monkeypatch.context() as broken:
            broken.setattr(inside.state.store, "commit", AsyncMock(side_effect=StoreFailed("disk full")))
            await refresher.refresh()
        await refresher.pin_identity("p1", ADAM, "reinstalled")
        assert [each.kind for each in inside.state.index.nodes["p1"].conflicts] == [ConflictKind.RENAMED]


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
