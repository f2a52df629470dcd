"""Another machine's socket over a real sshd: it comes back when ssh is killed, and leaves nothing."""

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
from rolloutd.cli.tunnel import tunnel
from rolloutd.control.client import Client, NoDaemon, path_of
from tests.support.replay import Voice
from tests.support.sshd import Sshd
from tests.tui.house import small

pytestmark = pytest.mark.servers

LIMIT_S = 60.0


@pytest.fixture
def host(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sshd]:
    """Yield an sshd that `ssh ops1` reaches; nothing of the machine's own ssh setup is read."""
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
def voice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Voice]:
    """Yield a replayed daemon."""
    speaking = Voice(small(), tmp_path_factory.mktemp("v") / "s")
    try:
        yield speaking
    finally:
        speaking.close()


def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so."""
    end = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def answers(socket: Path) -> bool:
    """Say whether the daemon over there answers here."""
    try:
        return bool(Client(socket).get(path_of("status"))["rollouts"])
    except NoDaemon:
        return False


def test_it_is_there_comes_back_and_leaves_nothing(host: Sshd, voice: Voice) -> None:
    with tunnel("ops1", str(voice.server_address)) as socket:
        assert answers(socket)
        control = socket.parent / "ssh"
        told = subprocess.run(
            ["ssh", "-S", str(control), "-O", "check", "ops1"], capture_output=True, text=True, check=True
        )
        master = int(re.search(r"pid=(\d+)", told.stderr)[1])  # type: ignore[index]
        os.kill(master, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{master}").exists())
        until(lambda: answers(socket))
    assert not socket.parent.exists()
    mark = str(control).encode()
    until(lambda: not any(mark in _read(path) for path in Path("/proc").glob("[0-9]*/cmdline")))


def test_a_machine_that_cannot_be_reached_is_named(host: Sshd, voice: Voice) -> None:
    host.stop()
    with pytest.raises(exits.Stop, match=r"ssh ops1: .*refused"), tunnel("ops1", str(voice.server_address)):
        pass


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
