"""The API's client over the Unix socket, with the standard library only.

A user waits for each start of the command line, so it imports no event loop, no
HTTP framework and no core.  It does not know what an answer means.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
from collections.abc import Callable, Generator, Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import quote, urlencode

DEFAULT_SOCKET = "/run/rolloutd/control.sock"

REQUEST_TIMEOUT_S = 130.0
"""Timeout of one request: a little more than the server allows a handler (120 s)."""

SILENCE_S = 5.0
"""Time without an answer after which the client says so: a suspended daemon looks like a hanging terminal."""

STREAM_TIMEOUT_S = 45.0
"""Silence after which a stream is lost: three of the server's heartbeats."""

MAX_LINE_BYTES = 16 * 1024 * 1024
"""Bytes of one line of a stream; the longest are audit entries of a submit with 10,000 targets."""

PART_BYTES = 2**16
"""Bytes of lines that are yielded together at most, and read at once: one write of the daemon."""

Query = Mapping[str, str | int | float | bool | None]


class DaemonUnreachable(Exception):
    """No daemon answers at the socket, or it ended during the answer.

    `was_sent` is False if the request never left: then the daemon has done nothing.
    """

    was_sent = True


class StreamInterrupted(DaemonUnreachable):
    """A stream broke before its end; the caller may resume it."""


class ApiError(Exception):
    """The daemon answered with an error; `body` is wire_fleet.Error."""

    def __init__(self, status: int, body: Mapping[str, Any]) -> None:
        super().__init__(str(body.get("error", f"HTTP status {status}")))
        self.status = status
        self.body = body

    @property
    def code(self) -> str:
        return str(self.body.get("code", ""))


def default_socket_path() -> str:
    """Return $ROLLOUTD_SOCKET, else the daemon's default socket."""
    return os.environ.get("ROLLOUTD_SOCKET") or DEFAULT_SOCKET


def api_path(*parts: str) -> str:
    """Return the API path of quoted parts: ("rollouts", "a/b") is `/v1/rollouts/a%2Fb`."""
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._timeout_s)
        try:
            self.sock.connect(self._path)
        except BaseException:
            self.sock.close()
            raise


