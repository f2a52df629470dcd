"""Serves the console to a browser on this machine, behind an address that works once.

Whoever has a cookie from the one-time address acts as the user who runs this:
so it listens on 127.0.0.1 alone, answers to that name alone, and gives out one
cookie.  The console itself is the same program, one process per browser tab.
"""

from __future__ import annotations

import hmac
import secrets
import shlex
import socket
import sys
from collections.abc import Sequence
from importlib import resources
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler
from textual_serve.server import Server

HOST = "127.0.0.1"

MOST_TABS = 8
"""Consoles at once: more tabs than one person reads, some 60 MiB each."""

COOKIE = "rolloutd-console"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "font-src 'self' data:; img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'"
)
"""The page loads nothing from anywhere else, and nobody frames it."""


def serve(socket_path: str, port: int, looks: Sequence[str] = ()) -> int:
    """Serve until interrupted; returns 1 when the port is taken."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
        listening.listen()  # before the address is told: whoever is quick waits, and is not refused
    except OSError as taken:
        print(f"{HOST}:{port}: {taken.strerror}", file=sys.stderr)  # noqa: T201
        return 1
    command = shlex.join([sys.executable, "-P", "-m", "tui", "--socket", socket_path, *looks])
    guarded = Guarded(command, listening.getsockname()[1])
    web.run_app(guarded.application(), sock=listening, print=None, access_log=None)
    return 0


class Guarded(Server):
    """textual-serve's server behind a one-time address."""

    def __init__(self, command: str, port: int) -> None:
        super().__init__(command, host=HOST, port=port, title="rolloutd")
        self._names = {f"{HOST}:{port}", f"localhost:{port}"}
        self._token: str | None = secrets.token_urlsafe(32)
        self._cookie = secrets.token_urlsafe(32)
        self._tabs = 0

    @property
    def address(self) -> str:
        """The address that works once."""
        return f"{self.public_url}/?token={self._token}"

    async def application(self) -> web.Application:
        """Return the application, guarded."""
        application = await self._make_app()
        application.middlewares.append(self._guard)
        return application

    async def on_startup(self, app: web.Application) -> None:
        """Say where it is."""
        print(f"open this in a browser on this machine; it works once:\n  {self.address}", flush=True)  # noqa: T201
        print("Ctrl-C ends it", file=sys.stderr, flush=True)  # noqa: T201

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.host not in self._names:
            return _refused("this server answers to 127.0.0.1 alone")
        if self._opens(request):
            return self._welcome()
        if not hmac.compare_digest(request.cookies.get(COOKIE, ""), self._cookie):
            return _refused("this address works once: run rolloutctl web again")
        origin = request.headers.get("Origin")
        if origin is not None and origin.removeprefix("http://") not in self._names:
            return _refused("not from this page")
        response = await handler(request)
        if not response.prepared:
            response.headers.update(_HEADERS)
        return response

    def _opens(self, request: web.Request) -> bool:
        """Say whether this is the first visit with the token; there is no second."""
        given = request.query.get("token", "")
        if self._token is None or not hmac.compare_digest(given, self._token):
            return False
        self._token = None
        return True

    def _welcome(self) -> web.Response:
        response = web.Response(status=303, headers={"Location": "/", **_HEADERS})
        response.set_cookie(COOKIE, self._cookie, httponly=True, samesite="Strict", path="/")
        return response

    async def handle_index(self, request: web.Request) -> web.Response:
        """Show the terminal, with nothing from anywhere else on the page."""
        page = (resources.files("tui") / "page.html").read_text()
        websocket = f"ws://{request.host}/ws"
        return web.Response(text=page.replace("WEBSOCKET", websocket), content_type="text/html")

    async def handle_websocket(self, request: web.Request) -> Any:
        """Run one console for one tab."""
        if self._tabs >= MOST_TABS:
            return _refused(f"{MOST_TABS} consoles are open already; close one")
        self._tabs += 1
        try:
            return await super().handle_websocket(request)
        finally:
            self._tabs -= 1


_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def _refused(why: str) -> web.Response:
    return web.Response(status=403, text=f"{why}\n", headers=_HEADERS)
