"""The guard on full disks, below mounts and across a loss of power."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.rolloutd.adapters.ssh.test_node_guard import fill, node_in, picture, prepend_path

FULL_DISK = """\
#!/bin/sh
# `cp` of a full disk: it writes a part of a file, and of a directory the first one.
case $1 in -al) exec {cp} "$@" ;; esac
[ "$#" = 4 ] || exec {cp} "$@"
if [ -d "$3" ]; then mkdir "$4"; elif [ -f "$3" ]; then head -c 2 "$3" > "$4"; else exec {cp} "$@"; fi
exit 1
"""


async def test_full_disk_cuts_no_restored_file(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "cp"
    program.parent.mkdir()
    program.write_text(FULL_DISK.format(cp=shutil.which("cp")))
    async with node_in(tmp_path) as node:
        fill(node.etc)
        before, paths = picture(node.etc), [node.etc / name for name in ("netplan", "app.conf", "motd")]
        ctx = node.context(*paths)
        await node.arm(ctx)
        (node.etc / "netplan" / "01 eth.yaml").write_text("of the change")
        (node.etc / "app.conf").write_text("of the change")
        (node.etc / "motd").unlink()
        program.chmod(0o755)
        prepend_path(node, program.parent)
        assert (await node.guard.restore(ctx)).problems == ()
        assert picture(node.etc) == before


async def test_copy_that_is_not_whole_replaces_nothing(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "cp"
    program.parent.mkdir()
    program.write_text(FULL_DISK.format(cp=shutil.which("cp")).replace("-al) exec", "-al) exit 1; exec"))
    async with node_in(tmp_path) as node:
        path, directory = node.etc / "a", node.etc / "d"
        path.write_text("before")
        directory.mkdir()
        (directory / "b").write_text("before")
        ctx = node.context(path, directory)
        await node.arm(ctx)
        path.write_text("after")
        (directory / "b").write_text("after")
        program.chmod(0o755)
        prepend_path(node, program.parent)
        problems = [f"{each}: it differs from its backup; restore it by hand" for each in (path, directory)]
        assert (await node.guard.restore(ctx)).problems == tuple(problems)
        assert (path.read_text(), (directory / "b").read_text()) == ("after", "after")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize("place", ["etc/data", "etc/d d", "etc/d d/mount", "etc/new"])
async def test_file_system_below_guarded_path_keeps_its_files(tmp_path: Path, place: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("not of the change")
    async with node_in(tmp_path) as node:
        (node.etc / "d d" / "mount").mkdir(parents=True)
        (node.etc / "a").write_text("before")
        ctx = node.context(*([node.etc] if place == "etc/data" else [node.etc / "d d", node.etc / "new"]))
        await node.arm(ctx)
        (node.etc / "a").write_text("after")
        (tmp_path / place).mkdir(exist_ok=True)
        inside = f"mount --bind {outside} '{tmp_path / place}' && {{command}}"
        node.shell.wrap = lambda command: [
            "unshare", "-m", "sh", "-c", inside.format(command=f"( {command} )")
        ]  # fmt: skip
        report = await node.guard.restore(ctx)
        assert (outside / "precious").read_text() == "not of the change"
        assert report.problems != ()
        assert (node.etc / "a").read_text() == ("before" if place == "etc/data" else "after")


async def test_restore_needs_no_new_file_of_its_own(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        await node.arm(node.context())
        names = {each.name for each in node.guard_dir.iterdir()}
        assert {"listed", "output", "record", "restore.lock"} <= names


SYNC = """\
#!/bin/sh
state=none
for name in armed restoring; do [ ! -e {guard}/$name ] || state=$name; done
echo "$state $*" >> {log}
"""


async def test_guard_and_restore_outlast_loss_of_power(tmp_path: Path) -> None:
    log, program = tmp_path / "log", tmp_path / "bin" / "sync"
    program.parent.mkdir()
    async with node_in(tmp_path) as node:
        path = node.etc / "a"
        path.write_text("before")
        program.write_text(SYNC.format(guard=node.guard_dir, log=log))
        program.chmod(0o755)
        prepend_path(node, program.parent)
        await node.arm(node.context(path))
        path.write_text("after")
        await node.guard.restore(node.context(path))
        lines = log.read_text().splitlines()
        # What is armed has its backup, and what is restored has its files.
        assert [line.split()[0] for line in lines] == ["none", "armed", "restoring"]
        assert all(f"{node.guard_dir}/paths" in line.split() for line in lines[:2])
        assert str(path) in lines[2].split()
