"""Speaks to the daemon over its Unix socket, with the standard library alone.

The command line's start-up time is somebody's waiting time, so nothing heavy is
imported here: no event loop, no HTTP framework, no core.  It knows how to ask
and how an answer is told from a refusal; what an answer means is its caller's.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Generator, Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import quote, urlencode

DEFAULT_SOCKET = "/run/rolloutd/control.sock"

TIMEOUT_S = 130.0
"""Patience for one answer: a little more than the server allows its slowest handler (120 s)."""

STREAM_TIMEOUT_S = 45.0
"""Silence that means the stream is lost: three of the server's heartbeats."""

LONGEST_LINE = 16 * 1024 * 1024
"""Bytes of one line of a stream; the longest are audit entries of a submit with 10,000 targets."""

Query = Mapping[str, str | int | float | bool | None]


class NoDaemon(Exception):
    """Nobody answers at the socket, or whoever did went away in the middle."""


class StreamLost(NoDaemon):
    """A stream broke off before its end; the caller may resume it where it stood."""


class Answer(Exception):
    """The daemon answered, and the answer is not a success; `body` is wire.Error."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        super().__init__(str(body.get("error", f"HTTP status {status}")))
        self.status = status
        self.body = body

    @property
    def code(self) -> str:
        """The short name of the refusal, for programs."""
        return str(self.body.get("code", ""))


def default_socket() -> str:
    """Return the socket that is asked when none is named: $ROLLOUTD_SOCKET, else the daemon's default."""
    return os.environ.get("ROLLOUTD_SOCKET") or DEFAULT_SOCKET


def path_of(*parts: str) -> str:
    """Return the API path of these parts, each quoted: ("rollouts", "a/b") is `/v1/rollouts/a%2Fb`."""
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


class _UnixConnection(HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        """Connect to the socket's path instead of a host."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._timeout_s)
        try:
            self.sock.connect(self._path)
        except BaseException:
            self.sock.close()
            raise


class Client:
    """Asks one daemon; every call is a connection of its own, so that a lost one harms no other."""

    def __init__(self, path: str | os.PathLike[str] | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self.path = os.fspath(path) if path is not None else default_socket()
        self.timeout_s = timeout_s

    def get(self, path: str, query: Query | None = None) -> Any:
        """Return the body of the answer; raises NoDaemon, Answer."""
        return _decoded(self._ask("GET", path, query, None, ""))

    def text(self, path: str, query: Query | None = None) -> str:
        """Return the answer's body undecoded, where decoding it in one go would keep others waiting."""
        return self._ask("GET", path, query, None, "").decode()

    def post(self, path: str, body: Any = None) -> Any:
        """Send a JSON body and return the answer's; raises NoDaemon, Answer."""
        return _decoded(self._ask("POST", path, None, _encoded(body), "application/json"))

    def put(self, path: str, body: Any = None) -> Any:
        """Send a JSON body and return the answer's; raises NoDaemon, Answer."""
        return _decoded(self._ask("PUT", path, None, _encoded(body), "application/json"))

    def delete(self, path: str, body: Any = None) -> Any:
        """Send a JSON body, if there is one, and return the answer's; raises NoDaemon, Answer."""
        return _decoded(self._ask("DELETE", path, None, _encoded(body), "application/json"))

    def upload(self, path: str, content: bytes, content_type: str = "application/x-tar") -> Any:
        """Send bytes and return the answer's body; raises NoDaemon, Answer."""
        return _decoded(self._ask("POST", path, None, content, content_type))

    def stream(self, path: str, query: Query | None = None) -> Generator[dict[str, Any], None, None]:
        """Yield the lines of a stream until it ends; a log's heartbeats are left out.

        Raises NoDaemon and Answer when it does not begin, StreamLost when it
        breaks off.  Closing the iterator closes the connection.
        """
        connection = self._connection(STREAM_TIMEOUT_S)
        try:
            # The response keeps the socket open after its connection was closed.
            with self._request(connection, "GET", _target(path, query), None, "") as response:
                _refuse(response)
                yield from _lines(response, self.path)
        finally:
            connection.close()

    def _connection(self, timeout_s: float) -> _UnixConnection:
        return _UnixConnection(self.path, timeout_s)

    def _ask(
        self, method: str, path: str, query: Query | None, body: bytes | None, content_type: str
    ) -> bytes:
        connection = self._connection(self.timeout_s)
        try:
            response = self._request(connection, method, _target(path, query), body, content_type)
            _refuse(response)
            return response.read()
        except (OSError, HTTPException) as exc:
            raise NoDaemon(
                f"the daemon at {self.path} went away in the middle of its answer: {_said(exc)}"
            ) from exc
        finally:
            connection.close()

    def _request(
        self, connection: _UnixConnection, method: str, target: str, body: bytes | None, content_type: str
    ) -> HTTPResponse:
        headers = {"Accept": "application/json"}
        if body is not None:
            headers["Content-Type"] = content_type
        try:
            connection.connect()
        except (OSError, ValueError) as exc:
            raise NoDaemon(f"no daemon answers at {self.path}: {_said(exc)}") from exc
        try:
            connection.request(method, target, body=body, headers=headers)
        except OSError as exc:
            # A server that refuses a long body answers before it has read it all;
            # that answer says more than our broken pipe.
            broken: OSError | None = exc
        else:
            broken = None
        try:
            return connection.getresponse()
        except (OSError, HTTPException) as exc:
            raise NoDaemon(f"the daemon at {self.path} did not answer: {_said(broken or exc)}") from exc


def _target(path: str, query: Query | None) -> str:
    pairs = [(key, _text(value)) for key, value in (query or {}).items() if value is not None]
    return f"{path}?{urlencode(pairs)}" if pairs else path


def _text(value: str | float | bool | None) -> str:
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def _encoded(body: Any) -> bytes | None:
    return None if body is None else json.dumps(body, separators=(",", ":")).encode()


def _refuse(response: HTTPResponse) -> None:
    if 200 <= response.status < 300:
        return
    try:
        body = json.loads(response.read())
    except ValueError:
        body = None
    if not isinstance(body, dict):
        body = {"error": f"{response.status} {response.reason}", "code": "http", "errors": []}
    raise Answer(response.status, body)


def _decoded(text: bytes) -> Any:
    try:
        return json.loads(text) if text else None
    except ValueError as exc:
        raise NoDaemon("the answer is no JSON: is that socket rolloutd's?") from exc


def _lines(response: HTTPResponse, path: str) -> Iterator[dict[str, Any]]:
    while True:
        try:
            line = response.readline(LONGEST_LINE)
        except (OSError, HTTPException) as exc:
            raise StreamLost(f"the stream from {path} broke off: {_said(exc)}") from exc
        if not line:
            return
        if not line.endswith(b"\n"):
            raise StreamLost(f"the stream from {path} broke off in the middle of a line")
        entry = json.loads(line)
        if entry.get("kind") != "heartbeat":
            yield entry


def _said(exc: BaseException) -> str:
    return str(getattr(exc, "strerror", None) or exc) or type(exc).__name__
