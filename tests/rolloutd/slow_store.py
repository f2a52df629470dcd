"""A store that takes its time, as a disk does, and a daemon over a house: for what happens in between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machines.model.events import Event
from rolloutd.engine.daemon import Daemon
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.errors import StoreFailed
from rolloutd.ports import AuditEntry, Check, DiscoveredNode, Inventory, Isolator
from tests.contracts.fakes.check import FakeCheck
from tests.contracts.fakes.clock import FakeTimers
from tests.contracts.fakes.isolator import FakeIsolator
from tests.contracts.fakes.runner import FakeRunner
from tests.contracts.fakes.sources import find_source
from tests.contracts.fakes.store import MemoryStore
from tests.rolloutd.control_environment import NODES, ControlEnvironment

WRITE_ITERATIONS = 5
"""Turns of the loop that a slow write takes: others come to the lock, and cancellations land, meanwhile."""


class SlowStore(MemoryStore):
    """A store whose writes others have time for; `failure` is what it answers then."""

    failure: StoreFailed | None = None
    writing = 0

    async def commit(self, events: Sequence[Event], **told: Any) -> tuple[AuditEntry, ...]:
        """Write, or fail, some turns later."""
        self.writing += 1
        try:
            for _ in range(WRITE_ITERATIONS):
                await asyncio.sleep(0)
        finally:
            self.writing -= 1
        if self.failure is not None:
            raise self.failure
        return await super().commit(events, **told)


async def open_slow_store(compiled: Any) -> SlowStore:
    """Open a slow store."""
    return SlowStore(compile=compiled)


def store_of(env: ControlEnvironment) -> SlowStore:
    """Return the store of a house that was made with `slow`."""
    assert isinstance(env.state.store, SlowStore)
    return env.state.store


class FakeInventory:
    """An inventory that knows the nodes of a house, but for those that are `gone`."""

    source = "hosts"

    def __init__(self) -> None:
        self.removed: set[str] = set()

    async def refresh(self) -> Sequence[DiscoveredNode]:
        """Tell of all nodes that are left."""
        left = [node for node in NODES if node.name not in self.removed]
        return [
            DiscoveredNode(node.name, source="hosts", kind=node.kind, labels=node.labels) for node in left
        ]


def adapters_of(
    env: ControlEnvironment, tmp_path: Path, isolator: Isolator | None = None, check: Check | None = None
) -> AdapterSet:
    """Return fakes for all adapters that the plan of a house names."""

    isolators, checks = {"command": isolator or FakeIsolator()}, {"reachable": check or FakeCheck()}
    return AdapterSet(FakeRunner(env.run_host), isolators, checks, find_source)


def daemon_of(
    env: ControlEnvironment,
    adapters: AdapterSet,
    inventory: Inventory | None = None,
    alarm: FakeTimers | None = None,
) -> Daemon:
    """Return a daemon over the facts of a house."""
    alarm = alarm or FakeTimers(env.clock)
    return Daemon(env.state, adapters, inventories=[inventory or FakeInventory()], observers=[], timers=alarm)


async def loop_iterations(count: int) -> None:
    """Let the loop turn so often."""
    for _ in range(count):
        await asyncio.sleep(0)
