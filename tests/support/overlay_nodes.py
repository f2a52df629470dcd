"""Nodes with file systems, processes and a boot of their own, on loopback; they share this machine's network.

/etc, /usr, /var, /opt and /srv of a node are overlays: what a playbook writes to a real path is seen on no
other node, nor on this machine.  Commands that stand for what a node lacks (a service manager, a GPU, a
reboot) are at the real commands' paths.  It needs root and overlayfs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.support.daemon_environment import DaemonEnvironment
from tests.support.sshd import Sshd

LAYERS = ("etc", "usr", "var", "opt", "srv")

# PID 1 of a node: it mounts, and starts sshd again when it ends.  A boot ends when sshd ends.
_INIT = """\
[ $$ = 1 ] || exit 1
directory=$1; shift
for layer in etc usr var opt srv; do
    mkdir -p "$directory/$layer" "$directory/scratch/$layer"
    options="lowerdir=/$layer,upperdir=$directory/$layer,workdir=$directory/scratch/$layer"
    mount -t overlay overlay -o "$options" "/$layer" || exit 1
done
mkdir -p "$directory/run/sshd" && mount --bind "$directory/run" /run || exit 1
# No package comes from the network.
rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /var/lib/apt/lists/*
readlink /proc/self/ns/pid > "$directory/namespace"
cat /proc/sys/kernel/random/boot_id > "$directory/boot_id"
mount --bind "$directory/boot_id" /proc/sys/kernel/random/boot_id
while :; do "$@" & wait $!; done
"""

_SHUTDOWN = """\
#!/bin/sh
# Elsewhere it would end all processes of this machine.
[ "$(readlink /proc/self/ns/pid)" = "$(cat {private}/namespace)" ] || exit 1
rm -f /run/reboot-required
cat /proc/sys/kernel/random/uuid > {private}/boot_id
kill -KILL -1
"""

_SYSTEMCTL = """\
#!/bin/sh
# A service manager with one file for each active service, and a log.
mkdir -p /run/services && cd /run/services || exit 1
for last; do :; done
case $1 in
is-active) [ -e "$last" ] && echo active || { echo inactive; exit 3; } ;;
start | restart | reload) touch "$last"; echo "$1 $last" >> /run/services.log ;;
stop) rm -f "$last"; echo "$1 $last" >> /run/services.log ;;
*) exit 1 ;;
esac
"""

_SYSCTL = """\
#!/bin/sh
# A kernel that is a directory.
cd /run/kernel || exit 1
case $1 in
-n) cat "$2" ;;
-w) echo "${2#*=}" > "${2%%=*}" ;;
*) exit 1 ;;
esac
"""


class OverlayNodes(DaemonEnvironment):
    """A daemon over such nodes; write into `private(node)/LAYER` before they start."""

    def __init__(
        self,
        directory: Path,
        labels: Mapping[str, Mapping[str, str]],
        variables: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(directory, labels)
        self._variables = variables or {}
        for name in labels:
            self.write(name, "usr/sbin/shutdown", _SHUTDOWN.format(private=self.private(name)), mode=0o755)
            self.write(name, "usr/bin/systemctl", _SYSTEMCTL, mode=0o755)
            self.write(name, "usr/sbin/sysctl", _SYSCTL, mode=0o755)

    def private(self, node: str) -> Path:
        """Return the directory with the upper layers of a node and its /run."""
        return self.directory / "private" / node

    def write(self, node: str, path: str, text: str, *, mode: int = 0o644) -> None:
        """Write a file of a node that has not started, or below its /run at any time."""
        file = self.private(node) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)

    def make_sshd(self, name: str) -> Sshd:
        private = self.private(name)
        self.write(name, "init", _INIT)
        unshare = "unshare --pid --fork --kill-child --mount --mount-proc --propagation private"
        return Sshd(prefix=(*unshare.split(), "sh", str(private / "init"), str(private)))

    def start_nodes(self) -> None:
        super().start_nodes()
        path = self.directory / "hosts.yml"
        inventory = yaml.safe_load(path.read_text())
        for name, host in inventory["all"]["hosts"].items():
            del host["rolloutd_fact_path"]  # the checkpoints are in the node's own /etc
            host |= {"ansible_become": False, **self._variables.get(name, {})}
        path.write_text(yaml.safe_dump(inventory))

    def root(self, node: str) -> Path:
        """Return the root directory as a node's processes see it."""
        process = self.sshds[node]._process
        assert process is not None
        [init] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return Path(f"/proc/{init}/root")

    def snapshot(self, node: str, paths: tuple[str, ...]) -> dict[str, tuple[int, str | bytes]]:
        """Return mode and content of the files below some paths of a node, and where links lead."""
        found: dict[str, tuple[int, str | bytes]] = {}
        root = self.root(node)
        for path in paths:
            top = root / path
            files = [top] if top.is_symlink() or top.is_file() else sorted(top.rglob("*"))
            for file in files:
                status = file.lstat()
                if file.is_symlink():
                    found[str(file.relative_to(root))] = (0, str(file.readlink()))
                elif file.is_file():
                    found[str(file.relative_to(root))] = (status.st_mode & 0o7777, file.read_bytes())
        return found


def can_overlay() -> bool:
    return os.geteuid() == 0 and "overlay" in Path("/proc/filesystems").read_text()
