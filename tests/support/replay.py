"""A daemon's voice without a daemon: a replayed fleet speaks the API over a real socket.

So the console under test uses its real client.  Used by its tests, its pictures
and its bench.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.replayed import JSON, Fleet, moment

HEARTBEAT_S = 15.0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Voice

    def do_GET(self) -> None:  # noqa: C901 - one row per path
        """Answer a question."""
        fleet, url = self.server.fleet, urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        match [unquote(part) for part in url.path.split("/")[2:]]:
            case ["status"]:
                self._say(fleet.status())
            case ["whoami"]:
                self._say(fleet.me)
            case ["settings"]:
                self._say(fleet.settings())
            case ["health"]:
                self._say(
                    {
                        "version": "0.1.0",
                        "epoch": 1,
                        "pid": 4711,
                        "since": moment(fleet.began),
                        "observe_only": False,
                        "trouble": None,
                    }
                )
            case ["locks"]:
                self._say(fleet.locks())
            case ["rollouts"]:
                self._say({"rollouts": []})
            case ["audit"]:
                after, limit = int(query.get("after", 0)), int(query.get("limit", 1000))
                found = [
                    {"seq": e["seq"], "hash": "", "entry": e} for e in fleet.entries if e["seq"] > after
                ][:limit]
                self._say({"entries": found, "next": None})
            case ["audit", "verify"]:
                self._say(
                    {
                        "ok": True,
                        "entries": fleet.seq,
                        "head": "",
                        "first_bad": None,
                        "message": f"{fleet.seq} entries, each one hashed over the one before",
                    }
                )
            case ["rollouts", _]:
                self._say(fleet.rollout())
            case ["rollouts", _, "plan"]:
                self._say(fleet.plan())
            case ["rollouts", _, "nodes"]:
                self._say(fleet.all_nodes())
            case ["rollouts", _, "nodes", name]:
                self._say(fleet.detail(name))
            case ["rollouts", _, "nodes", name, "log"]:
                self._stream(iter(fleet.logs.get(name, [])))
            case ["events"]:
                self.server.followed.append(int(query["after"]))
                self._stream(self._events(int(query["after"])))
            case _:
                self._say({"error": f"no {url.path}", "code": "not-found", "errors": []}, 404)

    def do_POST(self) -> None:
        """Take an order."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        fleet = self.server.fleet
        fleet.calls.append((self.command, unquote(self.path), body))
        if fleet.refusal is not None:
            self._say(fleet.refusal[1], fleet.refusal[0])
            return
        self.server.ordered(self.command, unquote(self.path), body)
        self._say({})

    do_PUT = do_POST  # noqa: N815 - the base class names them so
    do_DELETE = do_POST  # noqa: N815

    def _say(self, body: JSON, status: int = 200) -> None:
        said = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def _events(self, after: int) -> Iterator[JSON]:
        fleet = self.server.fleet
        progress = -1
        while True:
            with fleet.changed:
                fleet.changed.wait_for(partial(self._is_news, after, progress), HEARTBEAT_S)
                if self.server.over:
                    return
                told = fleet.entries[after : after + 2_000]
                works = (
                    [{**each, "rollout": fleet.id} for each in fleet.in_flight()]
                    if self.server.progress != progress
                    else None
                )
                progress = self.server.progress
            for entry in told:
                yield {"seq": entry["seq"], "entry": entry}
            after += len(told)
            if works is not None:
                yield {"seq": None, "progress": works}
            elif not told:
                yield {"seq": None, "heartbeat": after}

    def _is_news(self, after: int, progress: int) -> bool:
        return self.server.fleet.seq > after or self.server.progress != progress or self.server.over

    def _stream(self, lines: Iterator[JSON]) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            for line in lines:
                self.wfile.write(json.dumps(line).encode() + b"\n")
        except OSError:
            return

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class Voice(ThreadingMixIn, UnixStreamServer):
    """Serves a fleet at a Unix socket until it is closed."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self, fleet: Fleet, path: Path, ordered: Callable[[str, str, JSON], None] = lambda *_: None
    ) -> None:
        self.fleet = fleet
        self.over = False
        self.progress = 0
        self.followed: list[int] = []
        self.ordered = ordered
        super().__init__(str(path), _Handler)
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    def progressed(self) -> None:
        """Tell every stream what runs now."""
        with self.fleet.changed:
            self.progress += 1
            self.fleet.changed.notify_all()

    def close(self) -> None:
        """End every stream and answer no more."""
        with self.fleet.changed:
            self.over = True
            self.fleet.changed.notify_all()
        self.shutdown()
        self.server_close()
        self._thread.join()
        Path(str(self.server_address)).unlink(missing_ok=True)

    def handle_error(self, *_: Any) -> None:
        """A console that goes away is no error."""
