"""A real OpenSSH server on a loopback port, for tests that need a node.

Each server has a directory of its own with its host key, one client key and a
known_hosts file that names it, so nothing of the machine's own ssh setup is
read or written.  Every process that a login of it starts carries the server's
mark in its environment; `stop` ends them all, also those that left their
session.  It knows neither pytest nor rolloutd.
"""

from __future__ import annotations

import os
import pwd
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

SSHD = "/usr/sbin/sshd"
MARK = "ROLLOUTD_TEST_SSHD"

START_TRIES = 20
"""Another test may take the port between our choice and sshd's bind; it is chosen again."""

START_LIMIT_S = 60.0
"""A loaded machine starts sshd late; a machine that needs longer than this is broken."""

STOP_LIMIT_S = 30.0
"""How long killed processes may take to vanish before `stop` says so."""

# SHLVL: a bash that sshd starts at level 1 reads the user's .bashrc, and what stands there (pyenv and its
# lock, say) is this machine's affair and none of a node's.
_CONFIG = """\
Port {port}
{listen}
HostKey {dir}/host_key
PidFile {dir}/sshd.pid
AuthorizedKeysFile {dir}/authorized_keys
AuthenticationMethods publickey
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
UseDNS no
PrintMotd no
PrintLastLog no
MaxStartups 200
MaxSessions 200
LogLevel INFO
SetEnv {mark}={dir} SHLVL=2
Subsystem sftp internal-sftp
{options}
"""


class Sshd:
    """One sshd: `start(directory)`, then `port`, `connection()`, `known_hosts`, then `stop()`.

    `prefix` is a command that starts it, such as one that enters a network namespace.  `options` are more
    lines of its configuration.
    """

    python = sys.executable
    """The Python of every node; pytest sets one that costs less (tests/conftest.py)."""

    def __init__(
        self, addresses: Sequence[str] = ("127.0.0.1",), prefix: Sequence[str] = (), options: str = ""
    ) -> None:
        self.port = 0
        self._prefix = prefix
        self._options = options
        self.addresses = tuple(addresses)
        self.user = pwd.getpwuid(os.geteuid()).pw_name
        self.directory = Path()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def key_file(self) -> Path:
        """The private key that may log in."""
        return self.directory / "client_key"

    @property
    def known_hosts(self) -> Path:
        """A known_hosts file with this server's one line."""
        return self.directory / "known_hosts"

    @property
    def log_file(self) -> Path:
        """What sshd wrote."""
        return self.directory / "sshd.log"

    def start(self, directory: Path) -> Sshd:
        """Make the keys if they are missing, start the server, and return self once it listens."""
        directory = directory.resolve()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.directory = directory
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        for name in ("host_key", "client_key"):
            if not (directory / name).exists():
                _make_key(directory / name)
        (directory / "authorized_keys").write_bytes((directory / "client_key.pub").read_bytes())
        wanted = self.port
        for _ in range(START_TRIES):
            if self._try_start(wanted or free_port()):
                host_key = (directory / "host_key.pub").read_text().split()
                names = ",".join(f"[{address}]:{self.port}" for address in self.addresses)
                self.known_hosts.write_text(f"{names} {host_key[0]} {host_key[1]}\n")
                return self
        raise RuntimeError(f"sshd did not start: {self.log_file.read_text()}")

    def connection(self, address: str = "") -> dict[str, Any]:
        """Return the Ansible variables of a node that is this server, at one of its addresses."""
        return {
            "ansible_host": address or self.addresses[0],
            "ansible_port": self.port,
            "ansible_user": self.user,
            "ansible_ssh_private_key_file": str(self.key_file),
            "ansible_python_interpreter": self.python,
        }

    def logins(self) -> int:
        """Return how often a client has logged in."""
        return self.log_file.read_bytes().count(b"Accepted publickey")

    def processes(self) -> list[int]:
        """Return the pids of everything that logins of this server started and that still runs."""
        return _processes_with_mark(f"{MARK}={self.directory}".encode())

    def stop(self) -> None:
        """End the listener, its connections and everything that they started; safe to repeat.

        A later `start` in the same directory takes the same port and keys.
        """
        process, self._process = self._process, None
        if process is None:
            return
        connections = _descendants(process.pid)
        process.kill()
        process.wait()
        deadline = time.monotonic() + STOP_LIMIT_S
        while left := sorted({*(pid for pid in connections if _is_alive(pid)), *self.processes()}):
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes of the sshd in {self.directory} do not end: {left}")
            _kill(left)

    def _try_start(self, port: int) -> bool:
        config = self.directory / "sshd_config"
        listen = "\n".join(f"ListenAddress {address}" for address in self.addresses)
        values = {"dir": self.directory, "mark": MARK, "options": self._options}
        config.write_text(_CONFIG.format(port=port, listen=listen, **values))
        with self.log_file.open("wb") as log:
            process = subprocess.Popen(
                [*self._prefix, SSHD, "-D", "-e", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline and process.poll() is None:
            if b"Server listening on" in self.log_file.read_bytes():
                self._process, self.port = process, port
                return True
            select.select([], [], [], 0.005)
        process.kill()
        process.wait()
        return False


def _make_key(path: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "rolloutd-test", "-f", str(path)],
        check=True,
        stdin=subprocess.DEVNULL,
    )


def _processes_with_mark(mark: bytes) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if mark in environ.split(b"\0") and _is_alive(int(entry.name)):
                found.append(int(entry.name))
    return found


def _stat(pid: int) -> tuple[str, int]:
    """Return a process's state letter and its parent; ("", 0) when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return "", 0
    return fields[0].decode(), int(fields[1])


def _is_alive(pid: int) -> bool:
    return _stat(pid)[0] not in {"", "Z", "X"}


def _descendants(root: int) -> list[int]:
    parents = {int(p.name): _stat(int(p.name))[1] for p in Path("/proc").iterdir() if p.name.isdecimal()}
    found, fresh = [], [root]
    while fresh:
        fresh = [pid for pid, parent in parents.items() if parent in fresh]
        found += fresh
    return found


def _kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    select.select([], [], [], 0.01)
