"""A daemon's voice without a daemon: a replayed fleet speaks the API over a real socket.

So the console under test uses its real client.  Used by its tests, its pictures
and its bench.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from rolloutd.control.status_changes import difference
from tests.support.replayed_fleet import JSON, ReplayedFleet, format_rfc3339

HEARTBEAT_S = 15.0
STATUS_INTERVAL_S = 0.05


RUNNERS = [
    {"name": "fra", "text": "site=fra: 3 of at most 20 runs active, 0 nodes waiting"},
    {"name": "local", "text": "all other nodes: 0 of at most 4 runs active, 0 nodes waiting"},
]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ReplayServer

    def do_GET(self) -> None:  # noqa: C901 - one row per path
        """Answer a question."""
        fleet, url = self.server.fleet, urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        self.server.before_read(url.path)
        match [unquote(part) for part in url.path.split("/")[2:]]:
            case ["status"]:
                self._send_json(fleet.status())
            case ["whoami"]:
                self._send_json(fleet.whoami)
            case ["settings"]:
                self._send_json(fleet.settings())
            case ["health"]:
                self._send_json(
                    {
                        "version": "0.1.0",
                        "epoch": 1,
                        "pid": 4711,
                        "since": format_rfc3339(fleet.began),
                        "observe_only": False,
                        "trouble": None,
                        "runs": {"runners": RUNNERS},
                    }
                )
            case ["locks"]:
                self._send_json(fleet.locks())
            case ["rollouts"]:
                self._send_json({"rollouts": []})
            case ["audit"]:
                self._send_json(fleet.audit(query))
            case ["audit", "head"]:
                self._send_json({"seq": fleet.seq, "hash": "0" * 64, "at": None})
            case ["audit", "verify"]:
                self._send_json(
                    {
                        "ok": True,
                        "entries": fleet.seq,
                        "head": "",
                        "first_bad": None,
                        "message": f"{fleet.seq} entries, each one hashed over the one before",
                    }
                )
            case ["rollouts", name, *_] if name in fleet.deleted:
                self._send_json({"error": f"no rollout {name}", "code": "not-found", "errors": []}, 404)
            case ["rollouts", _]:
                self._send_json(fleet.rollout())
            case ["rollouts", _, "plan"]:
                self._send_json(fleet.plan())
            case ["handover"]:
                fleet.asked_since.append(query["since"])
                self._send_json(fleet.handover(query["since"]))
            case ["nodes", _, "configuration"]:
                self._send_json(fleet.configuration)
            case ["nodes", name, "shell"]:
                self._send_json({"node": name, "command": fleet.shell})
            case ["inventory"]:
                self._send_json(fleet.inventory)
            case ["inventory", name]:
                self._send_json({"node": {"node": name}, "pinned": {}, "reports": []})
            case ["verdicts"]:
                self._send_json({"verdicts": fleet.verdicts})
            case ["rollouts", name, "prepare"]:
                self._send_json({"rollout": name, "preparations": fleet.preparations})
            case ["changes"]:
                self._send_json(fleet.changes)
            case ["rollouts", _, "comparison"]:
                self._send_json(fleet.comparison)
            case ["rollouts", _, "forecast"]:
                self._send_json(fleet.forecast)
            case ["rollouts", _, "review"]:
                self._send_json(fleet.review)
            case ["rollouts", _, "failures"] if fleet.failures_error is not None:
                self._send_json(*fleet.failures_error)
            case ["rollouts", _, "failures"]:
                self._send_json(fleet.failures())
            case ["rollouts", _, "nodes"]:
                self._send_json(fleet.all_nodes(query))
            case ["rollouts", _, "nodes", name]:
                self._send_json(fleet.detail(name))
            case ["rollouts", _, "nodes", name, "log"]:
                self._stream(iter(fleet.logs.get(name, [])))
            case ["events"]:
                self.server.stream_offsets.append(int(query["after"]))
                self._stream(self._events(int(query["after"])))
            case _:
                self._send_json({"error": f"no {url.path}", "code": "not-found", "errors": []}, 404)

    def do_POST(self) -> None:
        """Take an order."""
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        fleet = self.server.fleet
        fleet.requests.append((self.command, unquote(self.path), body))
        if fleet.error_response is not None:
            self._send_json(fleet.error_response[1], fleet.error_response[0])
            return
        self.server.on_command(self.command, unquote(self.path), body)
        *_, node, last = self.path.split("/")
        self._send_json({"node": node, "command": fleet.shell} if last == "shell" else {})

    do_PUT = do_POST  # noqa: N815 - the base class names them so
    do_DELETE = do_POST  # noqa: N815

    def _send_json(self, body: JSON, status: int = 200) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def _events(self, after: int) -> Iterator[JSON | bytes]:
        fleet, before = self.server.fleet, None
        progress = -1
        while True:
            with fleet.changed:
                fleet.changed.wait_for(partial(self._has_news, after, progress), HEARTBEAT_S)
                if self.server.is_closed:
                    return
                entries = fleet.entries[after : after + 2_000]
                status = fleet.status() if self._has_news(after, progress) else None
                progress = self.server.progress
            while self.server.broken_lines:
                yield self.server.broken_lines.pop()
            for entry in entries:
                yield {"seq": entry["seq"], "entry": entry}
            after += len(entries)
            if status is not None:
                self.server.status_version += 1
                line: JSON = {"seq": None, "version": self.server.status_version}
                is_change = self.server.sends_changes and before is not None
                yield line | (
                    {"change": difference(before or {}, status)} if is_change else {"status": status}
                )
                before = copy.deepcopy(status) if self.server.sends_changes else None
                with fleet.changed:  # between two statuses, as the daemon
                    fleet.changed.wait_for(lambda: self.server.is_closed, STATUS_INTERVAL_S)
            elif not entries:
                yield {"seq": None, "heartbeat": after}

    def _has_news(self, after: int, progress: int) -> bool:
        return self.server.fleet.seq > after or self.server.progress != progress or self.server.is_closed

    def _stream(self, lines: Iterator[JSON | bytes]) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            for line in lines:
                self.wfile.write(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")
        except OSError:
            return

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class ReplayServer(ThreadingMixIn, UnixStreamServer):
    """Serves a fleet at a Unix socket until it is closed."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self, fleet: ReplayedFleet, path: Path, on_command: Callable[[str, str, JSON], None] = lambda *_: None
    ) -> None:
        self.fleet = fleet
        self.is_closed = False
        self.progress = 0
        self.stream_offsets: list[int] = []
        self.broken_lines: list[bytes] = []
        self.sends_changes = False
        self.status_version = 0
        self.on_command = on_command
        self.before_read: Callable[[str], None] = lambda _path: None
        super().__init__(str(path), _Handler)
        self._thread = threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        )
        self._thread.start()

    def push_progress(self) -> None:
        """Tell every stream what runs now."""
        with self.fleet.changed:
            self.progress += 1
            self.fleet.changed.notify_all()

    def close(self) -> None:
        """End every stream and answer no more."""
        with self.fleet.changed:
            self.is_closed = True
            self.fleet.changed.notify_all()
        self.shutdown()
        self.server_close()
        self._thread.join()
        Path(str(self.server_address)).unlink(missing_ok=True)

    def handle_error(self, *_: Any) -> None:
        """A console that goes away is no error."""
