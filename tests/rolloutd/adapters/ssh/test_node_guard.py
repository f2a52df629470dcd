"""The guard's script on this machine: byte-identical restores, races, interruptions, systemd."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shlex
import shutil
import signal
import stat
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolloutd.adapters.ssh import node_guard
from rolloutd.adapters.ssh.node_guard import SshNodeGuard
from rolloutd.errors import AdapterFailed
from rolloutd.ports import GuardReport, GuardState, Host, StepContext
from tests.contracts.fakes.clock import START, FakeClock
from tests.contracts.ssh_fixtures import LIMIT_S, step_context
from tests.support.local_shell import LocalShell
from tests.support.waiting import wait_in_loop_until

ORDER = "1.7 database 1800000000"
RACES = 30


class Node:
    """A directory that is guarded, on this machine."""

    def __init__(self, directory: Path) -> None:
        self.etc = directory / "etc"
        self.etc.mkdir()
        self.guards = directory / "guards"
        self.shell = LocalShell()
        self.guard = SshNodeGuard(self.shell, FakeClock(), str(self.guards))

    @property
    def guard_dir(self) -> Path:
        return self.guards / "n1" / "r1.1"

    def context(self, *paths: Path, commands: Sequence[str] = (), **params: Any) -> StepContext:
        named = [str(path) for path in paths or (self.etc,)]
        values = {"paths": named, "commands": list(commands), "after": 600, "across_reboot": False, **params}
        return replace(step_context(Host("n1"), values), deadline=START + LIMIT_S)

    async def arm(self, ctx: StepContext) -> None:
        assert await self.guard.arm(ctx, order=ORDER) == GuardReport(GuardState.ARMED)

    def script(self, operation: str, token: str = "r1.1", *arguments: str) -> list[str]:
        directory = self.guards / "n1"
        return ["sh", str(directory / token / "guard.sh"), operation, str(directory), token, *arguments]


@asynccontextmanager
async def node_in(directory: Path) -> AsyncIterator[Node]:
    node = Node(directory)
    try:
        yield node
    finally:
        await node.guard.disarm(node.context())  # so that its timer ends


def prepend_path(node: Node, directory: Path) -> None:
    """Let the node find the programs of a directory before its own."""
    wrap, path = node.shell.wrap, f"PATH={directory}:{os.environ['PATH']}"
    node.shell.wrap = lambda command: ["env", path, *wrap(command)]


def picture(root: Path) -> dict[str, Any]:
    """Return the type, mode, owner and content of everything at and below a path."""
    found = {}
    for path in (root, *sorted(root.rglob("*"))):
        is_there = path.is_symlink() or path.exists()
        if is_there:
            about = path.lstat()
            content: Any = path.readlink() if path.is_symlink() else None
            content = path.read_bytes() if stat.S_ISREG(about.st_mode) else content
            found[str(path)] = (about.st_mode, about.st_uid, about.st_gid, content)
    return found


def fill(etc: Path) -> None:
    """Make everything that a restore must make again."""
    (etc / "netplan").mkdir(mode=0o750)
    (etc / "netplan" / "01 eth.yaml").write_bytes(b"network:\n\x00\xff")
    (etc / "netplan" / "01 eth.yaml").chmod(0o600)
    (etc / "netplan" / "empty").mkdir()
    (etc / "netplan" / "link").symlink_to("01 eth.yaml")
    (etc / "netplan" / "dangling").symlink_to("/no/such/file")
    (etc / "app.conf").write_text("port 1\n")
    (etc / "resolv.conf").symlink_to("netplan")
    (etc / "sshd.d").mkdir()
    (etc / "motd").write_text("hello")
    if os.geteuid() == 0:
        os.chown(etc / "app.conf", 1234, 4321)
        (etc / "app.conf").chmod(0o4755)


def ruin(etc: Path) -> None:
    """Change every path in another way."""
    shutil.rmtree(etc / "netplan")
    (etc / "netplan").write_text("a file now")
    (etc / "app.conf").unlink()
    (etc / "resolv.conf").unlink()
    (etc / "resolv.conf").mkdir()
    (etc / "resolv.conf" / "x").write_text("x")
    (etc / "sshd.d" / "new.conf").write_text("PasswordAuthentication yes")
    (etc / "sshd.d").chmod(0o700)
    (etc / "absent").mkdir()
    (etc / "absent" / "x").write_text("x")
    (etc / "motd").unlink()
    (etc / "motd").symlink_to("/etc")


async def test_restore_is_byte_identical(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        fill(node.etc)
        before = picture(node.etc)
        names = ("netplan", "app.conf", "resolv.conf", "sshd.d", "motd", "absent")
        paths = [node.etc / name for name in names]
        ctx = node.context(*paths)
        await node.arm(ctx)
        ruin(node.etc)
        assert picture(node.etc) != before
        report = await node.guard.restore(ctx)
        assert report.restored == tuple(sorted(str(path) for path in paths))
        assert report.problems == ()
        assert picture(node.etc) == before


async def test_whole_directory_is_restored(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        fill(node.etc)
        before = picture(node.etc)
        ctx = node.context()
        await node.arm(ctx)
        ruin(node.etc)
        assert (await node.guard.restore(ctx)).restored == (str(node.etc),)
        assert picture(node.etc) == before
        assert [path.name for path in tmp_path.iterdir() if "rolloutd" in path.name] == []


async def test_commands_run_after_restore_and_failures_are_listed(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        path = node.etc / "a"
        path.write_text("before")
        ctx = node.context(path, commands=[f"cp {path} {node.etc}/seen", "exit 3", "true"])
        await node.arm(ctx)
        path.write_text("after")
        report = await node.guard.restore(ctx)
        assert (node.etc / "seen").read_text() == "before"
        assert report.problems == ("`exit 3` ended with 3",)


async def test_timer_that_finds_restore_locked_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = node_guard.GUARD_SCRIPT.replace("LOCK_WAIT_S=20 ", "LOCK_WAIT_S=0 ")
    monkeypatch.setattr(node_guard, "GUARD_SCRIPT", script)
    async with node_in(tmp_path) as node:
        path = node.etc / "a"
        path.write_text("before")
        await node.arm(node.context(path))
        os.kill(int((node.guard_dir / "watcher").read_text()), signal.SIGKILL)  # it would take the lock too
        path.write_text("after")
        expire = node.script("expire", "r1.1", "timer", "now")
        with (node.guard_dir / "restore.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of a restore that is killed before its end
            assert subprocess.run(expire, check=False).returncode == 1  # systemd restarts what failed
        assert path.read_text() == "after"
        assert subprocess.run(expire, check=False).returncode == 0
        assert path.read_text() == "before"


async def test_command_that_ignores_its_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = node_guard.GUARD_SCRIPT
    for name in ("COMMAND_LIMIT_S=60 ", "KILL_AFTER_S=10 "):
        script = script.replace(name, f"{name.partition('=')[0]}=0.2 ")
    monkeypatch.setattr(node_guard, "GUARD_SCRIPT", script)
    async with node_in(tmp_path) as node:
        ctx = node.context(commands=["trap '' TERM; sleep 600", f"touch {tmp_path}/next"])
        await node.arm(ctx)
        report = await node.guard.restore(ctx)
        assert report.problems == ("`trap '' TERM; sleep 600` ended with 137",)
        assert (tmp_path / "next").exists()


async def test_confirmation_outlasts_loss_of_power(tmp_path: Path) -> None:
    log, program = tmp_path / "log", tmp_path / "bin" / "sync"
    program.parent.mkdir()
    async with node_in(tmp_path) as node:
        await node.arm(node.context())
        program.write_text(f"#!/bin/sh\nls {node.guard_dir}/confirmed && echo $@ >> {log}\n")
        program.chmod(0o755)
        prepend_path(node, program.parent)
        assert (await node.guard.disarm(node.context())).state is GuardState.CONFIRMED
        assert str(node.guard_dir) in log.read_text().split()


async def test_guard_of_other_rollout_without_timer_is_left_to_people(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        path = node.etc / "a"
        path.write_text("before")
        ctx, later = node.context(path), replace(node.context(path), rollout="r2")
        await node.arm(ctx)
        process = Path("/proc", (node.guard_dir / "watcher").read_text().strip(), "cmdline")
        os.kill(int(process.parent.name), signal.SIGKILL)  # as a reboot does
        # It ends only when it gets the processor, and until then it counts as a timer.
        await wait_in_loop_until(lambda: not process.exists() or not process.read_bytes())
        path.write_text("changed by others since")
        with pytest.raises(AdapterFailed, match=f"guard.sh expire .* or remove {node.guard_dir}"):
            await node.guard.arm(later, order="1.8 database 1800000001")
        assert path.read_text() == "changed by others since"
        # A retry of the same rollout restores what its attempt has left.
        retried = replace(ctx, attempt=2)
        assert (await node.guard.arm(retried, order="1.8 database 1800000001")).state is GuardState.ARMED
        assert path.read_text() == "before"
        await node.guard.disarm(retried)


async def test_timer_slow_to_begin_is_started_once(tmp_path: Path) -> None:
    log, program = tmp_path / "log", tmp_path / "bin" / "setsid"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho $$ >> {log}\nsleep 0.3\nexec {shutil.which("setsid")} "$@"\n')
    program.chmod(0o755)
    async with node_in(tmp_path) as node:
        prepend_path(node, program.parent)
        await node.arm(node.context())
        assert (node.guard_dir / "watcher").read_text() == log.read_text()


async def test_exactly_one_of_disarm_and_timer_wins(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        path = node.etc / "a"
        path.write_text("before")
        await node.arm(node.context(path))
        tokens = [f"r1.{number}" for number in range(10, 10 + RACES)]
        for token in tokens:
            shutil.copytree(node.guard_dir, node.guard_dir.with_name(token))
        path.write_text("after")
        racers = [
            subprocess.Popen(node.script(*racer), stdout=subprocess.DEVNULL)
            for token in tokens
            for racer in (("disarm", token), ("expire", token, "timer", "now"))
        ]
        assert [racer.wait() for racer in racers] == [0] * len(racers)
        ends = [
            {end for end in ("confirmed", "restored", "armed") if (node.guards / "n1" / token / end).exists()}
            for token in tokens
        ]
        assert all(end in ({"confirmed"}, {"restored"}) for end in ends)


async def test_interrupted_restore_is_continued(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        path = node.etc / "a"
        path.write_text("before")
        ctx = node.context(path)
        await node.arm(ctx)
        path.write_text("after")
        # A restore that was killed after it had won.
        (node.guard_dir / "armed").rename(node.guard_dir / "restoring")
        assert (await node.guard.disarm(ctx)).state is GuardState.RESTORING
        assert (await node.guard.restore(ctx)).restored == (str(path),)
        assert path.read_text() == "before"


async def test_change_after_restore_is_restored_again_by_daemon(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        path = node.etc / "a"
        path.write_text("before")
        ctx = node.context(path)
        await node.arm(ctx)
        assert (await node.guard.restore(ctx)).restored == ()
        path.write_text("changed by a run that went on")
        assert (await node.guard.restore(ctx)).restored == (str(path),)
        assert path.read_text() == "before"


async def test_damaged_backup_is_not_restored(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        path = node.etc / "a"
        path.write_text("before")
        ctx = node.context(path)
        await node.arm(ctx)
        path.write_text("after")
        (node.guard_dir / "backup" / "1").write_text("damaged")
        report = await node.guard.restore(ctx)
        assert report.problems == (f"{path}: its backup is damaged; restore it by hand",)
        assert path.read_text() == "after"


async def test_what_cannot_be_backed_up_cannot_arm(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        os.mkfifo(node.etc / "pipe")
        with pytest.raises(AdapterFailed, match="is not a file"):
            await node.guard.arm(node.context(node.etc / "pipe"), order=ORDER)
        with pytest.raises(AdapterFailed, match="name an absolute path"):
            await node.guard.arm(node.context(Path("/etc/../shadow")), order=ORDER)
        assert not node.guard_dir.exists()


async def test_guard_is_for_its_user_only_and_leaves_no_backup(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        ctx = node.context()
        await node.arm(ctx)
        assert stat.S_IMODE((node.guards / "n1").stat().st_mode) == 0o700
        assert stat.S_IMODE(node.guard_dir.stat().st_mode) == 0o700
        await node.guard.disarm(ctx)
        assert not (node.guard_dir / "backup").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can hide a directory from a login")
async def test_login_that_cannot_see_guard_is_no_node_without_guard(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        ctx, as_root = node.context(), node.shell.wrap
        await node.arm(ctx)
        node.shell.wrap = lambda command: ["setpriv", "--reuid=65534", "--clear-groups", *as_root(command)]
        for operation in (node.guard.renew, node.guard.disarm, node.guard.restore, node.guard.inspect):
            with pytest.raises(AdapterFailed, match="cannot become root"):
                await operation(ctx)
        node.shell.wrap = lambda command: ["true"]
        with pytest.raises(AdapterFailed, match="no state"):
            await node.guard.inspect(ctx)
        node.shell.wrap = as_root
        assert (await node.guard.disarm(ctx)).state is GuardState.CONFIRMED


async def test_interrupted_disarm_is_continued(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        ctx = node.context()
        await node.arm(ctx)
        (node.guard_dir / "armed").rename(node.guard_dir / "confirmed")
        assert (await node.guard.disarm(ctx)).state is GuardState.CONFIRMED
        assert not (node.guard_dir / "backup").exists()


async def test_missing_parents_are_restored_with_their_modes(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        path = node.etc / "app" / "conf d" / "a"
        path.parent.mkdir(parents=True)
        path.write_text("before")
        path.parent.chmod(0o751)
        (node.etc / "app").chmod(0o755)
        before = picture(node.etc)
        ctx = node.context(path)
        await node.arm(ctx)
        shutil.rmtree(node.etc / "app")
        await node.guard.restore(ctx)
        assert picture(node.etc) == before


async def test_path_that_command_writes_is_restored_once(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        path, log = node.etc / "a", node.etc / "log"
        path.write_text("before")
        ctx = node.context(path, commands=[f"echo generated > {path}; echo ran >> {log}"])
        await node.arm(ctx)
        path.write_text("after")
        for _ in range(3):
            assert (await node.guard.restore(ctx)).state is GuardState.RESTORED
        assert log.read_text() == "ran\n"


async def test_arm_that_waits_for_another_may_be_armed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with node_in(tmp_path) as node:
        script = node_guard.GUARD_SCRIPT.replace("LOCK_WAIT_S=20 ", "LOCK_WAIT_S=0 ")
        monkeypatch.setattr(node_guard, "GUARD_SCRIPT", script)
        (node.guards / "n1").mkdir(parents=True)
        with (node.guards / "n1" / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with pytest.raises(TimeoutError, match="being armed"):
                await node.guard.arm(node.context(), order=ORDER)


SYSTEMD = """\
mount -t tmpfs none /run && mount -t tmpfs none /etc/systemd
mkdir -p /run/systemd/system /etc/systemd/system
PATH={bin}:$PATH
{command}
cp /etc/systemd/system/*.service {bin} 2>/dev/null
exit 0
"""

SYSTEMCTL = """\
#!/bin/sh
echo "$@" >> {log}
case $* in *is-active*) exit 3 ;; esac
"""

SYSTEMD_RUN = """\
#!/bin/sh
echo "$@" >> {log}
for word do
    case $word in --on-active=*) delay=${{word#*=}} ;; esac
    case $word in --*) shift ;; *) break ;; esac
done
setsid sh -c 'sleep "$0"; exec "$@"' "${{delay%s}}" "$@" < /dev/null > /dev/null 2>&1 &
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a process its own /run")
async def test_systemd_holds_timer_and_boot_unit(tmp_path: Path) -> None:
    log, bin_dir = tmp_path / "log", tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "systemd-run").write_text(SYSTEMD_RUN.format(log=log))
    (bin_dir / "systemctl").write_text(SYSTEMCTL.format(log=log))
    (bin_dir / "sync").write_text(f"#!/bin/sh\necho sync >> {log}\n")
    for program in bin_dir.iterdir():
        program.chmod(0o755)
    node = Node(tmp_path)
    inside = SYSTEMD.format(bin=bin_dir, command="{command}")
    node.shell.wrap = lambda command: ["unshare", "-m", "sh", "-c", inside.format(command=f"( {command} )")]
    path = node.etc / "a"
    path.write_text("before")
    ctx = node.context(path, after=1, across_reboot=True)
    await node.arm(ctx)
    path.write_text("after")
    unit = next(bin_dir.glob("rolloutd-guard-*-boot.service"))
    text = log.read_text()
    assert f"--unit={unit.name.removesuffix('-boot.service')} --on-active=1s" in text
    assert f"enable {unit.name}" in text
    async with asyncio.timeout(LIMIT_S):
        while not (node.guard_dir / "restored").exists():
            await asyncio.sleep(0.05)
    assert path.read_text() == "before"
    # What the unit starts at boot finds nothing left to do.
    started = next(line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
    path.write_text("later")
    assert subprocess.run(shlex.split(started.removeprefix("ExecStart=")), check=False).returncode == 0
    assert path.read_text() == "later"
    # An interrupted disarm is finished, and its answer outlasts a loss of power.
    again = replace(node.context(path, after=5, across_reboot=True), attempt=2)
    await node.guard.arm(again, order="1.8 database 1800000001")
    directory = node.guard_dir.with_name("r1.2")
    (directory / "armed").rename(directory / "confirmed")
    log.write_text("")
    assert (await node.guard.disarm(again)).state is GuardState.CONFIRMED
    stopped, synced = log.read_text().splitlines()
    assert (stopped.split()[0], synced) == ("stop", "sync")


async def test_reboot_begins_time_again(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        path = node.etc / "a"
        path.write_text("before")
        await node.arm(node.context(path))
        path.write_text("after")
        (node.guard_dir / "after").write_text("0\n")
        (node.guard_dir / "deadline").write_text("999999999\n")  # by the clock of the boot before
        assert subprocess.run(node.script("boot"), check=False, timeout=LIMIT_S).returncode == 0
        assert path.read_text() == "before"
