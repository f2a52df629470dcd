"""Forwarding of another machine's control socket over ssh.

The daemon sees the account that ssh logged in to, so votes stay personal.  ssh asks
its questions (a password, a new host key) at the first connection; later
reconnections are silent.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rolloutd.cli import exits

CHECK_INTERVAL_S = 2.0
"""Pause between two checks of the connection: short, for laptops that wake up."""

KEEPALIVE_INTERVAL_S = 5
"""Interval of ssh's keepalives; three missing ones end the connection."""

CONNECT_TIMEOUT_S = 15
"""Timeout of the connection to the other machine."""

SSH_TIMEOUT_S = 30.0
"""Timeout of ssh commands that ask no question."""


@contextmanager
def open_tunnel(host: str, remote_socket: str) -> Iterator[Path]:
    """Yield a local socket that forwards to the remote one; raises exits.Exit if ssh cannot connect."""
    directory = Path(tempfile.mkdtemp(prefix="rolloutctl-"))
    stop = threading.Event()
    forward = _SshForward(host, remote_socket, directory)
    reconnector = threading.Thread(target=_keep_connected, args=(forward, stop), name="tunnel", daemon=True)
    try:
        if forward.connect(interactive=True) != 0:
            raise exits.Exit(exits.NO_DAEMON, f"ssh {host}: {forward.log_tail()}")
        reconnector.start()
        yield forward.local_socket
    finally:
        stop.set()
        if reconnector.is_alive():
            # It may be connecting; close() can end only an existing connection.
            reconnector.join(SSH_TIMEOUT_S)
        forward.close()
        shutil.rmtree(directory, ignore_errors=True)


class _SshForward:
    """One ssh connection that forwards the socket, addressed by its control socket."""

    def __init__(self, host: str, remote: str, directory: Path) -> None:
        self.local_socket = directory / "control.sock"
        self._host = host
        self._remote_socket = remote
        self._control_socket = directory / "ssh"
        self._log = directory / "log"

    def connect(self, *, interactive: bool) -> int:
        """Connect in the background and return ssh's exit status."""
        # A killed master leaves its socket, and ssh would not become a master next to it.
        self._control_socket.unlink(missing_ok=True)
        options = {
            "ExitOnForwardFailure": "yes",
            "StreamLocalBindUnlink": "yes",
            "ServerAliveInterval": str(KEEPALIVE_INTERVAL_S),
            "ControlPersist": "no",
            "ConnectTimeout": str(CONNECT_TIMEOUT_S),
            "BatchMode": "no" if interactive else "yes",
        }
        option_arguments = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        forward = f"{self.local_socket}:{self._remote_socket}"
        arguments = ["-fNTM", "-E", str(self._log), *option_arguments, "-L", forward]
        return self._run(arguments, None if interactive else SSH_TIMEOUT_S)

    def is_connected(self) -> bool:
        return self._run(["-O", "check"], SSH_TIMEOUT_S) == 0

    def close(self) -> None:
        """End the connection if there is one."""
        self._run(["-O", "exit"], SSH_TIMEOUT_S)

    def log_tail(self) -> str:
        """Return ssh's last message."""
        lines = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        return next((line for line in reversed(lines) if line.strip()), "it could not connect")

    def _run(self, arguments: list[str], limit_s: float | None) -> int:
        command = ["ssh", "-S", str(self._control_socket), *arguments, "--", self._host]
        quiet = subprocess.DEVNULL
        try:
            return subprocess.run(
                command, stdout=quiet, stderr=quiet, timeout=limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return 255


def _keep_connected(forward: _SshForward, stop: threading.Event) -> None:
    while not stop.wait(CHECK_INTERVAL_S):
        if not forward.is_connected() and not stop.is_set():
            forward.connect(interactive=False)