class Client:
    """Client of one daemon; each call opens a connection, so that a lost one breaks no other.

    Calls raise DaemonUnreachable and ApiError.  `on_silence` gets a sentence while an answer is late.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        on_silence: Callable[[str], None] | None = None,
    ) -> None:
        self.path = os.fspath(path) if path is not None else default_socket_path()
        self.timeout_s = timeout_s
        self._on_silence = on_silence

    def get(self, path: str, query: Query | None = None) -> Any:
        return _decode_json(self._send("GET", path, query, None, ""))

    def post(self, path: str, body: Any = None) -> Any:
        return _decode_json(self._send("POST", path, None, _encode_json(body), "application/json"))

    def put(self, path: str, body: Any = None) -> Any:
        return _decode_json(self._send("PUT", path, None, _encode_json(body), "application/json"))

    def delete(self, path: str, body: Any = None) -> Any:
        return _decode_json(self._send("DELETE", path, None, _encode_json(body), "application/json"))

    def upload(self, path: str, content: bytes, content_type: str = "application/x-tar") -> Any:
        return _decode_json(self._send("POST", path, None, content, content_type))

    def stream(
        self, path: str, query: Query | None = None, *, method: str = "GET", body: Any = None
    ) -> Generator[dict[str, Any], None, None]:
        """Yield the lines of a stream until it ends, without a log's heartbeats.

        Raises StreamInterrupted if it breaks.  Closing the iterator closes the connection.
        """
        with contextlib.closing(self.stream_parts(path, query, method=method, body=body)) as parts:
            for lines in parts:
                yield from lines

    def stream_parts(
        self, path: str, query: Query | None, *, method: str = "GET", body: Any = None
    ) -> Generator[list[dict[str, Any]], None, None]:
        """Yield what `stream` yields, but the lines together that the daemon wrote together."""
        # What comes before the first line may take as long as any other answer.
        connection = _UnixConnection(self.path, STREAM_TIMEOUT_S if body is None else self.timeout_s)
        target, content = _path_with_query(path, query), _encode_json(body)
        try:
            # The response must be closed too: it keeps the socket open after its connection is closed.
            with self._request(connection, method, target, content, "application/json") as response:
                _raise_for_status(response)
                yield from _read_parts(response, self.path)
        finally:
            connection.close()

    def _send(
        self, method: str, path: str, query: Query | None, body: bytes | None, content_type: str
    ) -> bytes:
        connection = _UnixConnection(self.path, self.timeout_s)
        try:
            response = self._request(connection, method, _path_with_query(path, query), body, content_type)
            _raise_for_status(response)
            return response.read()
        except (OSError, HTTPException) as exc:
            raise DaemonUnreachable(
                f"the daemon at {self.path} ended during its answer: {_error_text(exc)}"
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
            unreachable = DaemonUnreachable(f"no daemon answers at {self.path}: {_error_text(exc)}")
            unreachable.was_sent = False
            raise unreachable from exc
        try:
            connection.request(method, target, body=body, headers=headers)
        except OSError as exc:
            # A server that refuses a long body answers before it has read all of it;
            # that answer is more useful than the broken pipe.
            send_error: OSError | None = exc
        else:
            send_error = None
        if self._on_silence and not select.select([connection.sock], [], [], SILENCE_S)[0]:
            self._on_silence(f"the daemon at {self.path} has not answered for {SILENCE_S:g}s; still waiting")
        try:
            return connection.getresponse()
        except (OSError, HTTPException) as exc:
            raise DaemonUnreachable(
                f"the daemon at {self.path} did not answer: {_error_text(send_error or exc)}"
            ) from exc


def _path_with_query(path: str, query: Query | None) -> str:
    pairs = [
        (key, str(value).lower() if isinstance(value, bool) else str(value))
        for key, value in (query or {}).items()
        if value is not None
    ]
    return f"{path}?{urlencode(pairs)}" if pairs else path


def _encode_json(body: Any) -> bytes | None:
    return None if body is None else json.dumps(body, separators=(",", ":")).encode()


def _raise_for_status(response: HTTPResponse) -> None:
    if 200 <= response.status < 300:
        return
    try:
        body = json.loads(response.read())
    except ValueError:
        body = None
    # Another program may own the socket, or a proxy may have answered.
    if not isinstance(body, dict):
        body = {"error": f"{response.status} {response.reason}", "code": "http", "errors": []}
    raise ApiError(response.status, body)


def _decode_json(text: bytes) -> Any:
    try:
        return json.loads(text) if text else None
    except ValueError as exc:
        raise DaemonUnreachable("the answer is not JSON; check that the socket is rolloutd's") from exc


def _read_parts(response: HTTPResponse, path: str) -> Iterator[list[dict[str, Any]]]:
    """Yield the lines that arrive together: of the pieces of a write, only the last one ends a line."""
    received, end = bytearray(), 0
    while True:
        error: Exception | None = None
        try:
            piece = response.read1(PART_BYTES)
        except (OSError, HTTPException) as exc:
            piece, error = b"", exc
        received += piece
        end = max(end, received.rfind(b"\n", len(received) - len(piece)) + 1)
        if end and (not piece or end == len(received) or end >= PART_BYTES):
            yield list(_read_entries(bytes(received[:end]), path))
            del received[:end]
            end = 0
        if error is not None:
            raise StreamInterrupted(f"the stream from {path} broke: {_error_text(error)}") from error
        if len(received) - end > MAX_LINE_BYTES or (received and not piece):
            raise StreamInterrupted(f"the stream from {path} broke in the middle of a line")
        if not piece:
            return


def _read_entries(lines: bytes, path: str) -> Iterator[dict[str, Any]]:
    for line in lines.splitlines():
        try:
            entry = json.loads(line)
        except ValueError as exc:
            raise StreamInterrupted(f"the stream from {path} brought a line that is not JSON") from exc
        if not isinstance(entry, dict):
            raise StreamInterrupted(f"the stream from {path} brought a line that is not an object")
        if entry.get("kind") != "heartbeat":
            yield entry


def _error_text(exc: BaseException) -> str:
    return str(getattr(exc, "strerror", None) or exc) or type(exc).__name__
