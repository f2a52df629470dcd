"""Fuzz targets of the answers of HAProxy's Runtime API and of a node's web server, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rolloutd.adapters.haproxy.registration import BalancerParams
from rolloutd.adapters.haproxy.runtime_api import AdminState, Balancer
from rolloutd.adapters.http.check import HttpCheck
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.errors import RolloutdError
from rolloutd.ports import AdapterContext, Host, InventorySnapshot, StepContext
from rolloutd.settings import Settings
from tests.contracts.fakes.clock import FakeClock
from tests.contracts.fakes.runner import FakeRunHost, FakeRunner, playbook_context
from tests.fuzz.engine import Consumer

SEPARATOR = b"\n==\n"
"""Between the answers to HAProxy's three requests."""

STATE = b"""1
# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_iweight
4 web 1 n1 10.0.0.1 2 0 100 100
4 web 2 n2 10.0.0.2 2 8 1 1

"""
STATISTICS = b"""# pxname,svname,qcur,qmax,scur,smax,slim,status
web,n1,0,0,3,9,,UP

"""
HAPROXY = (
    SEPARATOR.join((STATE, STATISTICS, b"\n")),
    SEPARATOR.join((b"Can't find backend.\n", STATISTICS, b"No such server.\n")),
    SEPARATOR.join((STATE, b'# pxname,svname,qcur,scur\nweb,"n1,0\n', b"Permission denied\n")),
)

HTTP = (
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: text/plain\r\n\r\nup",
    b"HTTP/1.1 302 Found\r\nLocation: http://other/\r\nSet-Cookie: a=b; Path=/\r\nConnection: close\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nup\r\n0\r\n\r\n",
    b"HTTP/1.0 503 Service Unavailable\r\nContent-Encoding: gzip\r\n\r\n\x1f\x8b\x08\x00",
)


@asynccontextmanager
async def haproxy(directory: Path) -> AsyncIterator[Consumer]:
    """Serve a Runtime API that answers with the input's parts."""
    answers: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        number = 0 if line.startswith(b"show servers") else 1 if line.startswith(b"show stat") else 2
        writer.write(answers[number] if number < len(answers) else b"")
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, directory / "haproxy.sock")
    context = AdapterContext(
        SshShell(), FakeClock(), FakeRunner(FakeRunHost({})), lambda: InventorySnapshot({}), Settings()
    )
    balancer = Balancer("lb", BalancerParams(socket=str(directory / "haproxy.sock")), context)

    async def consumer(data: bytes) -> None:
        answers[:] = data.split(SEPARATOR)
        with contextlib.suppress(RolloutdError):
            await balancer.read("web", "n1")
        with contextlib.suppress(RolloutdError):
            await balancer.set_state("web", "n1", AdminState.DRAIN)

    async with server:
        yield consumer


@asynccontextmanager
async def http_check(directory: Path) -> AsyncIterator[Consumer]:
    """Serve a node's web server that answers with the input."""
    current = b""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(current)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    context = playbook_context(FakeRunHost({}))
    check, clock = HttpCheck(context), context.clock
    params = {"url": f"http://127.0.0.1:{port}/", "status": 200, "body": "^up$"}
    # What asyncio logs of a server that does not speak HTTP is not the check's.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)

    async def consumer(data: bytes) -> None:
        nonlocal current
        current = data
        ctx = StepContext(Host("n1"), "R", 1, "verify.0.http", "key", params, clock.now() + 30.0)
        await check.check(ctx)

    async with server:
        yield consumer
