"""A TCP listener for other machines: limits of connections, and TLS.

Its callers have no account here.  Who they are is the matter of what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from rolloutd.concurrency import threads
from rolloutd.control.limits import LimitedProtocol, Quota, Rank, max_connections
from rolloutd.service.listen_socket import BACKLOG, CannotListen, bind_address

HANDSHAKE_TIMEOUT_S = 10.0

SHUTDOWN_S = 2.0
"""How long an answer may still take when the daemon stops."""

NAMELESS = -1
"""The user id of all callers."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Certificate and key of a listener; with `client_ca` each client needs a certificate of it."""

    cert: Path
    key: Path
    client_ca: Path | None = None


@contextlib.asynccontextmanager
async def serve_tcp(
    application: web.Application, address: str, setting: str, tls: TlsFiles | None
) -> AsyncIterator[None]:
    """Serve an application at ADDRESS:PORT while the context is open; raises CannotListen."""
    runner = web.AppRunner(
        application, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S
    )
    # Half of the connections that the daemon's descriptors allow.
    connections = Quota("connections", max_connections(), {NAMELESS: Rank.ADMIN})
    await runner.setup()
    listener = None
    try:
        context = None if tls is None else await threads.FILES.run(_tls_context, tls, setting)
        serve = runner.server
        assert serve is not None
        listener = await asyncio.get_running_loop().create_server(
            lambda: LimitedProtocol(serve(), connections),
            sock=bind_address(address, f"{setting}.listen"),
            backlog=BACKLOG,
            ssl=context,
            ssl_handshake_timeout=None if context is None else HANDSHAKE_TIMEOUT_S,
        )
        yield
    finally:
        if listener is not None:
            listener.close()
        await runner.cleanup()


def _tls_context(tls: TlsFiles, setting: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(tls.cert, tls.key)
        if tls.client_ca is not None:
            context.load_verify_locations(tls.client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ssl.SSLError) as error:
        raise CannotListen(f"{setting}.tls: {error}; fix the files") from error
    return context
