"""Backups as files: without the passwords that a database of 0.1 has, and without space elsewhere."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from machines.model.events import NodesDiscovered, RequestDenied
from machines.model.node import Node
from machines.model.rollout import DAEMON
from rolloutd.ports import WITHHELD
from rolloutd.service.reload import TeamPlanCompiler
from rolloutd.store import open_store
from rolloutd.store.sqlite.backup import backup
from rolloutd.store.sqlite.database import FILE_NAME
from tests.acceptance.test_full_disk_and_clock_jumps import fill, small_disk

SECRETS = {
    "ansible_become_password": "hunter2-become",
    "ansible_ssh_pass": "hunter2-ssh",
    "app": {"db_password": "hunter2-db", "port": 5432},
    "keys": [{"api_key": "hunter2-api"}],
}
PLAIN = {"ansible_host": "10.0.0.1", "provider_id": "aws:///i-1", "community": "hunter2-snmp"}


async def test_backup_holds_no_password(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "state", compile_plan=TeamPlanCompiler({}))
    nodes = tuple(Node(f"n{number}") for number in range(200))
    for old in ("-older", ""):
        secrets = json.loads(json.dumps(SECRETS).replace("hunter2", f"hunter2{old}"))
        connections = {node.name: {**PLAIN, **secrets} for node in nodes}
        discovered = NodesDiscovered(nodes, connections)
        await store.commit([discovered], actor=DAEMON, cause="test", at=1.0)
    await store.close()
    with closing(sqlite3.connect(tmp_path / "state" / FILE_NAME)) as state:
        assert b"hunter2" in (tmp_path / "state" / FILE_NAME).read_bytes()
        assert state.execute("SELECT count(*) FROM node").fetchone() == (200,)
    verdict = backup(tmp_path / "state", tmp_path / "copy.sqlite")
    assert verdict.ok
    assert b"hunter2" not in (tmp_path / "copy.sqlite").read_bytes()
    with closing(sqlite3.connect(tmp_path / "copy.sqlite")) as copy:
        kept = json.loads(copy.execute("SELECT connection FROM node WHERE name = 'n7'").fetchone()[0])
    assert kept == {"provider_id": "aws:///i-1", WITHHELD: True}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount a small disk")
async def test_backup_needs_no_space_elsewhere(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "state", compile_plan=TeamPlanCompiler({}))
    for _ in range(5):
        await store.commit(
            [RequestDenied(DAEMON, "x" * 2**20, "why", 1.0)], actor=DAEMON, cause="test", at=1.0
        )
    await store.close()
    (tmp_path / "config.yaml").write_text(f"state_dir: {tmp_path / 'state'}\n")
    (tmp_path / "memory").mkdir()
    command = [sys.executable, "-m", "rolloutd.admin", "backup", f"--file={tmp_path / 'copy'}"]
    with small_disk(tmp_path / "memory"):
        fill(tmp_path / "memory" / "filler")
        done = subprocess.run(
            [*command, f"--config={tmp_path / 'config.yaml'}"],
            env={**os.environ, "TMPDIR": str(tmp_path / "memory")},
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, "5 audit entries" in done.stdout) == (0, True), done.stderr
