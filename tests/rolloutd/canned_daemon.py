"""A daemon's stand-in for tests of clients: canned answers on a Unix socket, and what was asked.

It speaks HTTP through the standard library and knows nothing of rolloutd.
"""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit


class CannedDaemon:
    """Answers by (method, path); a list of lists is a stream, one connection after the other."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.answers: dict[tuple[str, str], tuple[int, Any]] = {}
        self.streams: dict[str, list[Iterable[dict[str, Any]]]] = {}
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        self.answer("GET", "health", {"runs": {"runners": []}})

    def answer(self, method: str, path: str, body: Any, status: int = 200) -> None:
        """Answer so from now on."""
        self.answers[method, f"/v1/{path}"] = (status, body)

    def refuse(self, method: str, path: str, status: int, error: str, code: str = "no") -> None:
        """Answer with an error from now on."""
        self.answer(method, path, {"error": error, "code": code, "errors": []}, status)


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    canned: CannedDaemon


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def handle_any(self) -> None:
        target = urlsplit(self.path)
        query = dict(parse_qsl(target.query))
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(content) if self.headers.get("Content-Type") == "application/json" else content
        canned = self.server.canned
        canned.requests.append((self.command, target.path, query, body))
        if target.path in canned.streams:
            self._stream(canned.streams[target.path])
            return
        missing = (404, {"error": f"nothing at {target.path}", "code": "not-found", "errors": []})
        status, answer = canned.answers.get((self.command, target.path), missing)
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = do_DELETE = handle_any  # noqa: N815 - http.server looks for these

    def _stream(self, left: list[Iterable[dict[str, Any]]]) -> None:
        """Send the next connection's lines; all but the last connection break off in a line's middle."""
        lines = left.pop(0)
        self.send_response(200)
        self.end_headers()
        for line in lines:
            self.wfile.write(json.dumps(line).encode() + b"\n")
        if left:
            self.wfile.write(b'{"offset":')

    def address_string(self) -> str:
        return "somebody"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class calls it so
        pass


@contextmanager
def serve_canned(socket: Path) -> Iterator[CannedDaemon]:
    """Serve canned answers for as long as the context is open."""
    with _Server(str(socket), _Handler) as server:
        server.canned = CannedDaemon(socket)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server.canned
        finally:
            server.shutdown()
            thread.join()
