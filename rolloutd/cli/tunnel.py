"""Forwarding of another machine's control socket over ssh.

The daemon sees the account that ssh logged in to, so votes stay personal.  ssh asks
its questions (a password, a new host key) at the first connection; later
reconnections are silent.  The connection stays for a minute after its last use, for the
user's next commands, in a directory that only this user can enter.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
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

SSH_TIMEOUT_S = 30.0
"""Timeout of ssh commands that ask no question."""

KEPT_S = 60
"""How long a connection stays after its last use: the pause between two commands of a person."""


@contextmanager
def open_tunnel(host: str, remote_socket: str) -> Iterator[Path]:
    """Yield a local socket that forwards to the remote one; raises exits.Exit if ssh cannot connect."""
    shared = _shared_directory(host, remote_socket)
    directory = shared or Path(tempfile.mkdtemp(prefix="rolloutctl-"))
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
        if shared is None:
            forward.close()
            shutil.rmtree(directory, ignore_errors=True)


def _shared_directory(host: str, remote_socket: str) -> Path | None:
    """Return the directory of a connection that the user's commands share.

    None if no directory is the user's alone: a process that reaches the socket acts as the user's account.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    top = (
        Path(runtime) / "rolloutctl" if runtime else Path(tempfile.gettempdir()) / f"rolloutctl-{os.getuid()}"
    )
    # A short name, because the path of a socket has at most 107 characters.
    name = hashlib.sha256(f"{host}\0{remote_socket}".encode()).hexdigest()[:16]
    try:
        for directory in (top, top / name):
            directory.mkdir(mode=0o700, exist_ok=True)
            found = directory.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
                return None
    except OSError:
        return None
    return top / name


class _SshForward:
    """One ssh connection that forwards the socket, addressed by its control socket."""

    def __init__(self, host: str, remote: str, directory: Path) -> None:
        self.local_socket = directory / "control.sock"
        self._host = host
        self._remote_socket = remote
        self._control_socket = directory / "ssh"
        self._log = directory / "log"
        self._lock = directory / "lock"

    def connect(self, *, interactive: bool) -> int:
        """Connect in the background, unless another command has, and return ssh's exit status."""
        # One at a time: two commands that begin together share one connection, and one login.
        with self._lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return 0 if self.is_connected() else self._connect(interactive=interactive)

    def _connect(self, *, interactive: bool) -> int:
        # A killed master leaves its socket, and ssh would not become a master next to it.
        self._control_socket.unlink(missing_ok=True)
        options = {
            "ExitOnForwardFailure": "yes",
            "StreamLocalBindUnlink": "yes",
            "ServerAliveInterval": str(KEEPALIVE_INTERVAL_S),
            "ControlPersist": str(KEPT_S),
            "ConnectTimeout": str(CONNECT_TIMEOUT_S),
            "BatchMode": "no" if interactive else "yes",
        }
        option_arguments = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        forward = f"{self.local_socket}:{self._remote_socket}"
        arguments = ["-fNTM", "-E", str(self._log), *option_arguments, "-L", forward]
        return self._run(arguments, None if interactive else SSH_TIMEOUT_S)

    def is_connected(self) -> bool:
        if not self._control_socket.exists():
            return False  # without a process
        return self._run(["-O", "check"], SSH_TIMEOUT_S) == 0

    def close(self) -> None:
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
