"""A whole rewrite of the audit is noticed by its anchor: a file behind a real sshd."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import pytest

from machines.model.events import RequestDenied
from machines.model.rollout import DAEMON
from rolloutd.adapters.registry import create_adapter
from rolloutd.adapters.ssh.shell import SshShell
from rolloutd.audit.audit_anchor import AnchoredHash, describe_difference, format_line, parse_lines
from rolloutd.audit.audit_chain import GENESIS_HASH, hash_entry
from rolloutd.engine.background.audit_anchor import CONDITION, AuditAnchor
from rolloutd.plugin import ANCHORS
from rolloutd.ports import AdapterContext
from rolloutd.settings import Settings
from rolloutd.store import SqliteBackend
from rolloutd.store.sqlite import database
from tests.contracts.fakes.runner import FakeRunner
from tests.rolloutd.control_environment import ControlEnvironment
from tests.rolloutd.engine.test_audit_monitor import sqlite_environment
from tests.support.sshd import Sshd

pytestmark = pytest.mark.servers


@asynccontextmanager
async def anchored(
    env: ControlEnvironment, sshd: Sshd, file: Path, sent: list[str]
) -> AsyncIterator[AuditAnchor]:
    """Yield what keeps the audit's hash in a file behind the sshd."""
    settings = Settings.model_validate(
        {"audit": {"anchors": [{"ssh": {"host": "127.0.0.1", "port": sshd.port, "file": str(file)}}]}}
    )
    shell = SshShell(sshd.known_hosts, sshd.user, sshd.key_file)
    context = AdapterContext(
        shell, env.clock, FakeRunner(env.run_host), env.state.connections.snapshot, settings
    )
    (place,) = settings.audit.anchors
    adapter = create_adapter(ANCHORS, place.kind, replace(context, params=place.params))
    try:
        yield AuditAnchor(env.state, [adapter], lambda title, line: sent.append(f"{title}\n{line}"))
    finally:
        await shell.close()


def rewrite_audit(path: Path) -> None:
    """Change one entry, and hash it and all later ones again: a chain that is intact."""
    with closing(sqlite3.connect(path)) as connection:
        previous = GENESIS_HASH
        for seq, text in connection.execute("SELECT seq, entry FROM audit ORDER BY seq").fetchall():
            changed = text.replace('"call":"first"', '"call":"other"')
            previous = hash_entry(previous, changed)
            connection.execute("UPDATE audit SET entry = ?, hash = ? WHERE seq = ?", (changed, previous, seq))
        connection.commit()


async def test_rewritten_audit_differs_from_its_anchor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sshd, file, sent = Sshd().start(tmp_path / "sshd"), tmp_path / "kept elsewhere", list[str]()
    path = tmp_path / "state" / database.FILE_NAME
    try:
        async with sqlite_environment(tmp_path) as env, anchored(env, sshd, file, sent) as anchor:
            object.__setattr__(env.server._services, "compare_anchors", anchor.compare)
            for call in ("first", "second"):
                await env.commit(RequestDenied(DAEMON, call, "why", 1.0))
                await anchor.write()
            assert CONDITION not in env.state.conditions
            (one, two) = parse_lines(file.read_text().splitlines())
            assert two.seq == one.seq + 1
            assert two.hash in sent[-1]
            assert (await env.request("nora", "get", "/v1/audit/verify"))["ok"]
            copy = tmp_path / "lines.txt"
            copy.write_text("From: rolloutd\n\n" + file.read_text())

            rewrite_audit(path)
            assert SqliteBackend(path).verify_chain().ok, "by itself it is intact"
            report = await env.request("nora", "get", "/v1/audit/verify")
            assert not report["ok"]
            assert "has another hash: the audit was rewritten or cut" in report["message"]
            await anchor.write()
            assert "was rewritten" in env.state.conditions[CONDITION]
            assert len(file.read_text().splitlines()) == 2, "the new chain is not anchored"
            verdict = audit_verify_file(path, copy)
            assert verdict == (1, "NOT INTACT")

            sshd.stop()
            assert await anchor.compare() == ""
            assert "is not kept there" in env.state.conditions[CONDITION]
    finally:
        sshd.stop()


def audit_verify_file(database_file: Path, anchor_file: Path) -> tuple[int, str]:
    """Run `audit verify --database --anchor`."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "rolloutd.cli", "audit", "verify"]
    result = subprocess.run(
        [*command, "--database", str(database_file), "--anchor", str(anchor_file)],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stdout.partition(":")[0]


def test_cut_audit_differs_from_its_anchor() -> None:
    kept = parse_lines([format_line(0.0, 7, "a" * 64), "no line", f"x y {'a' * 64}"])
    assert kept == [AnchoredHash("1970-01-01T00:00:00Z", 7, "a" * 64)]
    assert describe_difference(kept, {7: "a" * 64}) == ""
    assert "entry 7, anchored at 1970-01-01T00:00:00Z, is missing" in describe_difference(kept, {})


async def test_line_with_impossible_number_is_no_anchor(tmp_path: Path) -> None:
    class File:
        name = "anchor log.example:/srv/anchor"
        lines = [f"2027-01-15T08:00:00Z {10**30} {'a' * 64}"]  # noqa: RUF012  # of this test alone

        async def read(self) -> list[str]:
            return self.lines

        async def append(self, line: str) -> None:
            self.lines.append(line)

    async with sqlite_environment(tmp_path) as env:
        await env.commit(RequestDenied(DAEMON, "call", "why", 1.0))
        await AuditAnchor(env.state, [File()], lambda title, line: None).write()
        assert CONDITION not in env.state.conditions
        assert len(File.lines) == 2
