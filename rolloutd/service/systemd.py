"""The systemd protocol: inherited sockets, readiness, status, watchdog.

sd_notify(3) and sd_listen_fds(3) with the standard library: datagrams to `$NOTIFY_SOCKET`, descriptors from 3
on.  Without a service manager everything here does nothing.  It does not know rollouts:
service_manager.py writes the status.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, MutableMapping

from rolloutd.service.listen_socket import CannotListen, adopt_socket

log = logging.getLogger(__name__)

FIRST_DESCRIPTOR = 3
"""The first inherited descriptor (SD_LISTEN_FDS_START)."""

MAX_STATUS = 500
"""Characters of a status: `systemctl status` shows one line, and systemd refuses huge datagrams."""

PINGS_PER_WATCHDOG = 3
"""Iterations of the loop per watchdog timeout: two may be late."""

SEND_TIMEOUT_S = 0.2
"""How long to wait for the manager's full queue; a lost status line must not block the daemon."""


def inherited_socket(environ: MutableMapping[str, str] = os.environ) -> socket.socket | None:
    """Return the listening socket from the service manager; None when there is none.

    The variables are removed, so that no child process uses them.  Raises CannotListen for more
    than one socket, or anything but a Unix stream socket.
    """
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal() or count == "0":
        return None
    for descriptor in range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(count)):
        # A run that inherited the socket would keep it open after the daemon's end.
        os.set_inheritable(descriptor, False)
    if count != "1":
        raise CannotListen(
            f"{count} sockets were handed over, and this daemon listens on one: look at rolloutd.socket"
        )
    return adopt_socket(FIRST_DESCRIPTOR)


class SystemdNotifier:
    """Reports the daemon's state to the service manager; does nothing without one."""

    def __init__(self, address: str = "", *, watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._status = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> SystemdNotifier:
        """Return the notifier of the manager that the environment names.

        The variables stay in the environment; the runner decides which of them a run inherits.
        """
        is_for_us = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        span = environ.get("WATCHDOG_USEC", "")
        watchdog_s = int(span) / 1e6 if is_for_us and span.isdecimal() and int(span) else None
        return cls(environ.get("NOTIFY_SOCKET", ""), watchdog_s=watchdog_s)

    @property
    def watchdog_ping_interval_s(self) -> float | None:
        """How often the loop should iterate for the watchdog (seconds); None without a watchdog."""
        return None if self.watchdog_s is None else self.watchdog_s / PINGS_PER_WATCHDOG

    def notify_ready(self, status: str) -> None:
        """Report that the daemon works, also after a reload."""
        self._send(f"READY=1\nSTATUS={self._remember_status(status)}")

    def notify_reloading(self) -> None:
        """Report that a reload began; notify_ready() ends it."""
        # systemd requires the instant with RELOADING=1 (Type=notify-reload).
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def notify_stopping(self, status: str) -> None:
        """Report that the daemon stops because it was asked to."""
        self._send(f"STOPPING=1\nSTATUS={self._remember_status(status)}")

    def ping_watchdog(self) -> None:
        if self.watchdog_s is not None:
            self._send("WATCHDOG=1")

    def set_status(self, text: str) -> None:
        """Report the status in one sentence; an unchanged one is not sent again."""
        before = self._status
        if self._remember_status(text) != before:
            self._send(f"STATUS={self._status}")

    def _remember_status(self, text: str) -> str:
        self._status = " ".join(text.split())[:MAX_STATUS]
        return self._status

    def _send(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.settimeout(SEND_TIMEOUT_S)
                sock.connect(self._address)
                sock.sendall(message.encode("utf-8", "replace"))
        except OSError as error:
            log.warning("the service manager at %s cannot be reached: %s", self._address, error)
