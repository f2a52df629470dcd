"""The contracts of ports.Isolator and ports.TrafficProbe for `haproxy`, with a real HAProxy."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rolloutd.adapters.haproxy.isolator import HaproxyIsolator, HaproxyTrafficProbe
from rolloutd.adapters.haproxy.registration import ISOLATOR
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.contracts import (
    IsolatorBackend,
    IsolatorContract,
    TrafficProbeBackend,
    TrafficProbeContract,
)
from rolloutd.ports import AdapterContext, TrafficProbe
from tests.contracts.ssh_fixtures import host_of, real_sshd
from tests.support.balanced_server import BalancedServer, balanced_server

pytestmark = pytest.mark.servers("haproxy")


class Isolated:
    """The isolator: the server's admin state, as HAProxy itself reports it."""

    def __init__(self, server: BalancedServer, context: AdapterContext) -> None:
        self._server = server
        self.host, self.params, self.clock = server.host, server.params, server.clock
        self.isolator = HaproxyIsolator(context)

    async def is_isolated(self) -> bool:
        return all(mask & 1 for mask, _ in self._server.admin_states())

    async def isolate_from_outside(self) -> None:
        for each in self._server.balancers.values():
            each.command("set server web/n1 state maint")


class Probed:
    """The probe: a request is the traffic, and a socket that is gone hides it."""

    def __init__(self, server: BalancedServer) -> None:
        self._server = server
        self.host, self.params, self.clock = server.host, server.params, server.clock
        self.probe: TrafficProbe = HaproxyTrafficProbe(server.context)

    async def start_traffic(self) -> None:
        await self._server.start_request()

    async def stop_traffic(self) -> None:
        await self._server.answer_requests()

    async def hide_traffic(self) -> None:
        self._server.balancers["lb1"].hide_socket()


class TestIsolatorOverSocket(IsolatorContract):
    registration = ISOLATOR

    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[IsolatorBackend]:
        async with balanced_server(directory, "lb1", "lb2") as server:
            yield Isolated(server, server.context)


class TestIsolatorOverTcp(IsolatorContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[IsolatorBackend]:
        async with balanced_server(directory) as server:
            yield Isolated(server, server.make_context(way="tcp"))


class TestIsolatorOverSsh(IsolatorContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[IsolatorBackend]:
        shell = SshShell()
        with real_sshd(directory / "sshd") as sshd:
            async with balanced_server(directory) as server:
                hosts = {"lb1": host_of(sshd).connection}
                try:
                    yield Isolated(server, server.make_context(way="lb1", shell=shell, hosts=hosts))
                finally:
                    await shell.close()


class TestProbe(TrafficProbeContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[TrafficProbeBackend]:
        async with balanced_server(directory, "lb1", "lb2") as server:
            yield Probed(server)
