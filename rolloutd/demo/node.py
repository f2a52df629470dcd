"""One node's world: a directory that stands for its disk, its kernel and its faults.

    bin/          commands that come before the machine's own: sysctl, healthcheck, drain, sudo
    proc/sys/     the kernel parameters as they are; boot/sys/ as they were at boot
    etc/sysctl.d/ files that `sysctl --system` reads
    tmp/          what Ansible writes
    fault         the kind of the fault that is set, if there is one

A fault is a file, so that another process can set and heal it.  How commands
get here is the server's affair; nothing here outlives the directory.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path


class Fault(StrEnum):
    """What can be wrong with a node."""

    SSHD_REFUSES = "sshd-refuses"
    TASK_FAILS = "task-fails"
    CHECK_WRONG = "check-wrong"
    DRAIN_FAILS = "drain-fails"


BOOT_PARAMETERS = {
    "fs.file-max": "1048576",
    "fs.inotify.max_user_watches": "65536",
    "kernel.panic": "0",
    "kernel.pid_max": "32768",
    "net.core.netdev_max_backlog": "1000",
    "net.core.rmem_max": "212992",
    "net.core.somaxconn": "4096",
    "net.core.wmem_max": "212992",
    "net.ipv4.ip_forward": "0",
    "net.ipv4.tcp_fin_timeout": "60",
    "net.ipv4.tcp_max_syn_backlog": "1024",
    "net.ipv4.tcp_tw_reuse": "2",
    "vm.max_map_count": "65530",
    "vm.overcommit_memory": "0",
    "vm.swappiness": "60",
}
"""The kernel parameters that a node has, with Linux's own values at boot."""

_SYSCTL = r"""#!/bin/sh
# A node's sysctl(8): its kernel is the directory proc/sys beside bin/.
root=${0%/bin/sysctl}
fault=$(cat "$root/fault" 2>/dev/null)
values=no quiet=no writes=no status=0

place() { printf '%s/%s/sys/%s' "$root" "$1" "$(printf %s "$2" | tr . /)"; }

complain() { echo "sysctl: $1" >&2; status=${2:-255}; }

missing() { complain "cannot stat /proc/sys/$(printf %s "$1" | tr . /): No such file or directory"; }

show() {
    file=$(place proc "$1")
    [ -f "$file" ] || { missing "$1"; return; }
    [ "$fault" = check-wrong ] && file=$(place boot "$1")
    [ "$values" = yes ] && cat "$file" || echo "$1 = $(cat "$file")"
}

set_one() {
    key=$(echo "${1%%=*}" | tr -d ' \t-')
    value=$(echo "${1#*=}" | sed 's/^[ \t]*//; s/[ \t]*$//')
    file=$(place proc "$key")
    [ -f "$file" ] || { missing "$key"; return; }
    [ "$fault" = task-fails ] && { complain "setting key \"$key\": Input/output error" 1; return; }
    echo "$value" > "$file.$$" && mv "$file.$$" "$file"
    [ "$quiet" = yes ] || echo "$key = $value"
}

load() {
    [ -f "$1" ] || { complain "cannot open \"$1\": No such file or directory"; return; }
    while IFS= read -r line || [ -n "$line" ]; do
        case $line in *=*) case $line in [\#\;]*) ;; *) set_one "$line" ;; esac ;; esac
    done < "$1"
}

while [ $# -gt 0 ]; do
    case $1 in
    -n | --values) values=yes ;;
    -q | --quiet) quiet=yes ;;
    -e | --ignore) ;;
    -w | --write) writes=yes ;;
    -a | --all)
        for file in $(cd "$root/proc/sys" && find . -type f | sort); do
            show "$(echo "${file#./}" | tr / .)"
        done ;;
    --system)
        for file in "$root"/etc/sysctl.d/*.conf "$root/etc/sysctl.conf"; do
            [ -f "$file" ] && { [ "$quiet" = yes ] || echo "* Applying $file ..."; load "$file"; }
        done ;;
    -p | --load)
        if [ $# -gt 1 ]; then shift; load "$1"; else load "$root/etc/sysctl.conf"; fi ;;
    -p* | --load=*) file=${1#--load=}; load "${file#-p}" ;;
    -*) echo "sysctl: invalid option $1" >&2; exit 1 ;;
    *=*) set_one "$1" ;;
    *) [ "$writes" = yes ] && complain "\"$1\" must be of the form name=value" 1 || show "$1" ;;
    esac
    shift
done
exit "$status"
"""

_HEALTHCHECK = r"""#!/bin/sh
# What a team asks of its service on this node.
root=${0%/bin/healthcheck}
if [ "$(cat "$root/fault" 2>/dev/null)" = check-wrong ]; then
    echo "unhealthy: the service answers 503"
    exit 1
fi
echo "healthy"
"""

_SUDO = r"""#!/bin/sh
# A node's user may do anything in the node's world already.
while [ $# -gt 0 ]; do
    case $1 in
    --) shift; break ;;
    -u | -g | -p | -U | -C | -r | -t) shift ;;
    -*) ;;
    *=*) export "$1" ;;
    *) break ;;
    esac
    shift
done
exec "$@"
"""

_DRAIN = r"""#!/bin/sh
# Takes the node's service out of service and puts it back; --check says which it is.
root=${0%/bin/drain}
case $1 in
--check) [ -e "$root/drained" ] ;;
--undo) rm -f "$root/drained"; echo "in service" ;;
*)
    if [ "$(cat "$root/fault" 2>/dev/null)" = drain-fails ]; then
        echo "drain: 3 connections do not end" >&2
        exit 1
    fi
    : > "$root/drained"
    echo "drained" ;;
esac
"""

_COMMANDS = {"sysctl": _SYSCTL, "healthcheck": _HEALTHCHECK, "drain": _DRAIN, "sudo": _SUDO}


class NodeDirectory:
    """The directory of one node, in this process or another's."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def remote_tmp(self) -> Path:
        """Where Ansible keeps its files on the node."""
        return self.root / "tmp" / "ansible"

    def make(self) -> None:
        """Write what is missing; the parameters of a node that was here before are kept."""
        for name in ("bin", "etc/sysctl.d", "tmp/ansible"):
            (self.root / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, text in _COMMANDS.items():
            path = self.root / "bin" / name
            path.write_text(text)
            path.chmod(0o755)
        for key, value in BOOT_PARAMETERS.items():
            for kernel in ("boot", "proc"):
                path = self.root / kernel / "sys" / key.replace(".", "/")
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.exists():
                    path.write_text(f"{value}\n")

    def environment(self) -> dict[str, str]:
        """Return the environment of the node's commands; nothing of ours is passed on."""
        return {
            "PATH": f"{self.root}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(self.root),
            "TMPDIR": str(self.root / "tmp"),
            "SHELL": "/bin/sh",
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def fault(self) -> Fault | None:
        """Return the fault that is set."""
        try:
            return Fault((self.root / "fault").read_text().strip())
        except FileNotFoundError:
            return None

    def set_fault(self, fault: Fault) -> None:
        """Let something be wrong from now on."""
        fresh = self.root / f".fault.{os.getpid()}"
        fresh.write_text(f"{fault}\n")
        fresh.rename(self.root / "fault")

    def heal(self) -> None:
        """Let nothing be wrong any more."""
        (self.root / "fault").unlink(missing_ok=True)
