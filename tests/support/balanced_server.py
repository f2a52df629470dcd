"""A node's HTTP server behind real HAProxy, and requests that it answers when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rolloutd.contracts import SystemClock
from rolloutd.ports import AdapterContext, Host, InventorySnapshot, Shell
from rolloutd.settings import Settings
from tests.contracts.fakes.runner import FakeRunHost, FakeRunner
from tests.contracts.fakes.shell import FakeShell
from tests.contracts.ssh_fixtures import serve_connections
from tests.support.haproxy import Haproxy
from tests.support.waiting import wait_in_loop_until

RESPONSE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
LIMIT_S = 60.0


class BalancedServer:
    """The server n1 of the backend `web` on every balancer; `context` is what adapters get."""

    def __init__(self, balancers: Mapping[str, Haproxy]) -> None:
        self.balancers = balancers
        self.host = Host("n1")
        self.params: dict[str, Any] = {"backend": "web", "server": "n1"}
        self.clock = SystemClock()
        self.context = self.make_context()
        self._answer = asyncio.Event()
        self._requests: list[asyncio.Task[bytes]] = []

    def make_context(
        self,
        *,
        way: str = "socket",
        shell: Shell | None = None,
        hosts: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> AdapterContext:
        """Return a context whose settings reach the balancers in one way: socket, tcp, or node (its name)."""
        ways = {
            name: {"tcp": f"127.0.0.1:{each.admin_port}"} if way == "tcp" else {"socket": str(each.socket)}
            for name, each in self.balancers.items()
        }
        if way not in ("tcp", "socket"):
            ways = {name: {**each, "node": way} for name, each in ways.items()}
        settings = Settings.model_validate({"haproxy": ways})
        runner = FakeRunner(FakeRunHost({}))
        snapshot = InventorySnapshot(hosts or {})
        return AdapterContext(shell or FakeShell(), self.clock, runner, lambda: snapshot, settings)

    def admin_states(self) -> list[tuple[int, int]]:
        """Return the server's admin state (1 maint, 8 drain) and weight on each balancer."""
        return [each.admin_states()["n1"] for each in self.balancers.values()]

    async def start_request(self, balancer: str = "lb1") -> None:
        """Send a request that is not answered yet, and wait until the balancer counts it."""
        haproxy = self.balancers[balancer]
        self._answer.clear()
        self._requests.append(asyncio.create_task(self._request(haproxy.port)))
        await wait_in_loop_until(lambda: haproxy.statistics()["n1"]["scur"] != "0")

    async def answer_requests(self) -> Sequence[bytes]:
        """Answer all requests and return what their clients got, when no balancer counts one."""
        self._answer.set()
        responses = await asyncio.gather(*self._requests)
        self._requests.clear()
        for each in self.balancers.values():
            await wait_in_loop_until(lambda each=each: each.statistics()["n1"]["scur"] == "0")
        return responses

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection of a balancer."""
        await reader.readuntil(b"\r\n\r\n")
        await self._answer.wait()
        writer.write(RESPONSE)
        await writer.drain()

    async def _request(self, port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n")
        response = await reader.read()
        writer.close()
        return response


@asynccontextmanager
async def balanced_server(
    directory: Path, *names: str, level: str = "admin", more: str = ""
) -> AsyncIterator[BalancedServer]:
    """Run the server behind a balancer of each name, `lb1` alone by default."""
    balancers: dict[str, Haproxy] = {}
    server: BalancedServer | None = None

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert server is not None
        await server.serve(reader, writer)

    async with serve_connections(serve) as port:
        try:
            for name in names or ("lb1",):
                servers = {"n1": port, "n2": port}
                balancers[name] = Haproxy(directory / name, servers, level=level, more=more).start()
            server = BalancedServer(balancers)
            yield server
        finally:
            for each in balancers.values():
                each.stop()
