"""Snapshots of this machine, and the parser of what nodes of other kinds write."""

from __future__ import annotations

import shlex
import socket
from pathlib import Path

import pytest

from machines.model.node_snapshot import differences
from rolloutd.adapters.ssh import shell_adapter, snapshot
from rolloutd.adapters.ssh.snapshot import SshSnapshots, parse_snapshot
from rolloutd.errors import AdapterFailed
from rolloutd.ports import Host, ShellResult
from tests.contracts.fakes.shell import FakeShell
from tests.support.local_shell import LocalShell

LIMIT_S = 60.0

SYSTEMD_NODE = r"""
@boot
b1
@tcp
0100007F:1F90 77
00000000000000000000000001000000:1F90 79
@udp
00000000:0044 80
00000000:9C41 81
@ephemeral
32768	60999
@units
MainPID=812
Id=app.service
ActiveState=active
ActiveEnterTimestampMonotonic=4711

Id=app.socket
ActiveState=active
ActiveEnterTimestampMonotonic=12

MainPID=0
Id=bad.service
ActiveState=failed
ActiveEnterTimestampMonotonic=0

MainPID=0
Id=idle.service
ActiveState=inactive
ActiveEnterTimestampMonotonic=0
@modules
nvme
@routes
default via 10.0.0.1 dev eth0 proto dhcp src 10.0.0.5 metric 100
default via fe80::1 dev eth0 proto ra metric 100 expires 1789sec pref medium
local 10.0.0.5 dev eth0 table local proto kernel scope host src 10.0.0.5
@addresses
2: eth0    inet 10.0.0.5/24 brd 10.0.0.255 scope global dynamic eth0\    valid_lft 8sec preferred_lft 8sec
2: eth0    inet6 2001:db8::9/64 scope global temporary dynamic \    valid_lft 60sec preferred_lft 9sec
@sysctls
/proc/sys/net/ipv4/conf/eth0.7/rp_filter:2
/proc/sys/kernel/core_pattern:|/usr/bin/core	%p
@mounts
/dev/vda1 / ext4 rw,relatime 0 0
@locks
1: POSIX  ADVISORY  WRITE 4007 fe:00:555 0 EOF
@lock-files
555 /var/lib/dpkg/lock-frontend
556 /var/lib/dpkg/lock
@end
"""

ENTRIES = {
    "boot-id": "b1",
    "port/tcp/8080": "127.0.0.1, ::1",
    "port/udp/68": "0.0.0.0",
    "unit/app.service": "pid 812, active since 4711 us",
    "unit/app.socket": "active since 12 us",
    "failed-unit/bad.service": "failed",
    "module/nvme": "loaded",
    "route/default": "via 10.0.0.1 dev eth0 proto dhcp src 10.0.0.5 metric 100,"
    " via fe80::1 dev eth0 proto ra metric 100 pref medium",
    "address/eth0/10.0.0.5/24": "brd 10.0.0.255 scope global eth0",
    "sysctl/net.ipv4.conf.eth0/7.rp_filter": "2",
    "sysctl/kernel.core_pattern": "|/usr/bin/core %p",
    "mount/": "/dev/vda1 ext4 rw,relatime",
    "package-lock/var/lib/dpkg/lock-frontend": "held",
}

NODE_WITHOUT_TOOLS = """
@tcp
00000000:0016 77
@listeners
77 31 (sshd: a) b) S 1 31 31 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 900 11 12 13
77 30 (sshd) S 1 30 30 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 500 11 12 13
99 40 (other) S 1 30 30 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 100 11 12 13
@proc-routes
Iface	Destination	Gateway	Metric	Mask
eth0	00000000	0100000A	100	00000000
@proc-addresses
fe80000000000000000000fffe000001 04 40 20 80     eth0
@end
"""


def test_node_with_systemd_is_read() -> None:
    assert parse_snapshot(SYSTEMD_NODE) == ENTRIES


def test_node_without_systemd_and_ip_is_read() -> None:
    assert parse_snapshot(NODE_WITHOUT_TOOLS) == {
        "port/tcp/22": "0.0.0.0",
        "process/tcp/22": "sshd pid 30, since tick 500",
        "route/00000000/00000000": "dev eth0 via 0100000A metric 100",
        "address/eth0/fe80000000000000000000fffe000001": "prefix 40",
    }


def test_long_values_differ_behind_their_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"/proc/sys/a:{'x' * 1000}"
    before, after = (parse_snapshot(f"@sysctls\n{line}{end}\n@end\n") for end in "yz")
    assert len(differences(before, after)) == 1
    assert len(before["sysctl/a"]) < 500
    monkeypatch.setattr(snapshot, "MAX_ENTRIES", 3)
    assert len(parse_snapshot(SYSTEMD_NODE)) == 3


@pytest.mark.parametrize("output", ["", "gzip\n", "gzip\nAAAA\n", "plain\n@boot\nb1\n", "gzip\nü\n"])
async def test_incomplete_output_is_an_error(output: str) -> None:
    shell = FakeShell()
    shell.run = lambda *_, **__: answer(output)  # type: ignore[method-assign]
    with pytest.raises(AdapterFailed, match="not complete"):
        await SshSnapshots(shell).snapshot(Host("n1"), timeout_s=LIMIT_S)


async def answer(output: str) -> ShellResult:
    return ShellResult(0, output, "")


async def test_upgrade_below_the_daemon_changes_no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    def removed(package: str) -> Path:
        raise FileNotFoundError(package)

    monkeypatch.setattr(shell_adapter, "files", removed)
    with pytest.raises(AdapterFailed, match="is not complete"):
        await SshSnapshots(FakeShell()).snapshot(Host("n1"), timeout_s=LIMIT_S)


async def test_only_the_changed_port_differs() -> None:
    snapshots, host = SshSnapshots(LocalShell()), Host("n1")
    # Other tests listen and mount on this machine meanwhile.
    others = ("port/*", "process/*", "mount/*")
    before = await snapshots.snapshot(host, timeout_s=LIMIT_S)
    assert before["boot-id"]
    assert before["sysctl/kernel.ostype"] == "Linux"
    assert before["sysctl/fs.file-max"] == Path("/proc/sys/fs/file-max").read_text().strip()
    assert "mount/" in before
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        after = await snapshots.snapshot(host, timeout_s=LIMIT_S)
    assert differences(before, after, others) == ()
    assert f"port/tcp/{port}: absent -> 127.0.0.1" in differences(before, after)


async def test_failing_tool_makes_the_snapshot_incomplete(tmp_path: Path) -> None:
    tool = tmp_path / "ip"
    tool.write_text("#!/bin/sh\necho default via 10.0.0.1\nexit 1\n")
    tool.chmod(0o755)
    shell = FakeShell()

    async def run(host: Host, command: str, *, timeout_s: float, stdin: str = "") -> ShellResult:
        path = f"PATH={shlex.quote(str(tmp_path))}:$PATH; export PATH; "
        return await LocalShell().run(host, path + command, timeout_s=timeout_s, stdin=stdin)

    shell.run = run  # type: ignore[method-assign]
    with pytest.raises(AdapterFailed, match="not complete"):
        await SshSnapshots(shell).snapshot(Host("n1"), timeout_s=LIMIT_S)
