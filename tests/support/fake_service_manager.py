"""A service manager that a test plays, and the real daemon that it keeps."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rolloutd.control.client import Client
from tests.support.forked_process import DAEMON, ForkedProcess, run_forked, start_daemon

LIMIT_S = 120.0
"""A loaded machine starts the daemon late; what is waited for needs a second elsewhere."""


class FakeServiceManager:
    """A service manager's end of the protocol, and a daemon that it keeps."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.messages: list[str] = []
        self.client = Client(directory / "s")
        self._notify_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify_socket.bind(str(directory / "n"))
        self.process: subprocess.Popen[bytes] | ForkedProcess | None = None

    def configure(self, **more: Any) -> None:
        """Write the settings of the daemon."""
        settings = {"state_dir": "state", "socket": "s", "teams": {"infra": {"members": ["root"]}}, **more}
        (self.directory / "config.yaml").write_text(yaml.safe_dump(settings))

    def start(self, *options: str, watchdog_s: float = 3600.0) -> None:
        """Start a daemon that is told of us."""
        environment = {
            **os.environ,
            "NOTIFY_SOCKET": str(self.directory / "n"),
            "WATCHDOG_USEC": str(int(watchdog_s * 1e6)),
        }
        environment.pop("WATCHDOG_PID", None)
        words = ["--config", str(self.directory / "config.yaml"), *options]
        self.process = start_daemon(words, self.directory / "log", environment)

    def wait_for_message(self, wanted: Callable[[str], bool]) -> str:
        """Return the next message that is wanted; all that came before is in `heard`."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if select.select([self._notify_socket], [], [], 1.0)[0]:
                message = self._notify_socket.recv(65536).decode()
                self.messages.append(message)
                if wanted(message):
                    return message
        raise AssertionError(f"not heard; heard was {self.messages}; log:\n{self.log()}")

    def log(self) -> str:
        """Return what the daemon logged."""
        return (self.directory / "log").read_text()

    def signal(self, number: int) -> None:
        """Send the daemon a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> int:
        """Stop the daemon and return its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(LIMIT_S)

    def close(self) -> None:
        """End everything."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._notify_socket.close()

    def run_once(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run a daemon that is expected to end by itself, and return what it said."""
        config = str(self.directory / "config.yaml")
        return run_forked(DAEMON, ["--config", config, *options], timeout_s=LIMIT_S)
