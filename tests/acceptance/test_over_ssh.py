"""A daemon on another machine: reached over a real sshd, and who asks is the account there."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolloutd.control.identity import CachedNameService
from tests.rolloutd.control_environment import ControlEnvironment, control_environment
from tests.support.sshd import Sshd
from tests.support.unix_users import UnixUser, can_create_users, temporary_users

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(not can_create_users(), reason="needs root and useradd: real users are made"),
]

LIMIT_S = 120.0


@pytest.fixture
def place() -> Iterator[Path]:
    """Return a directory that other users can enter."""
    made = Path(tempfile.mkdtemp(prefix="ossh-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def server(place: Path) -> Iterator[Sshd]:
    """Serve ssh for every user of this machine who has the one key."""
    running = Sshd().start(place / "sshd")
    running.directory.chmod(0o755)
    (running.directory / "authorized_keys").chmod(0o644)
    yield running
    running.stop()


def client(place: Path, server: Sshd) -> dict[str, str]:
    """Return an environment whose ssh knows the server and has the key, and reads nobody's configuration."""
    (place / "config").write_text(
        f"Host *\n  IdentityFile {server.key_file}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {server.known_hosts}\n  StrictHostKeyChecking yes\n  BatchMode yes\n"
    )
    (place / "bin").mkdir()
    wrapper = place / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {place}/config "$@"\n')
    wrapper.chmod(0o755)
    # Not the user's alone: no connection outlives its command, so that the accounts can be removed.
    (place / "run" / "rolloutctl").mkdir(parents=True)
    (place / "run" / "rolloutctl").chmod(0o755)
    return {
        "XDG_RUNTIME_DIR": str(place / "run"),
        "PATH": f"{wrapper.parent}:/usr/bin:/bin",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }


def rolloutctl(environment: dict[str, str], host: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run rolloutctl as from another machine."""
    command = [sys.executable, "-P", "-m", "rolloutd.cli", "--host", host, *words]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


async def test_a_vote_over_ssh_is_of_the_account_there(place: Path, server: Sshd) -> None:
    """The client claims nothing: whoever ssh let in votes, and whoever it did not, does not."""
    environment = client(place, server)
    with temporary_users({"ops": ["socket"], "guest": ["socket"], "stranger": []}) as (cast, groups):
        settings = {"teams": {"infra": {"members": [cast["ops"].name]}}, "admins": ["root"]}
        names = CachedNameService(lambda: 0.0)
        async with control_environment(place, names=names, group=groups["socket"], **settings) as inside:
            rollout = await inside.submit()
            said = await vote_as(inside, environment, server, cast["ops"], rollout)
            assert said.returncode == 0, said.stderr
            (vote,) = inside.state.index.rollout(rollout).votes
            assert (vote.actor.name, vote.actor.uid) == (cast["ops"].name, cast["ops"].uid)
            said = await vote_as(inside, environment, server, cast["guest"], rollout)
            assert said.returncode == 4
            assert cast["guest"].name in said.stderr
            said = await vote_as(inside, environment, server, cast["stranger"], rollout)
            assert said.returncode in (3, 4), "sshd could not open the socket for them"
            assert len(inside.state.index.rollout(rollout).votes) == 1


async def test_reading_over_ssh_and_a_host_that_is_not_there(place: Path, server: Sshd) -> None:
    environment = client(place, server)
    with temporary_users({"ops": ["socket"]}) as (cast, groups):
        async with control_environment(
            place, names=CachedNameService(lambda: 0.0), group=groups["socket"]
        ) as inside:
            path = str(inside.server._path)
            host = f"ssh://{cast['ops'].name}@127.0.0.1:{server.port}"
            said = await asyncio.to_thread(
                rolloutctl, environment, host, "--socket", path, "status", "--json"
            )
            assert said.returncode == 0, said.stderr
            assert json.loads(said.stdout)["rollouts"] == []
            nobody = f"ssh://{cast['ops'].name}@127.0.0.1:1"
            said = await asyncio.to_thread(rolloutctl, environment, nobody, "--socket", path, "status")
            assert said.returncode == 3
            assert "127.0.0.1" in said.stderr


async def vote_as(
    inside: ControlEnvironment, environment: dict[str, str], server: Sshd, who: UnixUser, rollout: str
) -> subprocess.CompletedProcess[str]:
    """Approve the start, logged in as somebody."""
    host = f"ssh://{who.name}@127.0.0.1:{server.port}"
    words = ("--socket", str(inside.server._path), "approve", rollout, "start", "--reason", "read it")
    return await asyncio.to_thread(rolloutctl, environment, host, *words)
