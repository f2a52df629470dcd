"""A remote socket over a real sshd: it returns after ssh is killed, and leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rolloutd.cli import exits
from rolloutd.cli.tunnel import open_tunnel
from rolloutd.control.client import Client, DaemonUnreachable, api_path
from tests.support.replay_server import ReplayServer
from tests.support.sshd import Sshd
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


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def daemon_responds(socket: Path) -> bool:
    """Return whether the remote daemon answers at a local socket."""
    try:
        return bool(Client(socket).get(api_path("status"))["rollouts"])
    except DaemonUnreachable:
        return False


def test_tunnel_reconnects_and_leaves_nothing(host: Sshd, server: ReplayServer) -> None:
    with open_tunnel("ops1", str(server.server_address)) as socket:
        assert daemon_responds(socket)
        control = socket.parent / "ssh"
        check = subprocess.run(
            ["ssh", "-S", str(control), "-O", "check", "ops1"], capture_output=True, text=True, check=True
        )
        master = int(re.search(r"pid=(\d+)", check.stderr)[1])  # type: ignore[index]
        os.kill(master, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{master}").exists())
        wait_until(lambda: daemon_responds(socket))
    assert not socket.parent.exists()
    mark = str(control).encode()
    wait_until(lambda: not any(mark in _read(path) for path in Path("/proc").glob("[0-9]*/cmdline")))


def test_unreachable_host_is_named(host: Sshd, server: ReplayServer) -> None:
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
