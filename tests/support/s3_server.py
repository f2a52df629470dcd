"""A real S3 server on loopback (`rclone serve s3`), and a faulty one before it."""

from __future__ import annotations

import http.client
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rolloutd.settings.shared_files import S3Files

START_LIMIT_S = 60.0

ACCESS_KEY, SECRET_KEY = "daemon", "secret-of-the-bucket"


@dataclass(frozen=True)
class Bucket:
    """A bucket of one test, whose objects are the files of a directory."""

    endpoint: str
    name: str
    directory: Path
    credentials_file: Path

    def settings(self, **changes: Any) -> S3Files:
        given = {"bucket": self.name, "endpoint": self.endpoint}
        given["credentials_file"] = str(self.credentials_file)
        return S3Files.model_validate({**given, **changes})

    def at(self, endpoint: str) -> Bucket:
        return replace(self, endpoint=endpoint)

    def write_credentials(self, key: str = ACCESS_KEY, secret: str = SECRET_KEY) -> None:
        text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
        self.credentials_file.write_text(text)
        self.credentials_file.chmod(0o600)


class S3Server:
    """The running server; it verifies signatures, version 4."""

    def __init__(self, directory: Path, endpoint: str) -> None:
        self.endpoint = endpoint
        self._directory = directory
        self._numbers = itertools.count(1)

    def make_bucket(self) -> Bucket:
        name = f"bucket-{next(self._numbers)}"
        served = self._directory / "served" / name
        served.mkdir()
        bucket = Bucket(self.endpoint, name, served, self._directory / f"{name}.credentials")
        bucket.write_credentials()
        return bucket


@contextmanager
def running_s3_server(prefix: Sequence[str] = (), address: str = "127.0.0.1") -> Iterator[S3Server]:
    """A server and its files; `prefix` is a command that starts it, such as one that enters a namespace."""
    directory = Path(tempfile.mkdtemp(prefix="s3-"))
    log = directory / "log"
    (directory / "served").mkdir()
    program = Path(sys.executable).with_name("rclone")
    options = ("--addr", f"{address}:0", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}")
    # What a test changes in a bucket's directory is seen at once.  With no time at all, rclone's timers may
    # clean up after each other without end, at the cost of two cores.
    options += ("--vfs-cache-mode", "off", "--dir-cache-time", "1ms", "--config", str(directory / "none"))
    with log.open("wb") as file:
        server = subprocess.Popen(
            [
                *prefix,
                "setpriv",
                "--pdeathsig",
                "KILL",
                program,
                "serve",
                "s3",
                *options,
                directory / "served",
            ],
            stdout=file,
            stderr=file,
            env={**os.environ, "HOME": str(directory)},
        )
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not (endpoint := re.search(rf"http://{re.escape(address)}:\d+", log.read_text())):
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        yield S3Server(directory, endpoint[0])
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(directory)


class Fault(Enum):
    """What becomes of an answer."""

    CUT = "the connection ends before the last byte"
    SHORT = "the body and its length lack the last byte"
    ALTERED = "one bit of the body is another"
    SILENCE = "there is none, until the server stops"


class FaultyServer:
    """Forwards requests to a real server; `fault` spoils answers to GET, `answer` is given instead."""

    def __init__(self, endpoint: str) -> None:
        self.target = endpoint.removeprefix("http://")
        self.fault: Fault | None = None
        self.answer: tuple[int, str] | None = None
        self.requests = 0
        self.stopped = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()


def _handler(faulty: FaultyServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            faulty.requests += 1
            content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if faulty.answer is not None:
                status, code = faulty.answer
                body = f"<Error><Code>{code}</Code><Message>refused</Message></Error>".encode()
                self.give(status, {}, body)
                return
            connection = http.client.HTTPConnection(faulty.target)
            # The host is signed: the real server must see the one that the client sees.
            connection.request(self.command, self.path, content or None, dict(self.headers))
            answer = connection.getresponse()
            body = answer.read()
            headers = {k: v for k, v in answer.getheaders() if k.lower() not in ("content-length", "date")}
            connection.close()
            self.give(answer.status, headers, body, "list-type" in self.path or self.command != "GET")

        def give(self, status: int, headers: dict[str, str], body: bytes, is_whole: bool = True) -> None:
            fault, size = None if is_whole else faulty.fault, len(body)
            if fault is Fault.SILENCE:
                faulty.stopped.wait()
            if fault is Fault.ALTERED:
                body = body[:-1] + bytes([body[-1] ^ 1])
            if fault in (Fault.CUT, Fault.SHORT):
                body = body[:-1]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) if fault is Fault.SHORT else size))
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = fault is not None

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Nothing is written among the tests' lines."""

    for method in ("GET", "PUT", "POST", "DELETE", "HEAD"):
        setattr(Handler, f"do_{method}", Handler.forward)
    return Handler
