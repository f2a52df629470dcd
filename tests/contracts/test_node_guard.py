"""The contract of ports.NodeGuard: the fake, and the script on this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from rolloutd.adapters.ssh.node_guard import SshNodeGuard
from rolloutd.errors import AdapterFailed, NodeUnreachable
from rolloutd.ports import GuardReport, GuardState, Host, NodeGuard, StepContext
from tests.contracts.fakes.clock import START, FakeClock
from tests.contracts.fakes.node_guard import FakeNodeGuard
from tests.contracts.ssh_fixtures import LIMIT_S, step_context
from tests.support.local_shell import LocalShell

AFTER_S = 2
ORDER = "1.7 database 1800000000"
NEWER = "1.8 database 1800000001"


class Backend(Protocol):
    """A guard, and the node that it guards."""

    guard: NodeGuard
    paths: list[str]
    has_timers: bool

    def write(self, path: str, text: str) -> None: ...

    def read(self, path: str) -> str | None: ...

    def cut_off(self) -> None: ...

    async def pass_time(self, seconds: float) -> None: ...


class FakeBackend:
    has_timers = True

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.fake = FakeNodeGuard(self.clock)
        self.guard: NodeGuard = self.fake
        self.paths = ["/etc/net", "/etc/new"]

    def write(self, path: str, text: str) -> None:
        self.fake.node("n1").files[path] = text

    def read(self, path: str) -> str | None:
        return self.fake.node("n1").files.get(path)

    def cut_off(self) -> None:
        self.fake.down.add("n1")

    async def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)


class ScriptBackend:
    """The script on this machine; its timers run in real time."""

    has_timers = False

    def __init__(self, directory: Path) -> None:
        self.shell = LocalShell()
        self.guard: NodeGuard = SshNodeGuard(self.shell, FakeClock(), str(directory / "guards"))
        self.paths = [str(directory / "net"), str(directory / "new")]

    def write(self, path: str, text: str) -> None:
        Path(path).write_text(text)

    def read(self, path: str) -> str | None:
        return Path(path).read_text() if Path(path).exists() else None

    def cut_off(self) -> None:
        self.shell.down.add("n1")

    async def pass_time(self, seconds: float) -> None:
        raise AssertionError("time cannot be made to pass here")


@asynccontextmanager
async def fake_backend(directory: Path) -> AsyncIterator[Backend]:
    yield FakeBackend()


@asynccontextmanager
async def script_backend(directory: Path) -> AsyncIterator[Backend]:
    backend = ScriptBackend(directory)
    try:
        yield backend
    finally:
        backend.shell.down.clear()
        # An armed guard's timer ends within a second of its end.
        for attempt in (1, 2):
            await backend.guard.disarm(context(backend, attempt=attempt))


def context(backend: Backend, *, attempt: int = 1, after_s: int = 600, **params: Any) -> StepContext:
    values: Mapping[str, Any] = {
        "paths": backend.paths,
        "commands": [],
        "after": after_s,
        "across_reboot": False,
        **params,
    }
    return replace(step_context(Host("n1"), values), attempt=attempt, deadline=START + LIMIT_S)


class NodeGuardContract:
    """What every guard must do."""

    @asynccontextmanager
    async def changed(self, directory: Path, **arm: Any) -> AsyncIterator[tuple[Backend, StepContext]]:
        """Yield a node that was changed under an armed guard."""
        async with self.open(directory) as backend:
            ctx = context(backend, **arm)
            backend.write(backend.paths[0], "before")
            assert (await backend.guard.arm(ctx, order=ORDER)).state is GuardState.ARMED
            self.change(backend)
            yield backend, ctx

    def open(self, directory: Path) -> AbstractAsyncContextManager[Backend]:
        raise NotImplementedError

    def change(self, backend: Backend) -> None:
        for path in backend.paths:
            backend.write(path, "after")

    def contents(self, backend: Backend) -> list[str | None]:
        return [backend.read(path) for path in backend.paths]

    async def wait_for_end(self, backend: Backend, ctx: StepContext) -> GuardReport:
        if backend.has_timers:
            await backend.pass_time(AFTER_S + 1)
        limit = time.monotonic() + LIMIT_S
        while (report := await backend.guard.inspect(ctx)).state is not GuardState.RESTORED:
            assert time.monotonic() < limit
            await asyncio.sleep(0.05)
        return report

    async def test_silence_restores(self, tmp_path: Path) -> None:
        async with self.changed(tmp_path, after_s=AFTER_S) as (backend, ctx):
            report = await self.wait_for_end(backend, ctx)
            assert (report.by, report.restored) == ("timer", tuple(backend.paths))
            assert report.problems == ()
            assert self.contents(backend) == ["before", None]
            assert (await backend.guard.disarm(ctx)) == report

    async def test_disarmed_guard_keeps_change(self, tmp_path: Path) -> None:
        async with self.changed(tmp_path) as (backend, ctx):
            for operation in (backend.guard.disarm, backend.guard.disarm, backend.guard.restore):
                assert (await operation(ctx)).state is GuardState.CONFIRMED
            assert self.contents(backend) == ["after", "after"]

    async def test_restore_by_daemon_can_be_repeated(self, tmp_path: Path) -> None:
        async with self.changed(tmp_path) as (backend, ctx):
            report = await backend.guard.restore(ctx)
            assert (report.state, report.by) == (GuardState.RESTORED, "daemon")
            assert self.contents(backend) == ["before", None]
            assert await backend.guard.restore(ctx) == report
            self.change(backend)  # a run that continued without the daemon
            assert (await backend.guard.restore(ctx)).restored == report.restored
            assert self.contents(backend) == ["before", None]

    async def test_second_arm_finds_first(self, tmp_path: Path) -> None:
        async with self.changed(tmp_path) as (backend, ctx):
            assert (await backend.guard.arm(ctx, order=NEWER)).state is GuardState.ARMED
            assert (await backend.guard.renew(ctx)).state is GuardState.ARMED
            await backend.guard.restore(ctx)
            assert self.contents(backend) == ["before", None]
            assert (await backend.guard.arm(ctx, order=NEWER)).state is GuardState.RESTORED

    async def test_newer_guard_ends_older_one(self, tmp_path: Path) -> None:
        async with self.changed(tmp_path) as (backend, ctx):
            newer = replace(ctx, attempt=2)
            assert (await backend.guard.arm(newer, order=NEWER)).state is GuardState.ARMED
            assert self.contents(backend) == ["before", None]
            self.change(backend)
            with pytest.raises(AdapterFailed):
                await backend.guard.arm(ctx, order=ORDER)
            assert (await backend.guard.restore(ctx)).state is GuardState.NONE
            assert self.contents(backend) == ["after", "after"]

    async def test_node_without_guard_reports_none(self, tmp_path: Path) -> None:
        async with self.open(tmp_path) as backend:
            guard, ctx = backend.guard, context(backend)
            for operation in (guard.renew, guard.disarm, guard.restore, guard.inspect):
                assert (await operation(ctx)).state is GuardState.NONE

    async def test_silent_node_is_unreachable(self, tmp_path: Path) -> None:
        async with self.open(tmp_path) as backend:
            guard, ctx = backend.guard, context(backend)
            backend.cut_off()
            for operation in (guard.renew, guard.disarm, guard.restore, guard.inspect):
                with pytest.raises(NodeUnreachable):
                    await operation(ctx)


class TestFakeNodeGuard(NodeGuardContract):
    def open(self, directory: Path) -> AbstractAsyncContextManager[Backend]:
        return fake_backend(directory)

    async def test_renewal_delays_restore(self, tmp_path: Path) -> None:
        async with self.changed(tmp_path, after_s=10) as (backend, ctx):
            for _ in range(5):
                await backend.pass_time(9.0)
                assert (await backend.guard.renew(ctx)).state is GuardState.ARMED
            await backend.pass_time(10.0)
            assert (await backend.guard.inspect(ctx)).state is GuardState.RESTORED


class TestNodeGuardScript(NodeGuardContract):
    def open(self, directory: Path) -> AbstractAsyncContextManager[Backend]:
        return script_backend(directory)
