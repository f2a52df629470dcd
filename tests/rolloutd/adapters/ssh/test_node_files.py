"""Removal of fences and guards by its scripts, on this machine."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rolloutd.adapters.ansible.fence import SCRIPT
from rolloutd.adapters.ssh.node_files import NEEDED_BY_GUARD, SshNodeFiles
from rolloutd.adapters.ssh.node_guard import SshNodeGuard
from rolloutd.errors import AdapterFailed
from rolloutd.ports import Host, NodeFile
from tests.contracts.fakes.clock import START, FakeClock
from tests.contracts.ssh_fixtures import LIMIT_S, step_context
from tests.support.local_shell import LocalShell

HOST = Host("n1")


async def test_ended_guards_and_fences_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, fence_dir, guard_dir = tmp_path / "home", tmp_path / "fence", tmp_path / "guards"
    monkeypatch.setenv("HOME", str(home))
    for directory in (str(fence_dir), "/dev/null"):  # the second run finds no place but its home
        subprocess.run(["sh", "-c", SCRIPT, "fence", "1.7 db 9", directory, "n1", "60"], check=True)
    fences = [fence_dir / "n1", home / ".rolloutd-fence" / "n1"]
    shell = LocalShell()
    guard = SshNodeGuard(shell, FakeClock(), str(guard_dir))
    params = {"paths": [str(tmp_path / "app.conf")], "commands": [], "after": 600, "across_reboot": False}
    ctx = replace(step_context(HOST, params), deadline=START + LIMIT_S)
    files = SshNodeFiles(shell, str(fence_dir), str(guard_dir))
    await guard.arm(ctx, order="1.7 database 1800000000")
    directory = guard_dir / "n1" / f"{ctx.rollout}.{ctx.attempt}"
    kept = [NodeFile("guard", str(directory), NEEDED_BY_GUARD)]
    kept += [NodeFile("fence", str(path), NEEDED_BY_GUARD) for path in fences]
    assert await files.clean(HOST, dry_run=False, timeout_s=LIMIT_S) == kept
    assert directory.is_dir()
    assert all(path.is_file() for path in fences)

    await guard.disarm(ctx)
    found = [replace(each, reason="") for each in kept]
    assert await files.clean(HOST, dry_run=True, timeout_s=LIMIT_S) == found
    assert directory.is_dir()
    assert fences[0].is_file()
    assert await files.clean(HOST, dry_run=False, timeout_s=LIMIT_S) == found
    assert list(guard_dir.iterdir()) == []
    assert list(fence_dir.iterdir()) == list(home.iterdir()) == []
    assert await files.clean(HOST, dry_run=False, timeout_s=LIMIT_S) == []


async def test_guard_that_is_being_armed_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "n1").mkdir()
    files = SshNodeFiles(LocalShell(), str(tmp_path / "fence"), str(tmp_path))
    (tmp_path / "n1" / "lock").mkdir()  # a lock that cannot be taken
    with pytest.raises(AdapterFailed, match="n1: what is left is not removed"):
        await files.clean(HOST, dry_run=False, timeout_s=LIMIT_S)
