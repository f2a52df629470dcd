"""A store that takes its time, as a disk does, and a daemon over a house: for what happens in between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machines.events import Event
from rolloutd.daemon import Daemon
from rolloutd.driving.gear import Gear
from rolloutd.errors import StoreFailed
from rolloutd.ports import Check, Entry, Found, Isolator
from tests.contracts.twins.check import FakeCheck
from tests.contracts.twins.clock import FakeAlarm
from tests.contracts.twins.isolator import FakeIsolator
from tests.contracts.twins.runner import FakeRunner
from tests.contracts.twins.store import MemoryStore
from tests.rolloutd.control_house import NODES, House

TURNS = 5
"""Turns of the loop that a slow write takes: others come to the lock, and cancellations land, meanwhile."""


class SlowStore(MemoryStore):
    """A store whose writes others have time for; `failure` is what it answers then."""

    failure: StoreFailed | None = None
    writing = 0

    async def commit(self, events: Sequence[Event], **told: Any) -> tuple[Entry, ...]:
        """Write, or fail, some turns later."""
        self.writing += 1
        try:
            for _ in range(TURNS):
                await asyncio.sleep(0)
        finally:
            self.writing -= 1
        if self.failure is not None:
            raise self.failure
        return await super().commit(events, **told)


async def slow(compiled: Any) -> SlowStore:
    """Open a slow store."""
    return SlowStore(compile=compiled)


def store_of(inside: House) -> SlowStore:
    """Return the store of a house that was made with `slow`."""
    assert isinstance(inside.state.store, SlowStore)
    return inside.state.store


class Hosts:
    """An inventory that knows the nodes of a house, but for those that are `gone`."""

    source = "hosts"

    def __init__(self) -> None:
        self.gone: set[str] = set()

    async def refresh(self) -> Sequence[Found]:
        """Tell of all nodes that are left."""
        left = [node for node in NODES if node.name not in self.gone]
        return [Found(node.name, source="hosts", kind=node.kind, labels=node.labels) for node in left]


def gear_of(
    inside: House, tmp_path: Path, isolator: Isolator | None = None, check: Check | None = None
) -> Gear:
    """Return twins for all adapters that the plan of a house names."""

    async def tree(rollout: str) -> Path:
        return tmp_path

    isolators, checks = {"command": isolator or FakeIsolator()}, {"reachable": check or FakeCheck()}
    return Gear(FakeRunner(inside.world), isolators, checks, tree)


def daemon_of(inside: House, gear: Gear, hosts: Hosts | None = None) -> Daemon:
    """Return a daemon over the facts of a house."""
    alarm = FakeAlarm(inside.clock)
    return Daemon(inside.state, gear, inventories=[hosts or Hosts()], observers=[], alarm=alarm)


async def turns(count: int) -> None:
    """Let the loop turn so often."""
    for _ in range(count):
        await asyncio.sleep(0)
