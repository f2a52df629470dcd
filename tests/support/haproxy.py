"""A real HAProxy on loopback ports, for tests that need a balancer.

It neither retries nor redispatches, so every cut session is a client's error.  It knows neither pytest nor
rolloutd.
"""

from __future__ import annotations

import contextlib
import csv
import select
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tests.support.ports import free_port

HAPROXY = "/usr/sbin/haproxy"

START_TRIES = 20
"""Another test may take a port between our choice and HAProxy's bind; it is chosen again."""

START_LIMIT_S = 60.0
"""A loaded machine starts HAProxy late; a machine that needs longer than this is broken."""

_CONFIG = """\
global
  stats socket {dir}/admin.sock level {level}
  stats socket ipv4@127.0.0.1:{admin_port} level {level}
  maxconn 4000
defaults
  mode http
  timeout connect 5s
  timeout client 300s
  timeout server 300s
  retries 0
  no option redispatch
frontend web
  bind 127.0.0.1:{port}
  default_backend web
backend web
  balance roundrobin
{servers}
"""


class Haproxy:
    """One HAProxy with a frontend and a backend `web`; `servers` are ports by name, `more` ends its file."""

    def __init__(
        self, directory: Path, servers: Mapping[str, int], *, level: str = "admin", more: str = ""
    ) -> None:
        self.directory = directory
        self.servers = servers
        self.level = level
        self.more = more
        self.port = 0
        self.admin_port = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        """The Unix socket of the Runtime API."""
        return self.directory / "admin.sock"

    def start(self) -> Haproxy:
        """Start and return self once it answers; a later start takes the same ports."""
        self.directory.mkdir(parents=True, exist_ok=True)
        for _ in range(START_TRIES):
            ports = (self.port, self.admin_port) if self.port else (free_port(), free_port())
            if self._try_start(*ports):
                self.port, self.admin_port = ports
                return self
        raise RuntimeError(f"haproxy did not start: {self.log_file.read_text()}")

    def stop(self) -> None:
        """End it with all its sessions; safe to repeat."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def hide_socket(self) -> None:
        """Take the Unix socket away, as if the balancer were gone; clients are served all the same."""
        self.socket.rename(self.socket.with_name("hidden.sock"))

    def show_socket(self) -> None:
        """Undo `hide_socket`."""
        self.socket.with_name("hidden.sock").rename(self.socket)

    def command(self, line: str) -> str:
        """Return the answer of the Runtime API to one line."""
        with socket.create_connection(("127.0.0.1", self.admin_port)) as connection:
            connection.sendall(line.encode() + b"\n")
            with connection.makefile("r") as answer:
                return answer.read()

    def admin_states(self) -> dict[str, tuple[int, int]]:
        """Return each server's admin state, as a bit mask, and its weight."""
        lines = self.command("show servers state web").splitlines()[1:]
        rows = csv.DictReader([line.removeprefix("# ") for line in lines if line], delimiter=" ")
        return {row["srv_name"]: (int(row["srv_admin_state"]), int(row["srv_uweight"])) for row in rows}

    def statistics(self) -> dict[str, dict[str, str]]:
        """Return the statistics of each server of `web`."""
        answer = self.command("show stat -1 4 -1").removeprefix("# ")
        rows = csv.DictReader(answer.strip().splitlines())
        return {row["svname"]: row for row in rows if row["pxname"] == "web"}

    @property
    def log_file(self) -> Path:
        """What HAProxy wrote: each change of a server's state, among others."""
        return self.directory / "haproxy.log"

    def _try_start(self, port: int, admin_port: int) -> bool:
        servers = "\n".join(
            f"  server {name} 127.0.0.1:{number} weight 40" for name, number in self.servers.items()
        )
        config = self.directory / "haproxy.cfg"
        text = _CONFIG.format(
            dir=self.directory, level=self.level, port=port, admin_port=admin_port, servers=servers
        )
        config.write_text(text + self.more)
        with self.log_file.open("ab") as log:
            process = subprocess.Popen(
                [HAPROXY, "-db", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and process.poll() is None:
            # The port alone proves nothing: a test run at the same time may have taken it first.
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as admin:
                admin.connect(str(self.socket))
                socket.create_connection(("127.0.0.1", admin_port)).close()
                self._process = process
                return True
            select.select([], [], [], 0.005)
        process.kill()
        process.wait()
        return False
