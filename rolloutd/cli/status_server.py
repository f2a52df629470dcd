"""Server of the rollouts' pages on a loopback port, read-only."""

from __future__ import annotations

import functools
import re
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from rolloutd.cli.output import print_message
from rolloutd.cli.report import render_rollout, render_rollouts
from rolloutd.control.client import ApiError, Client, DaemonUnreachable

REFRESH_S = 10
"""Interval at which a page loads itself again."""

REQUEST_TIMEOUT_S = 10.0
"""Limit of a browser's request, so that a stalled one ends."""


def serve(client: Client, port: int) -> None:
    """Serve pages until interrupted: what the client may read, every browser on this machine may."""
    with ThreadingHTTPServer(("127.0.0.1", port), functools.partial(_PageHandler, client)) as server:
        print_message(f"http://127.0.0.1:{server.server_port}/ shows the rollouts; interrupt to end")
        server.serve_forever()


class _PageHandler(BaseHTTPRequestHandler):
    """Serves the pages; knows two paths and no method that changes anything."""

    timeout = REQUEST_TIMEOUT_S

    def __init__(self, client: Client, *arguments: Any) -> None:
        self._client = client
        super().__init__(*arguments)

    def do_GET(self) -> None:
        # Another name would be a web site that has its own name resolved to this machine.
        if not re.fullmatch(r"(127\.0\.0\.1|localhost)(:\d+)?", self.headers.get("Host", "")):
            self._send(HTTPStatus.FORBIDDEN, "use http://127.0.0.1 or http://localhost")
            return
        try:
            self._send(HTTPStatus.OK, self._render(unquote(self.path.partition("?")[0]).strip("/")))
        except ApiError as refused:
            self._send(HTTPStatus(refused.status), str(refused))
        except DaemonUnreachable as none:
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, f"{none}; what was shown may be old")

    def _render(self, name: str) -> str:
        if name:
            return render_rollout(self._client, name, refresh_s=REFRESH_S)
        return render_rollouts(self._client, refresh_s=REFRESH_S)

    def _send(self, status: HTTPStatus, text: str) -> None:
        is_page = status is HTTPStatus.OK
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"text/{'html' if is_page else 'plain'}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header(
            "Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
        )
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class' name
        """Log nothing: the terminal is the user's."""
