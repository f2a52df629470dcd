"""A remote socket over a real sshd: it returns after ssh is killed, and leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolloutd.cli import exits
from rolloutd.cli.tunnel import KEPT_S, open_tunnel
from rolloutd.control.client import Client, DaemonUnreachable, api_path
from tests.support.replay_server import ReplayServer
from tests.support.sshd import Sshd
from tests.support.waiting import wait_until
from tests.tui.harness import start_gate_fleet

pytestmark = pytest.mark.servers

TIMEOUT_S = 60.0


@pytest.fixture
def host(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    """Yield an sshd that `ssh ops1` reaches, without this machine's ssh configuration."""
    base = tmp_path_factory.mktemp("h")
    server = Sshd().start(base)
    connection = server.connection()
    (base / "config").write_text(
        f"Host ops1\n  HostName 127.0.0.1\n  Port {server.port}\n  User {connection['ansible_user']}\n"
        f"  IdentityFile {server.key_file}\n  UserKnownHostsFile {server.known_hosts}\n  IdentitiesOnly yes\n"
    )
    (base / "bin").mkdir()
    wrapper = base / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {base}/config "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{base / 'bin'}:{os.environ['PATH']}")
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayServer]:
    """Yield a replayed daemon."""
    speaking = ReplayServer(start_gate_fleet(), tmp_path_factory.mktemp("v") / "s")
    try:
        yield speaking
    finally:
        speaking.close()


def daemon_responds(socket: Path) -> bool:
    """Return whether the remote daemon answers at a local socket."""
    try:
        return bool(Client(socket).get(api_path("status"))["rollouts"])
    except DaemonUnreachable:
        return False


def master_of(control: Path) -> int:
    """Return the process id of the ssh that holds the connection."""
    command = ["ssh", "-S", str(control), "-O", "check", "ops1"]
    check = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(re.search(r"pid=(\d+)", check.stderr)[1])  # type: ignore[index]


@pytest.fixture
def runtime_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path_factory.mktemp("r")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    return directory


def test_next_commands_share_one_connection(
    host: Sshd, server: ReplayServer, runtime_directory: Path
) -> None:
    masters, results = set(), []

    def command() -> None:
        with open_tunnel("ops1", str(server.server_address)) as socket:
            results.append(daemon_responds(socket))
            masters.add(master_of(socket.parent / "ssh"))

    together = [threading.Thread(target=command) for _ in range(3)]
    for each in together:
        each.start()
    for each in together:
        each.join()
    command()
    assert (len(masters), results) == (1, [True] * 4)
    (directory,) = (runtime_directory / "rolloutctl").iterdir()
    assert [path.stat().st_mode & 0o077 for path in (directory.parent, directory)] == [0, 0]
    # The master was told to end by itself; another server's connection is another directory.
    persist = next(
        word
        for word in _read(Path(f"/proc/{masters.copy().pop()}/cmdline")).split(b"\0")
        if b"Persist" in word
    )
    assert persist == f"ControlPersist={KEPT_S}".encode()
    subprocess.run(["ssh", "-S", directory / "ssh", "-O", "exit", "ops1"], capture_output=True, check=True)
    with open_tunnel("ops1", str(server.server_address)) as socket:
        assert daemon_responds(socket)
        assert master_of(socket.parent / "ssh") not in masters
        subprocess.run(
            ["ssh", "-S", directory / "ssh", "-O", "exit", "ops1"], capture_output=True, check=True
        )


def test_tunnel_reconnects_and_leaves_nothing(
    host: Sshd, server: ReplayServer, runtime_directory: Path
) -> None:
    # Others could enter it: then no command's connection outlives it.
    (runtime_directory / "rolloutctl").mkdir(mode=0o755)
    with open_tunnel("ops1", str(server.server_address)) as socket:
        assert daemon_responds(socket)
        control = socket.parent / "ssh"
        master = master_of(control)
        os.kill(master, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{master}").exists())
        wait_until(lambda: daemon_responds(socket))
    assert not socket.parent.exists()
    mark = str(control).encode()
    wait_until(lambda: not any(mark in _read(path) for path in Path("/proc").glob("[0-9]*/cmdline")))


def test_unreachable_host_is_named(host: Sshd, server: ReplayServer, runtime_directory: Path) -> None:
    host.stop()
    with (
        pytest.raises(exits.Exit, match=r"ssh ops1: .*refused"),
        open_tunnel("ops1", str(server.server_address)),
    ):
        pass


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
