"""The contract of ports.Shell, for its fake and for asyncssh against a real sshd."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest

from rolloutd.adapters.ssh.shell import SshLimits, SshShell
from rolloutd.errors import HostKeyChanged, NodeUnreachable
from rolloutd.ports import Host, Shell, ShellResult
from tests.contracts.fakes.shell import HANG, FakeShell
from tests.contracts.ssh_fixtures import LIMIT_S, host_of, real_sshd, serve_connections
from tests.support.sshd import Sshd

HANGING = "sleep 3600"
FLOOD = "head -c 200000 /dev/zero | tr '\\0' x"


class ShellBackend(Protocol):
    """A shell and the one node n1 that it reaches."""

    shell: Shell
    host: Host

    def stop_node(self) -> None: ...

    def start_node(self) -> None: ...

    def change_host_key(self) -> None: ...


class FakeBackend:
    """The fake, with the answers that a POSIX node would give."""

    def __init__(self) -> None:
        self.host = Host("n1")
        self._shell = FakeShell(
            {
                "echo out; echo err >&2; exit 3": ShellResult(3, "out\n", "err\n"),
                "kill -KILL $$": ShellResult(137, "", ""),
                "cat": lambda _, stdin: ShellResult(0, stdin, ""),
                HANGING: HANG,
                FLOOD: ShellResult(0, "x" * 200_000, ""),
            }
        )
        self.shell: Shell = self._shell

    def stop_node(self) -> None:
        self._shell.down.add("n1")

    def start_node(self) -> None:
        self._shell.down.discard("n1")

    def change_host_key(self) -> None:
        self._shell.changed_host_keys.add("n1")


class SshdBackend:
    """asyncssh and a real sshd."""

    def __init__(self, sshd: Sshd) -> None:
        self.sshd = sshd
        self.host = host_of(sshd)
        self.shell: Shell = SshShell()

    def stop_node(self) -> None:
        self.sshd.stop()

    def start_node(self) -> None:
        self.sshd.start(self.sshd.directory)

    def change_host_key(self) -> None:
        self.stop_node()
        (self.sshd.directory / "host_key").unlink()
        line = self.sshd.known_hosts.read_text()
        self.start_node()
        self.sshd.known_hosts.write_text(line)


@asynccontextmanager
async def make_backend(kind: str, directory: Path) -> AsyncIterator[ShellBackend]:
    """Make one of the worlds that pass this suite."""
    if kind == "fake":
        yield FakeBackend()
        return
    with real_sshd(directory / "sshd") as sshd:
        backend = SshdBackend(sshd)
        try:
            yield backend
        finally:
            await backend.shell.close()


@pytest.fixture(params=["fake", pytest.param("asyncssh", marks=pytest.mark.servers)])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ShellBackend]:
    """Each backend in turn."""
    async with make_backend(request.param, tmp_path) as made:
        yield made


async def test_tells_output_and_exit_status(backend: ShellBackend) -> None:
    result = await backend.shell.run(backend.host, "echo out; echo err >&2; exit 3", timeout_s=LIMIT_S)
    assert result == ShellResult(3, "out\n", "err\n")


async def test_death_by_signal_is_128_and_its_number(backend: ShellBackend) -> None:
    result = await backend.shell.run(backend.host, "kill -KILL $$", timeout_s=LIMIT_S)
    assert result.exit_status == 137


async def test_hands_over_the_input(backend: ShellBackend) -> None:
    text = "zwölf\n" * 10_000
    result = await backend.shell.run(backend.host, "cat", timeout_s=LIMIT_S, stdin=text[:3000])
    assert result.stdout == text[:3000]


async def test_unread_input_is_no_error(backend: ShellBackend) -> None:
    result = await backend.shell.run(backend.host, "true", timeout_s=LIMIT_S, stdin="x" * 500_000)
    assert result.exit_status == 0


async def test_output_is_cut_with_a_note(backend: ShellBackend) -> None:
    result = await backend.shell.run(backend.host, FLOOD, timeout_s=LIMIT_S)
    assert len(result.stdout) < 66_000
    assert result.stdout.endswith("[cut: the first 65536 of 200000 bytes]")


async def test_endless_command_raises_named_timeout(backend: ShellBackend) -> None:
    await backend.shell.run(backend.host, "true", timeout_s=LIMIT_S)
    with pytest.raises(TimeoutError, match=r"n1: `sleep 3600` did not end within 0\.5s"):
        await backend.shell.run(backend.host, HANGING, timeout_s=0.5)
    assert (await backend.shell.run(backend.host, "true", timeout_s=LIMIT_S)).exit_status == 0


async def test_a_node_that_is_off_is_unreachable_by_name(backend: ShellBackend) -> None:
    backend.stop_node()
    with pytest.raises(NodeUnreachable, match=r"n1: tcp connect .*refused"):
        await backend.shell.run(backend.host, "true", timeout_s=LIMIT_S)


async def test_a_node_that_was_away_is_reached_again(backend: ShellBackend) -> None:
    await backend.shell.run(backend.host, "true", timeout_s=LIMIT_S)
    backend.stop_node()
    backend.start_node()
    assert (await backend.shell.run(backend.host, "true", timeout_s=LIMIT_S)).exit_status == 0


async def test_a_changed_host_key_is_not_spoken_to(backend: ShellBackend) -> None:
    backend.change_host_key()
    with pytest.raises(HostKeyChanged, match=r"n1: the host key .*has changed"):
        await backend.shell.run(backend.host, "true", timeout_s=LIMIT_S)


async def test_a_forgotten_connection_is_made_anew(backend: ShellBackend) -> None:
    await backend.shell.run(backend.host, "true", timeout_s=LIMIT_S)
    await backend.shell.disconnect("n1")
    await backend.shell.disconnect("n2")
    assert (await backend.shell.run(backend.host, "true", timeout_s=LIMIT_S)).exit_status == 0


async def test_commands_run_side_by_side(backend: ShellBackend) -> None:
    runs = (backend.shell.run(backend.host, "cat", timeout_s=LIMIT_S, stdin=str(n)) for n in range(20))
    assert [result.stdout for result in await asyncio.gather(*runs)] == [str(n) for n in range(20)]


# -- asyncssh alone -----------------------------------------------------------

pytest_servers = pytest.mark.servers


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[SshdBackend]:
    """asyncssh and a real sshd."""
    async with make_backend("asyncssh", tmp_path) as made:
        assert isinstance(made, SshdBackend)
        yield made


def logins(sshd: Sshd) -> int:
    """Count the logins that an sshd has accepted."""
    return sshd.log_file.read_text().count("Accepted publickey")


@pytest_servers
async def test_a_node_has_one_connection(real: SshdBackend) -> None:
    await asyncio.gather(*(real.shell.run(real.host, "true", timeout_s=LIMIT_S) for _ in range(20)))
    await real.shell.run(real.host, "true", timeout_s=LIMIT_S)
    assert logins(real.sshd) == 1


@pytest_servers
async def test_connections_are_limited_and_idle_ones_closed(real: SshdBackend) -> None:
    shell = SshShell(limits=SshLimits(max_connections=2, idle_timeout_s=0.05))
    hosts = [host_of(real.sshd, f"n{number}") for number in range(6)]
    await asyncio.gather(*(shell.run(host, "true", timeout_s=LIMIT_S) for host in hosts))
    assert logins(real.sshd) == 6
    async with asyncio.timeout(LIMIT_S):
        while real.sshd.log_file.read_text().count("Received disconnect") < 6:
            await asyncio.sleep(0.01)
    await shell.close()


@pytest_servers
async def test_a_node_that_falls_silent_in_the_middle_is_noticed(real: SshdBackend) -> None:
    async with silenceable(real.sshd.port) as (port, silence):
        key = real.sshd.known_hosts.read_text().split(None, 1)[1]
        with real.sshd.known_hosts.open("a") as known:
            known.write(f"[127.0.0.1]:{port} {key}")
        shell = SshShell(limits=SshLimits(keepalive_interval_s=0.1, max_missed_keepalives=2))
        host = host_of(real.sshd, ansible_port=port)
        await shell.run(host, "true", timeout_s=LIMIT_S)
        running = asyncio.create_task(shell.run(host, "sleep 3600", timeout_s=LIMIT_S))
        while not real.sshd.processes():
            await asyncio.sleep(0.01)
        silence.set()
        with pytest.raises(NodeUnreachable, match="n1: the connection was lost while `sleep 3600` ran"):
            await running
        await shell.close()


@asynccontextmanager
async def silenceable(port: int) -> AsyncIterator[tuple[int, asyncio.Event]]:
    """Stand before a port, and hand nothing on once the event is set."""
    silence = asyncio.Event()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (chunk := await reader.read(65536)) and not silence.is_set():
            writer.write(chunk)
        if silence.is_set():
            await asyncio.Event().wait()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        behind, to_behind = await asyncio.open_connection("127.0.0.1", port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(pump(reader, to_behind))
                group.create_task(pump(behind, writer))
        finally:
            to_behind.transport.abort()
            with contextlib.suppress(OSError):
                await to_behind.wait_closed()

    async with serve_connections(serve) as own_port:
        yield own_port, silence


@pytest_servers
async def test_goes_by_a_jump_host(real: SshdBackend) -> None:
    host = host_of(real.sshd)
    arguments = f"{host.connection['ansible_ssh_common_args']} -J {real.sshd.user}@127.0.0.1:{real.sshd.port}"
    jumped = Host("n1", connection={**host.connection, "ansible_ssh_common_args": arguments})
    assert (await real.shell.run(jumped, "echo here", timeout_s=LIMIT_S)).stdout == "here\n"
    assert logins(real.sshd) == 2


@pytest_servers
async def test_goes_by_a_proxy_command(real: SshdBackend) -> None:
    if shutil.which("ssh") is None:
        pytest.skip("needs the ssh client")
    host = host_of(real.sshd)
    sshd, arguments = real.sshd, host.connection["ansible_ssh_common_args"]
    ssh = f"ssh -F /dev/null -i {sshd.key_file} -p {sshd.port} -o UserKnownHostsFile={sshd.known_hosts}"
    proxy = f"-o 'ProxyCommand={ssh} -W %h:%p {sshd.user}@127.0.0.1'"
    jumped = Host("n1", connection={**host.connection, "ansible_ssh_common_args": f"{arguments} {proxy}"})
    assert (await real.shell.run(jumped, "echo here", timeout_s=LIMIT_S)).stdout == "here\n"


@pytest_servers
async def test_an_unknown_host_key_says_what_to_do(real: SshdBackend) -> None:
    real.sshd.known_hosts.write_text("")
    with pytest.raises(HostKeyChanged) as told:
        await real.shell.run(real.host, "true", timeout_s=LIMIT_S)
    assert f"ssh-keyscan -p {real.sshd.port} 127.0.0.1 >> {real.sshd.known_hosts}" in str(told.value)


@pytest_servers
async def test_invalid_line_of_known_hosts_is_left_out(
    real: SshdBackend, caplog: pytest.LogCaptureFixture
) -> None:
    known = real.sshd.known_hosts
    known.write_text(f"<<<<<<<\n{known.read_text()}")
    assert (await real.shell.run(real.host, "true", timeout_s=LIMIT_S)).exit_status == 0
    assert f"{known} line 1 is left out" in caplog.text
    with pytest.raises(TimeoutError, match=r"n1: a script did not end within 0\.2s"):
        await real.shell.run(real.host, "true\nsleep 3600", timeout_s=0.2)


@pytest_servers
@pytest.mark.parametrize("hashed", [False, True])
async def test_a_changed_host_key_names_the_line_and_the_remedy(real: SshdBackend, hashed: bool) -> None:
    real.change_host_key()
    known = real.sshd.known_hosts
    known.write_text(f"# nodes\n\n{known.read_text()}")
    if hashed:
        subprocess.run(["ssh-keygen", "-H", "-f", known], check=True, capture_output=True)
    with pytest.raises(HostKeyChanged) as told:
        await real.shell.run(real.host, "true", timeout_s=LIMIT_S)
    assert f"{known} line 3" in str(told.value)
    remedy = f"ssh-keygen -R '[127.0.0.1]:{real.sshd.port}' -f {known}"
    assert remedy in str(told.value)
    subprocess.run(remedy, shell=True, check=True, capture_output=True)
    assert "ssh-ed25519" not in known.read_text()


@pytest_servers
async def test_switching_the_host_key_check_off_is_not_obeyed(real: SshdBackend, tmp_path: Path) -> None:
    arguments = "-F /dev/null -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    host = host_of(real.sshd, ansible_ssh_common_args=arguments)
    empty = tmp_path / "empty"
    empty.touch()
    shell = SshShell(known_hosts=empty)
    with pytest.raises(HostKeyChanged, match=str(empty)):
        await shell.run(host, "true", timeout_s=LIMIT_S)
    shell = SshShell(known_hosts=real.sshd.known_hosts)
    assert (await shell.run(host, "true", timeout_s=LIMIT_S)).exit_status == 0
    await shell.close()


@pytest_servers
async def test_a_refused_key_is_named(real: SshdBackend, tmp_path: Path) -> None:
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    host = host_of(real.sshd, ansible_ssh_private_key_file=str(other))
    with pytest.raises(NodeUnreachable, match=rf"refused by .* for user {real.sshd.user} with key {other}"):
        await real.shell.run(host, "true", timeout_s=LIMIT_S)


@pytest_servers
async def test_a_node_that_accepts_and_says_nothing_is_unreachable() -> None:
    async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serve_connections(stay_silent) as port:
        shell = SshShell(limits=SshLimits(connect_timeout_s=0.3))
        host = Host("n1", connection={"ansible_host": "127.0.0.1", "ansible_port": port})
        with pytest.raises(NodeUnreachable, match=rf"n1: no answer from 127.0.0.1:{port} within 0.3s"):
            await shell.run(host, "true", timeout_s=LIMIT_S)
        with pytest.raises(NodeUnreachable, match=r"within 0\.1s"):
            await shell.run(host, "true", timeout_s=0.1)
