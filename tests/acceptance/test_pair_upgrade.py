"""A pair of daemons that is upgraded from an older version of ours, with a migration."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from rolloutd.control.client import ApiError, DaemonUnreachable
from rolloutd.errors import StoreFailed
from rolloutd.store import prepare_postgresql
from tests.support.daemon_environment import DaemonEnvironment, plan
from tests.support.forked_process import start_daemon
from tests.support.postgresql import OWNER, ROLE, Postgresql
from tests.support.waiting import wait_until

CHECKOUT = Path(__file__).parents[2]

OLDER = "b9b63d65"
"""The last commit with migration 24 as the newest one."""


def _has_history() -> bool:
    command = ["git", "-C", CHECKOUT, "cat-file", "-e", f"{OLDER}^{{commit}}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.servers("postgresql"),
    pytest.mark.long,
    pytest.mark.skipif(not _has_history(), reason="needs the repository's history"),
]


class Pair:
    """Two state directories over one database, each with the daemon of either version."""

    def __init__(self, root: Path, dsn: str) -> None:
        self.root = root
        self.older = root / "older"
        self.older.mkdir()
        archive = ["git", "-C", CHECKOUT, "archive", OLDER, "machines", "rolloutd", "playbooks"]
        packed = subprocess.run(archive, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", self.older], input=packed, check=True)
        key = root / "redaction.key"
        key.write_bytes(b"k" * 32)
        self.daemons: dict[str, DaemonEnvironment] = {}
        for name in ("a", "b"):
            (root / name).mkdir()
            daemon = self.daemons[name] = DaemonEnvironment(
                root / name, {"n1": {"team": "infra", "role": "worker"}}
            )
            hosts = (
                "all: {hosts: {n1: {ansible_host: 127.0.0.1, ansible_port: 1, team: infra, role: worker}}}\n"
            )
            (daemon.directory / "hosts.yml").write_text(hosts)
            daemon.write_settings(
                name=name,
                redaction_key_file=str(key),
                files={"directory": str(root / "files")},
                store={"postgresql": {"dsn": dsn, "lease": "60s"}},
            )

    def run_older(self, *words: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(self.older)}
        return subprocess.Popen(
            [sys.executable, *words], cwd=self.older, env=environment, text=True, stderr=subprocess.PIPE
        )

    def start(self, name: str) -> None:
        """Start the daemon of this version; it may be refused."""
        daemon = self.daemons[name]
        words = ["--config", str(daemon.directory / "config.yaml")]
        daemon.process = start_daemon(words, daemon.directory / "daemon.log", dict(os.environ))

    @contextmanager
    def older_daemon(self, name: str) -> Iterator[subprocess.Popen[str]]:
        config = self.daemons[name].directory / "config.yaml"
        process = self.run_older("-m", "rolloutd", "--config", str(config))
        try:
            yield process
        finally:
            process.terminate()
            process.communicate(timeout=90)

    def role(self, name: str) -> Any:
        with suppress(DaemonUnreachable, ApiError):
            return self.daemons[name].client.get("/v1/status").get("role")
        return None


def test_pair_is_upgraded_without_losing_a_vote(postgresql: Postgresql, tmp_path: Path) -> None:
    with postgresql.connect() as admin:
        admin.execute(f"CREATE DATABASE upgraded OWNER {OWNER}")
    owner = postgresql.dsn("upgraded", OWNER)
    pair = Pair(tmp_path, postgresql.dsn("upgraded", ROLE))
    code = "import sys; from rolloutd.store import prepare_postgresql as p; p(sys.argv[1], None, sys.argv[2])"
    prepared = pair.run_older("-c", code, owner, ROLE)
    assert prepared.communicate(timeout=90)[1] == ""
    first, second = pair.daemons["a"], pair.daemons["b"]
    with pair.older_daemon("a"):
        wait_until(lambda: pair.role("a") == "leader")
        wait_until(lambda: first.client.get("/v1/inventory")["sources"][0]["refreshed_at"])
        rollout = first.submit(plan("net"), {"change.yml": "- hosts: all\n  tasks: []\n"})
        first.vote(rollout, "start", reason="before the upgrade")
        # A standby of the new version does not wait on tables that it cannot read: it names the command.
        pair.start("b")
        wait_until(lambda: second.process is not None and second.process.poll() is not None)
        assert "its tables are of version 24, not " in second.log_tail()
        assert "run `rolloutctl store prepare" in second.log_tail()
        # Nor are tables migrated below a daemon that writes the older ones.
        with pytest.raises(StoreFailed, match=r"database: rolloutd .* is connected; stop all daemons"):
            prepare_postgresql(owner, None, ROLE)
        assert pair.role("a") == "leader"
        epoch = first.client.get("/v1/health")["epoch"]
    assert "migrated from 24" in prepare_postgresql(owner, None, ROLE)
    try:
        pair.start("a")
        wait_until(lambda: pair.role("a") == "leader")
        assert first.client.get("/v1/health")["epoch"] == epoch + 1
        (gate,) = (each for each in first.status(rollout)["gates"] if each["gate"] == "start")
        assert [each["reason"] for each in gate["votes"]] == ["before the upgrade"]
        pair.start("b")
        wait_until(lambda: pair.role("b") == "standby")
        first.client.post("/v1/leader/step-down", {"reason": "upgrade"})
        wait_until(lambda: pair.role("b") == "leader")
        assert second.status(rollout)["gates"][0]["votes"]
        # The older version, started by mistake, is refused.
        with pair.older_daemon("a") as process:
            _, errors = process.communicate(timeout=90)
        assert process.returncode != 0
        assert "a newer rolloutd has prepared it" in errors
    finally:
        for daemon in pair.daemons.values():
            daemon.stop()
