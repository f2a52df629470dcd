"""Checkpoints on a node: what is written, and what reads as not done."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from rolloutd.adapters.ssh.checkpoints import MAX_BYTES, SshCheckpoints, format_fact, parse_fact
from rolloutd.errors import AdapterFailed
from rolloutd.ports import Checkpoint, Host, StagedArtifact
from tests.support.local_shell import LocalShell

LIMIT_S = 60.0
APP = StagedArtifact(
    "1.2.3", "a" * 64, "/var/cache/rolloutd/a/app's.tar.gz", "/var/cache/rolloutd/a/unpacked"
)
DONE = Checkpoint("app", "stage", "c" * 64, "d" * 64, "r1", 1_800_000_000.25, {"app": APP})
INSTALLED = replace(DONE, stage="install", artifacts={})
BOTH = {("app", "stage"): DONE, ("app", "install"): INSTALLED}
FACT = format_fact(BOTH)


async def test_checkpoints_are_kept_and_removed(tmp_path: Path) -> None:
    host = Host("n1", connection={"rolloutd_fact_path": str(tmp_path / "facts.d")})
    checkpoints, file = SshCheckpoints(LocalShell()), tmp_path / "facts.d/rolloutd.fact"
    assert await checkpoints.read(host, timeout_s=LIMIT_S) == {}
    # Two rollouts finish at once: neither loses the other's.
    await asyncio.gather(*(checkpoints.write(host, each, timeout_s=LIMIT_S) for each in BOTH.values()))
    assert await checkpoints.read(host, timeout_s=LIMIT_S) == BOTH
    assert file.stat().st_mode & 0o777 == 0o644
    assert [each.name for each in file.parent.iterdir()] == ["rolloutd.fact"]
    fact = json.loads(file.read_text())
    assert fact["stages"]["app/stage"]["artifacts"]["app"]["path"] == APP.path
    other = replace(DONE, plan="other", rollout="r0")
    await checkpoints.write(host, other, timeout_s=LIMIT_S)
    newer = replace(DONE, rollout="r2", previous=("a" * 64,))
    await checkpoints.write(host, newer, timeout_s=LIMIT_S)
    await checkpoints.remove(host, "r2", timeout_s=LIMIT_S)
    known = {("other", "stage"): other, ("app", "install"): INSTALLED}
    left = replace(newer, content="", artifacts={})
    assert await checkpoints.read(host, timeout_s=LIMIT_S) == {**known, ("app", "stage"): left}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        "[" * 100_000,
        "null",
        FACT[:-1],
        FACT.replace("1.2.3", "1.2.4"),
        FACT.replace('"format": 1', '"format": 2'),
        FACT.replace('"r1"', "7"),
        " " * MAX_BYTES + FACT,
        "\0",
    ],
)
def test_odd_fact_is_not_as_it_was_written(text: str) -> None:
    assert parse_fact(text) is None


def test_long_fact_loses_the_oldest() -> None:
    many = {
        ("app", f"s{number}"): replace(DONE, stage=f"s{number}", at=float(number)) for number in range(300)
    }
    text = format_fact(many)
    kept = parse_fact(text) or {}
    assert len(text) <= MAX_BYTES
    assert ("app", "s299") in kept
    assert ("app", "s0") not in kept
    assert len(kept) > 50


async def test_fact_that_cannot_be_read_is_not_replaced(tmp_path: Path) -> None:
    host = Host("n1", connection={"rolloutd_fact_path": str(tmp_path / "facts.d")})
    node, file = LocalShell(), tmp_path / "facts.d/rolloutd.fact"
    checkpoints = SshCheckpoints(node)
    await checkpoints.write(host, DONE, timeout_s=LIMIT_S)
    written = file.read_text()
    (tmp_path / "head").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "head").chmod(0o755)
    node.wrap = lambda command: ["env", f"PATH={tmp_path}:{os.environ['PATH']}", "sh", "-c", command]
    with pytest.raises(AdapterFailed, match=r"rolloutd\.fact is not read"):
        await checkpoints.write(host, INSTALLED, timeout_s=LIMIT_S)
    assert file.read_text() == written


async def test_fact_in_directory_of_root_is_read_by_root(tmp_path: Path) -> None:
    """To a login that may not enter /etc/ansible it looks absent, and root would write a new one over it."""
    host = Host("n1", connection={"rolloutd_fact_path": str(tmp_path)})
    node, commands = LocalShell(), list[str]()
    node.wrap = lambda command: commands.append(command) or ["sh", "-c", command]  # type: ignore[func-returns-value]
    await SshCheckpoints(node).read(host, timeout_s=LIMIT_S)
    assert "sudo -n" in commands[0]


async def test_fact_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "rolloutd.fact").mkdir()
    host = Host("n1", connection={"rolloutd_fact_path": str(tmp_path)})
    with pytest.raises(AdapterFailed, match="is a directory"):
        await SshCheckpoints(LocalShell()).write(host, DONE, timeout_s=LIMIT_S)
