"""A web server for the console, on loopback, behind a one-time address.

A browser with the session cookie acts as the user who runs this server.  So the
server listens on 127.0.0.1 only, accepts requests for that host only, and issues
one cookie.  Each tab runs the console in a process of its own.
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

MAX_TABS = 8
"""Consoles at once, about 60 MiB each."""

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "font-src 'self' data:; img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; base-uri 'none'"
)


def serve(socket_path: str, port: int, display_args: Sequence[str] = ()) -> int:
    """Serve until interrupted; return 1 if the port is in use."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
        listening.listen()  # before the address is printed, so that an early request waits and is not refused
    except OSError as taken:
        print(f"{HOST}:{port}: {taken.strerror}", file=sys.stderr)  # noqa: T201
        return 1
    command = shlex.join([sys.executable, "-P", "-m", "tui", "--socket", socket_path, *display_args])
    server = LocalServer(command, listening.getsockname()[1])
    web.run_app(server.build_application(), sock=listening, print=None, access_log=None)
    return 0


class LocalServer(Server):
    """textual-serve's server behind a one-time address."""

    def __init__(self, command: str, port: int) -> None:
        super().__init__(command, host=HOST, port=port, title="rolloutd")
        # A browser sends a cookie to all ports of a host: two consoles must not replace each other's.
        self._cookie_name = f"rolloutd-console-{port}"
        self._allowed_hosts = {f"{HOST}:{port}", f"localhost:{port}"}
        self._one_time_token: str | None = secrets.token_urlsafe(32)
        self._session_secret = secrets.token_urlsafe(32)
        self._open_tabs = 0

    async def build_application(self) -> web.Application:
        application = await self._make_app()
        application.middlewares.append(self._authenticate)
        application.router.add_get("/page.js", self._handle_script)
        return application

    async def on_startup(self, app: web.Application) -> None:
        url = f"{self.public_url}/?token={self._one_time_token}"
        print(f"open this address in a browser on this machine; it works once:\n  {url}", flush=True)  # noqa: T201
        print("press Ctrl-C to stop the server", file=sys.stderr, flush=True)  # noqa: T201

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.host not in self._allowed_hosts:
            return _forbidden("this server accepts requests for 127.0.0.1 only")
        if self._consume_token(request):
            redirect = web.Response(status=303, headers={"Location": "/", **_SECURITY_HEADERS})
            redirect.set_cookie(
                self._cookie_name, self._session_secret, httponly=True, samesite="Strict", path="/"
            )
            return redirect
        if not _is_secret(request.cookies.get(self._cookie_name, ""), self._session_secret):
            return _forbidden("address: already used; run rolloutctl web again")
        origin = request.headers.get("Origin")
        if origin is not None and origin.removeprefix("http://") not in self._allowed_hosts:
            return _forbidden("origin: another site; open the page of this server")
        response = await handler(request)
        if not response.prepared:
            response.headers.update(_SECURITY_HEADERS)
        return response

    def _consume_token(self, request: web.Request) -> bool:
        given = request.query.get("token", "")
        if self._one_time_token is None or not _is_secret(given, self._one_time_token):
            return False
        self._one_time_token = None
        return True

    async def handle_index(self, request: web.Request) -> web.Response:
        page = (resources.files("tui.connection") / "page.html").read_text()
        websocket = f"ws://{request.host}/ws"
        return web.Response(text=page.replace("WEBSOCKET", websocket), content_type="text/html")

    async def _handle_script(self, request: web.Request) -> web.Response:
        script = (resources.files("tui.connection") / "page.js").read_text()
        return web.Response(text=script, content_type="text/javascript")

    async def handle_websocket(self, request: web.Request) -> Any:
        if self._open_tabs >= MAX_TABS:
            return _forbidden(f"{MAX_TABS} consoles are open; close one")
        self._open_tabs += 1
        try:
            return await super().handle_websocket(request)
        finally:
            self._open_tabs -= 1


_SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def _is_secret(given: str, secret: str) -> bool:
    # As bytes: of texts, compare_digest takes ASCII only.
    return hmac.compare_digest(given.encode(errors="replace"), secret.encode())


def _forbidden(reason: str) -> web.Response:
    return web.Response(status=403, text=f"{reason}\n", headers=_SECURITY_HEADERS)
