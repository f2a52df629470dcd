"""What the service manager and the daemon tell each other: sockets handed over, readiness, status, watchdog.

The protocol is systemd's (sd_notify(3), sd_listen_fds(3)), spoken with the
standard library: datagrams to `$NOTIFY_SOCKET`, descriptors from 3 on.  Without
a manager everything here does nothing, so nobody needs to ask whether there is
one.  It knows no rollout: what is worth a status is said by standing.py.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, MutableMapping

from rolloutd.service.binding import CannotListen, adopt

log = logging.getLogger("rolloutd.service.systemd")

FIRST_DESCRIPTOR = 3
"""Where handed-over descriptors begin (SD_LISTEN_FDS_START)."""

MAX_STATUS = 500
"""Characters of a status: `systemctl status` shows one line, and systemd refuses huge datagrams."""

FEEDS_PER_WATCHDOG = 3
"""How often within the watchdog's limit the loop is made to turn: two turns may be late."""

SEND_TIMEOUT_S = 0.2
"""How long a full queue of the manager is waited for; a lost line of status is no reason to stand still."""


def handed_socket(environ: MutableMapping[str, str] = os.environ) -> socket.socket | None:
    """Return the listening socket that the service manager made for us; None when there is none.

    The variables are removed, so that no run believes they are meant for it.
    Raises CannotListen when more than one socket, or no Unix stream socket, was handed over.
    """
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdecimal() or count == "0":
        return None
    for descriptor in range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(count)):
        os.set_inheritable(descriptor, False)
    if count != "1":
        raise CannotListen(
            f"{count} sockets were handed over, and this daemon listens on one: look at rolloutd.socket"
        )
    return adopt(FIRST_DESCRIPTOR)


class Service:
    """Tells the service manager how the daemon is; does nothing where there is none."""

    def __init__(self, address: str = "", *, watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._status = ""

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> Service:
        """Return the manager that the environment names.

        The variables stay: who else gets the daemon's environment is decided where a run is begun.
        """
        meant = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        span = environ.get("WATCHDOG_USEC", "")
        watchdog_s = int(span) / 1e6 if meant and span.isdecimal() and int(span) else None
        return cls(environ.get("NOTIFY_SOCKET", ""), watchdog_s=watchdog_s)

    @property
    def feed_every_s(self) -> float | None:
        """How often the loop should turn for the watchdog; None when nobody watches."""
        return None if self.watchdog_s is None else self.watchdog_s / FEEDS_PER_WATCHDOG

    def ready(self, status: str) -> None:
        """Say that the daemon does its work (again, after a reload)."""
        self._send(f"READY=1\nSTATUS={self._kept(status)}")

    def reloading(self) -> None:
        """Say that the settings are being read again; `ready` ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        """Say that the daemon ends because it was told to."""
        self._send(f"STOPPING=1\nSTATUS={self._kept(status)}")

    def alive(self) -> None:
        """Feed the watchdog."""
        if self.watchdog_s is not None:
            self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """Say where things stand, in one sentence; the same sentence is not sent twice."""
        before = self._status
        if self._kept(text) != before:
            self._send(f"STATUS={self._status}")

    def _kept(self, text: str) -> str:
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
            log.warning("the service manager at %s cannot be told: %s", self._address, error)
