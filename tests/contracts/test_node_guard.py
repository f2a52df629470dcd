"""The contract of ports.NodeGuard: the fake, and the script on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rolloutd.adapters.ssh.node_guard import SshNodeGuard
from rolloutd.contracts import NodeGuardBackend, NodeGuardContract
from rolloutd.contracts.harness import scenario
from rolloutd.ports import Clock, GuardState, Host, NodeGuard
from tests.contracts.fakes.clock import FakeClock
from tests.contracts.fakes.node_guard import FakeNodeGuard
from tests.support.local_shell import LocalShell


class FakeBackend:
    def __init__(self) -> None:
        self._clock = FakeClock()
        self.clock: Clock = self._clock
        self.fake = FakeNodeGuard(self._clock)
        self.guard: NodeGuard = self.fake
        self.host = Host("n1")
        self.params: Mapping[str, Any] = {"paths": ["/etc/net", "/etc/new"]}
        self._files["/etc/net"] = "before"

    @property
    def _files(self) -> dict[str, str]:
        return self.fake.node("n1").files

    async def change_node(self) -> None:
        self._files.update({"/etc/net": "after", "/etc/new": "after"})

    async def state(self) -> object:
        return dict(self._files)

    async def cut_off(self) -> None:
        self.fake.down.add("n1")

    async def let_time_pass(self) -> None:
        self._clock.advance(0.5)


class ScriptBackend:
    """The script on this machine; its timers run in real time."""

    def __init__(self, directory: Path) -> None:
        self.shell = LocalShell()
        self.clock: Clock = FakeClock()
        self.guard: NodeGuard = SshNodeGuard(self.shell, self.clock, str(directory / "guards"))
        self.host = Host("n1")
        self._files = [directory / "net", directory / "new"]
        self._files[0].write_text("before")
        paths = [str(path) for path in self._files]
        self.params: Mapping[str, Any] = {"paths": paths, "commands": [], "across_reboot": False}

    async def change_node(self) -> None:
        for path in self._files:
            path.write_text("after")

    async def state(self) -> object:
        return [path.read_text() if path.exists() else None for path in self._files]

    async def cut_off(self) -> None:
        self.shell.down.add("n1")

    async def let_time_pass(self) -> None:
        await asyncio.sleep(0.05)


class TestFakeNodeGuard(NodeGuardContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[NodeGuardBackend]:
        yield FakeBackend()

    @scenario
    async def test_renewal_delays_restore(self, backend: FakeBackend) -> None:
        ctx = self._context(backend, after_s=10)
        await self._arm_and_change(backend, ctx)
        for _ in range(5):
            for _ in range(19):
                await backend.let_time_pass()
            assert (await backend.guard.renew(ctx)).state is GuardState.ARMED
        for _ in range(20):
            await backend.let_time_pass()
        assert (await backend.guard.inspect(ctx)).state is GuardState.RESTORED


class TestNodeGuardScript(NodeGuardContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[NodeGuardBackend]:
        backend = ScriptBackend(directory)
        try:
            yield backend
        finally:
            backend.shell.down.clear()
            # An armed guard's timer ends within a second of its end.
            for attempt in (1, 2):
                await backend.guard.disarm(self._context(backend, attempt=attempt))
