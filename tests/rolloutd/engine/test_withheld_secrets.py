"""Secrets of nodes are in memory only: after a restart a node waits for its inventory source."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from machines.model.reasons import ReasonCode
from machines.scheduler.why import why
from machines.states import Phase, Trigger
from rolloutd.engine.background.inventory_refresh import InventoryRefresher
from rolloutd.engine.drivers.driver import INVENTORY_RETRY_S, Driver
from rolloutd.engine.drivers.node_session import NodeSession
from rolloutd.errors import SourceFailed
from rolloutd.ports import WITHHELD, DiscoveredNode
from rolloutd.store import open_store
from tests.contracts.fakes.isolator import FakeIsolator
from tests.rolloutd.control_environment import NODES, ControlEnvironment, control_environment
from tests.rolloutd.slow_store import adapters_of, loop_iterations

PASSWORD = "hunter2"


class PasswordSource:
    """An inventory that knows a password of p1; it fails while `down`."""

    source = "hosts"

    def __init__(self) -> None:
        self.down = False
        self.password = PASSWORD

    async def refresh(self) -> Sequence[DiscoveredNode]:
        if self.down:
            raise SourceFailed("hosts: no answer; try later")
        return [
            DiscoveredNode(
                node.name,
                source="hosts",
                labels=node.labels,
                connection={"ansible_host": node.name}
                | ({"ansible_become_password": self.password} if node.name == "p1" else {}),
            )
            for node in NODES
        ]


async def restart(inside: ControlEnvironment) -> None:
    """Forget what a daemon has in memory only."""
    state = inside.state
    state.connections.change({}, tuple(state.connections))
    await state.load_connections()
    state.sources.clear()


@pytest.fixture
def on_disk(tmp_path: Path) -> Any:
    async def sqlite(compiled: Any) -> Any:
        return await open_store(tmp_path / "state", compile_plan=compiled)

    return sqlite


async def test_password_reaches_no_file_and_a_restart_forgets_it(tmp_path: Path, on_disk: Any) -> None:
    async with control_environment(tmp_path, store=on_disk) as inside:
        hosts = PasswordSource()
        refresher = InventoryRefresher(inside.state, [hosts])
        await refresher.refresh()
        assert inside.state.host("p1").connection["ansible_become_password"] == PASSWORD
        files = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
        assert len(files) >= 3
        assert not [path for path in files if PASSWORD.encode() in path.read_bytes()]
        await restart(inside)
        assert inside.state.host("p1").connection == {"ansible_host": "p1", WITHHELD: True}
        assert inside.state.awaited_sources("p1") == ("hosts",)
        assert inside.state.awaited_sources("p2") == ()


async def test_refresh_after_restart_or_new_password_writes_nothing(tmp_path: Path, on_disk: Any) -> None:
    async with control_environment(tmp_path, store=on_disk) as inside:
        hosts = PasswordSource()
        await InventoryRefresher(inside.state, [hosts]).refresh()
        seq = inside.state.changes.latest_seq
        await restart(inside)
        await InventoryRefresher(inside.state, [hosts]).refresh()
        hosts.password = "correct-horse"
        await InventoryRefresher(inside.state, [hosts]).refresh()
        assert inside.state.changes.latest_seq == seq
        assert inside.state.host("p1").connection["ansible_become_password"] == "correct-horse"
        assert inside.state.awaited_sources("p1") == ()


async def test_node_waits_for_its_passwords_with_a_reason(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        hosts = PasswordSource()
        refresher = InventoryRefresher(inside.state, [hosts])
        await refresher.refresh()
        rollout = await inside.start()
        await inside.transition(rollout, "p1", Trigger.ADMITTED)
        await restart(inside)
        hosts.down = True
        await InventoryRefresher(inside.state, [hosts]).refresh()
        isolator = FakeIsolator()
        adapters = adapters_of(inside, tmp_path, isolator)
        session = NodeSession(inside.state, adapters, rollout, "p1")
        with pytest.raises(SourceFailed, match="has not answered"):
            await session.step_context(session.plan.isolate[0])
        driver = Driver(inside.state, adapters, rollout, "p1", daemon_started_at=inside.clock.now())
        driving = asyncio.create_task(driver.run())
        limit_s = session.plan.isolate_timeout_s
        for _ in range(3):
            await loop_iterations(50)
            inside.clock.advance(limit_s)
        await loop_iterations(50)
        assert isolator.actions == []
        assert inside.phase(rollout, "p1") is Phase.ISOLATING, "time without the password counts for no limit"
        reason = why(inside.state.index, session.target, inside.state.now(), inside.state.live)
        assert reason is not None
        assert (reason.code, reason.params) == (ReasonCode.INVENTORY_AWAITED, {"sources": ("hosts",)})
        hosts.down = False
        await InventoryRefresher(inside.state, [hosts]).refresh()
        inside.clock.advance(INVENTORY_RETRY_S)
        await loop_iterations(50)
        assert isolator.actions
        driving.cancel()
        await asyncio.gather(driving, return_exceptions=True)
