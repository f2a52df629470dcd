"""One node: a directory with its disk, its kernel parameters and its fault.

    bin/          commands that hide the machine's own: sysctl, healthcheck, drain, sudo
    proc/sys/     the current kernel parameters; boot/sys/ those at boot
    etc/sysctl.d/ files that `sysctl --system` reads
    tmp/          what Ansible writes
    fault         the kind of the fault, if one is set

A fault is a file, so that another process can set and clear it.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path


class Fault(StrEnum):
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
"""A node's kernel parameters, with Linux's values at boot."""

_SYSCTL = r"""#!/bin/sh
# A node's sysctl(8): its kernel is the directory proc/sys next to bin/.
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
# A team's check of its service on this node.
root=${0%/bin/healthcheck}
if [ "$(cat "$root/fault" 2>/dev/null)" = check-wrong ]; then
    echo "unhealthy: the service answers 503"
    exit 1
fi
echo "healthy"
"""

_SUDO = r"""#!/bin/sh
# A node's user may write all of the node's files already.
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
# Takes the node out of service; --undo returns it, --check succeeds if it is drained.
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
    """The directory of one node."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def remote_tmp(self) -> Path:
        """Ansible's temporary directory on the node."""
        return self.root / "tmp" / "ansible"

    def create(self) -> None:
        """Write the missing files; an existing node keeps its parameters."""
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
        """Return the environment of the node's commands; they inherit nothing of this process."""
        return {
            "PATH": f"{self.root}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(self.root),
            "TMPDIR": str(self.root / "tmp"),
            "SHELL": "/bin/sh",
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def current_fault(self) -> Fault | None:
        try:
            return Fault((self.root / "fault").read_text().strip())
        except FileNotFoundError:
            return None

    def set_fault(self, fault: Fault) -> None:
        fresh = self.root / f".fault.{os.getpid()}"
        fresh.write_text(f"{fault}\n")
        fresh.rename(self.root / "fault")

    def clear_fault(self) -> None:
        (self.root / "fault").unlink(missing_ok=True)
