"""Another machine's control socket, brought here by ssh and kept here while it is needed.

The daemon sees whom ssh has logged in over there, so votes stay people's own.
Questions of ssh (a password, a new host key) are asked before anything is drawn;
afterwards a lost connection is made anew in silence.
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

LOOK_S = 2.0
"""Between two looks whether the connection stands: soon after a laptop wakes up."""

ALIVE_S = 5
"""Between ssh's own signs of life; three that stay away end the connection."""

CONNECT_LIMIT_S = 15
"""How long the other machine may take to answer at all."""

ANSWER_LIMIT_S = 30.0
"""How long ssh may take without asking anybody anything."""


@contextmanager
def tunnel(host: str, remote: str) -> Iterator[Path]:
    """Yield a socket here that is the one there; raises exits.Stop when ssh cannot connect."""
    directory = Path(tempfile.mkdtemp(prefix="rolloutctl-"))
    over = threading.Event()
    link = _Link(host, remote, directory)
    keeper = threading.Thread(target=_keep, args=(link, over), name="tunnel", daemon=True)
    try:
        if link.connect(asks=True) != 0:
            raise exits.Stop(exits.NO_DAEMON, f"ssh {host}: {link.log_tail()}")
        keeper.start()
        yield link.local
    finally:
        over.set()
        if keeper.is_alive():
            # It may be connecting: what it makes must be there to be ended.
            keeper.join(ANSWER_LIMIT_S)
        link.end()
        shutil.rmtree(directory, ignore_errors=True)


class _Link:
    """One ssh connection that forwards the socket, found again by its control socket."""

    def __init__(self, host: str, remote: str, directory: Path) -> None:
        self.local = directory / "control.sock"
        self._host = host
        self._remote = remote
        self._control = directory / "ssh"
        self._log = directory / "log"

    def connect(self, *, asks: bool) -> int:
        """Connect in the background and return ssh's exit status."""
        # A master that was killed leaves its socket, and beside it the next one would not be a master.
        self._control.unlink(missing_ok=True)
        options = {
            "ExitOnForwardFailure": "yes",
            "StreamLocalBindUnlink": "yes",
            "ServerAliveInterval": str(ALIVE_S),
            "ControlPersist": "no",
            "ConnectTimeout": str(CONNECT_LIMIT_S),
            "BatchMode": "no" if asks else "yes",
        }
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        forward = f"{self.local}:{self._remote}"
        command = ["ssh", "-fNTM", "-E", str(self._log), "-S", str(self._control), *words, "-L", forward]
        limit = None if asks else ANSWER_LIMIT_S
        return self._run([*command, "--", self._host], limit)

    def stands(self) -> bool:
        """Say whether the connection is there."""
        return (
            self._run(["ssh", "-S", str(self._control), "-O", "check", "--", self._host], ANSWER_LIMIT_S) == 0
        )

    def end(self) -> None:
        """End the connection if there is one."""
        self._run(["ssh", "-S", str(self._control), "-O", "exit", "--", self._host], ANSWER_LIMIT_S)

    def log_tail(self) -> str:
        """Return the last thing that ssh has said."""
        said = self._log.read_text(errors="replace").split("\n") if self._log.exists() else []
        return next((line for line in reversed(said) if line.strip()), "it could not connect")

    @staticmethod
    def _run(command: list[str], limit_s: float | None) -> int:
        quiet = subprocess.DEVNULL
        try:
            return subprocess.run(
                command, stdout=quiet, stderr=quiet, timeout=limit_s, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return 255


def _keep(link: _Link, over: threading.Event) -> None:
    while not over.wait(LOOK_S):
        if not link.stands() and not over.is_set():
            link.connect(asks=False)
