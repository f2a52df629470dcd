"""One connection for the runs of a node in flight: shared, ended, and found by the next daemon."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rolloutd.adapters.ansible import wrapper
from rolloutd.adapters.ansible.environment import TreeConfig
from rolloutd.adapters.ansible.node_connections import (
    MAX_PARENT_BYTES,
    NodeConnections,
    make_socket_directory,
)
from rolloutd.adapters.ansible.runner import AnsibleRunner
from rolloutd.ports import Ok, RunRequest
from tests.contracts.runner_backends import AnsibleBackend
from tests.support.waiting import wait_in_loop_until

pytestmark = pytest.mark.servers


@pytest.fixture
async def real(tmp_path: Path) -> AsyncIterator[AnsibleBackend]:
    made = AnsibleBackend(tmp_path)
    yield made
    await made.runner().keep_connections(())
    await made.close()


async def run(runner: AnsibleRunner, request: RunRequest) -> None:
    handle = await runner.start(request)
    while (state := await runner.wait_for_change(handle)).result is None:
        pass
    assert isinstance(state.result, Ok), state.result


def sockets(real: AnsibleBackend) -> list[Path]:
    """Return the directories of shared sockets."""
    return [link.readlink() for link in real.runs_dir.glob(".connections/*")]


def masters(directory: Path) -> list[int]:
    return wrapper.find_processes(b"", b"", os.fsencode(directory), b"ssh\n")


async def test_attempt_logs_in_once_also_over_a_restart(real: AnsibleBackend) -> None:
    first = real.runner()
    await first.keep_connections({"n0"})
    await run(first, real.request("ok.yml", "r1", fence="1.1"))
    (directory,) = sockets(real)
    (master,) = masters(directory)
    second = real.runner()  # as after SIGKILL: nothing but the files is known
    await second.keep_connections({"n0", "n1"})
    await run(second, real.request("ok.yml", "r2", fence="1.2"))
    assert (real.node.logins(), masters(directory)) == (1, [master])
    await second.keep_connections({"n1"})
    assert (sockets(real), masters(directory), directory.exists()) == ([], [], False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
async def test_directory_of_another_user_is_not_used(real: AnsibleBackend) -> None:
    real.runs_dir.mkdir(exist_ok=True)
    connections = NodeConnections(real.runs_dir)
    connections.keep({"n0"})
    arguments = ("n0", real.tree, real.connection, TreeConfig(None, {}))
    first = connections.directory_for(*arguments)
    assert first is not None
    assert connections.directory_for(*arguments) == first
    os.chown(first, 65534, 65534)
    second = connections.directory_for(*arguments)
    assert second not in (None, first)
    first.rmdir()


async def test_leftover_of_killed_daemon_is_ended_at_start(real: AnsibleBackend) -> None:
    first = real.runner()
    await first.keep_connections({"n0"})
    await run(first, real.request("ok.yml", "r1"))
    (directory,) = sockets(real)
    await real.runner().keep_connections(())
    assert (sockets(real), masters(directory), directory.exists()) == ([], [], False)


async def test_other_connection_settings_get_another_master(real: AnsibleBackend) -> None:
    runner = real.runner()
    await runner.keep_connections({"n0"})
    await run(runner, real.request("ok.yml", "r1"))
    real.connection["ansible_ssh_common_args"] = "-o Compression=no"
    await run(runner, real.request("ok.yml", "r2"))
    assert (real.node.logins(), len(sockets(real))) == (2, 2)


async def test_check_mode_and_unkept_nodes_share_nothing(real: AnsibleBackend) -> None:
    runner = real.runner()
    await run(runner, real.request("ok.yml", "r1"))
    await runner.keep_connections({"n0"})
    await run(runner, real.request("change.yml", "c1", check_only=True))
    assert sockets(real) == []


async def test_cancelled_run_ends_its_connection(real: AnsibleBackend) -> None:
    runner = real.runner()
    await runner.keep_connections({"n0"})
    handle = await runner.start(real.request("long.yml"))
    await wait_in_loop_until(real.has_work)
    (directory,) = sockets(real)
    await runner.cancel(handle)
    assert masters(directory) == []
    await run(runner, real.request("ok.yml", "r2"))
    assert len(masters(directory)) == 1


@pytest.mark.parametrize("parent_bytes", [MAX_PARENT_BYTES, MAX_PARENT_BYTES + 1])
def test_socket_of_ssh_fits_below_each_parent(parent_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        parent = Path(short, "p" * (parent_bytes - len(short) - 1))
        parent.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        directory = make_socket_directory()
        try:
            assert (directory.parent == parent) == (parent_bytes <= MAX_PARENT_BYTES)
            with socket.socket(socket.AF_UNIX) as master:
                # ssh binds this name before it renames it to the hash.
                master.bind(str(directory / f"{'c' * 40}.{'s' * 16}"))
        finally:
            shutil.rmtree(directory)
