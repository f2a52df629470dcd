"""Search for processes of earlier runs on a node, and their end.

A run marks every process that it starts on the node in three ways, because each
way has a gap: an environment variable (sudo may drop it, other users may not
read it), a control group (only root can create one), and the command lines of
its shells (their children have other ones).  The script finds all marked
processes, with their sessions, process groups and descendants.  It follows each
of them until it has ended.  A node is clear when two searches in a row, a
second apart, find nothing.

Two kinds of processes stay: those that the service manager started, which have
no mark, and daemons that left the run and wrote a pid file.  If the login may
not inspect a process that may be the run's, the answer is `unseen`, never `clear`.

The script is POSIX sh and needs /proc, kill, grep and sleep.  It arrives on
stdin, so that its own command line has no mark.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass

from rolloutd.adapters.ssh.shell_adapter import run_as_root
from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Failed, Host, Ok, Shell, Unknown, id_of
from rolloutd.texts.formats import pluralize

GRACE_SHARE = 0.5
"""Share of the time before TERM: an interrupted package installation is worse than a wait."""

TERM_SHARE = 0.2
"""Share of the time between TERM and KILL."""

ANSWER_MARGIN_S = 30.0
"""Extra time for the node to start the script and answer."""

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@=-]*")

MACHINE_DIGITS = 12
"""Hexadecimal digits that name a machine, or rather its state directory."""

_MACHINE = re.compile(rf"@[0-9a-f]{{{MACHINE_DIGITS}}}$")

MAX_RUN_NAME = 200
"""Length of a run's name: with the marks around it, it names directories, whose names have 255 bytes."""

MARK_VARIABLE = "ROLLOUTD_RUN_MARK"
"""The environment variable that every process of a run on the node inherits."""

ENTER_CGROUP = (
    "for c in /sys/fs/cgroup /sys/fs/cgroup/unified; do [ -w $c/cgroup.procs ] && "
    "{{ [ -d $c/{marker} ] || {{ rmdir $c/{prefix}*; mkdir $c/{marker}; }}; "
    "echo {pid} >$c/{marker}/cgroup.procs && break; }}; done 2>/dev/null"
)
"""Moves a process into the run's control group if cgroup v2 is mounted and writable; else does nothing.

It contains no quotes, because it is used inside two levels of quotes.  The group
stays until the run's processes are searched for, or until the next run: each
program that a command of the run starts for it delays the run.
"""

SCRIPT = r"""
token=$1 wait_s=$2 term_s=$3 age_s=$4
shift 4
# The launcher's last argument: sudo may have changed HOME.
for home do :; done
own=$$

# Prints the pids that bear the mark of a run of this node.
marked() {
    set -- /proc/[0-9]*/environ /proc/[0-9]*/cmdline /proc/[0-9]*/cgroup
    # The brackets keep grep's own command line from matching.
    grep -lsE "[r]olloutd-run-(${token% *}|${token#* })-" "$@" 2>/dev/null | while read -r file; do
        pid=${file#/proc/}
        echo "${pid%%/*}"
    done | sort -u | tr '\n' ' '
}

# Whether the first line of a pid file names the process: in the usual places, its directory, its arguments.
has_pid_file() {
    {
        find /run /var/run/ /var/lock/ -xdev -maxdepth 3 -type f -name '*.pid'
        find /tmp /var/tmp -xdev -maxdepth 6 -type f -name '*.pid'
        find "$home" "/proc/$1/cwd/" -xdev -maxdepth 2 -type f -name '*.pid'
        tr '\0' '\n' < "/proc/$1/cmdline" | sed -n 's|^[^/]*\(/.*\.pid\)$|\1|p'
    } 2>/dev/null | while IFS= read -r file; do
        first=
        [ -f "$file" ] && { read -r first rest < "$file"; } 2>/dev/null
        [ "$first" = "$1" ] && echo yes && break
    done | grep -q yes
}

# Sets `table` to the live processes (pid:parent:group:session) and drops from `found` those that have ended.
read_table() {
    table=
    for file in /proc/[0-9]*/stat; do
        { read -r line < "$file"; } 2>/dev/null || continue
        pid=${line%% *}
        set -f; set -- ${line##*) }; set +f
        case $1 in
        Z | X) case $found in *" $pid "*) found="${found%% "$pid" *} ${found#* "$pid" }" ;; esac ;;
        *)
            table="$table $pid:$2:$3:$4"
            case "$found|$before" in *" $pid "*"|"*) ;; *"|"*" $pid "*) found="$found$pid " ;; esac ;;
        esac
    done
}

# Takes daemons out of `found`, with their descendants and sessions: a daemon has left the run's sessions and
# its parent (a double fork), and a pid file says that it is to stay.
spare_daemons() {
    daemons=' '
    for entry in $table; do
        pid=${entry%%:*} rest=${entry#*:}
        case $found in *" $pid "*) ;; *) continue ;; esac
        case $found in *" ${rest%%:*} "*) continue ;; esac
        session=${rest##*:}
        [ "$session" = "$pid" ] || case $table in *" $session:"*) continue ;; esac
        case $spared in *" $pid "*) ;; *) has_pid_file "$pid" || continue ;; esac
        daemons="$daemons$pid "
    done
    spared=$daemons
    [ "$daemons" = ' ' ] && return
    grown=yes
    while [ -n "$grown" ]; do
        grown=
        for entry in $table; do
            pid=${entry%%:*} rest=${entry#*:}
            case $daemons in *" $pid "*) continue ;; esac
            case $daemons in *" ${rest%%:*} "* | *" ${rest##*:} "*) daemons="$daemons$pid " grown=yes ;; esac
        done
    done
    for pid in $daemons; do
        case $found in *" $pid "*) found="${found%% "$pid" *} ${found#* "$pid" }" ;; esac
    done
}

# Sets `found` to the live processes of marked runs, their sessions, groups and descendants, and to what is
# left of the last look: a process that bears the mark may have ended before those that do not.
look() {
    before=$found found=" $(marked)"
    [ "$found$before" = '  ' ] && return 0
    read_table
    spare_daemons
    grown=yes
    while [ -n "$grown" ]; do
        grown=
        for entry in $table; do
            pid=${entry%%:*} rest=${entry#*:}
            case $found$daemons in *" $pid "*) continue ;; esac
            [ "$pid" = "$own" ] && continue
            group=${rest#*:}
            case $found$before in
            *" ${rest%%:*} "* | *" ${group%:*} "* | *" ${group#*:} "*) found="$found$pid " grown=yes ;;
            esac
        done
    done
}

# Prints the processes that can be the run's and that this user may not inspect: orphans of an ended session
# that are younger than the run.  Processes of a service are the service manager's.
unseen() {
    [ "$(id -u)" = 0 ] && return
    [ -d /proc/1 ] || { echo 'all of other users'; return; }
    read -r up rest < /proc/uptime
    since=$(( (${up%.*} - age_s) * $(getconf CLK_TCK 2>/dev/null || echo 100) ))
    read_table
    slice=$(grep -o '/user-[0-9]*\.slice/' /proc/self/cgroup | head -n 1)
    for file in /proc/[0-9]*/stat; do
        { read -r line < "$file"; } 2>/dev/null || continue
        pid=${line%% *}
        [ -r "/proc/$pid/environ" ] && continue
        set -f; set -- ${line##*) }; set +f
        case $1 in Z | X) continue ;; esac
        # Kernel threads have the parent 2 or no session; field 22 is the start, perhaps before the run's.
        [ "$2" = 2 ] || [ "$4" = 0 ] || [ "${20}" -lt "$since" ] && continue
        case $table in *" $4:"*) continue ;; esac
        grep -q '\.service' "/proc/$pid/cgroup" 2>/dev/null && continue
        [ -z "$slice" ] || grep -q "$slice" "/proc/$pid/cgroup" 2>/dev/null || continue
        printf '%s ' "$pid"
    done
}

send() {
    for pid in $found; do
        kill "-$1" "$pid" 2>/dev/null || sudo -n kill "-$1" "$pid" 2>/dev/null
    done
}

# Searches every second until nothing is found twice, or the given seconds are over; may signal each time.
# Twice: a command that was on its way when its run was killed here is started by sshd a moment later.
await() {
    left=$1 quiet=
    while :; do
        look
        if [ "$found" = ' ' ]; then
            [ -z "$quiet" ] || return 0
            quiet=yes
        else
            [ "$left" -gt 0 ] || return 1
            [ -z "${2:-}" ] || send "$2"
            quiet=
        fi
        sleep 1
        left=$((left - 1))
    done
}

found=' ' ended= spared=' ' daemons=' '
if ! await "$wait_s"; then
    ended=$found
    send TERM
    sleep 0.2 2>/dev/null || sleep 1
    await "$term_s" || await 5 KILL
fi
if [ "$found" != ' ' ]; then
    echo "left $found"
    for pid in $found; do tr '\0' ' ' < "/proc/$pid/cmdline" | cut -c 1-200; echo; done
    exit 1
fi
hidden=$(unseen)
if [ -n "$hidden" ]; then
    echo "unseen $hidden"
    exit 2
fi
for base do
    case $base in '~/'*) base=$home/${base#??} ;; esac
    for one in $token; do
        for path in "$base/rolloutd-run-$one-"*; do
            [ -d "$path" ] && rm -rf -- "$path"
        done
    done
done
# Only empty groups can be removed: one of a daemon that stays is left.
for mount in /sys/fs/cgroup /sys/fs/cgroup/unified; do
    for one in $token; do rmdir "$mount/rolloutd-run-$one-"*; done
done 2>/dev/null
echo "clear $ended"
"""


@dataclass(frozen=True, slots=True)
class RunMarkers:
    """The marks of runs; `owner` distinguishes those of daemons that do not share a store."""

    owner: str

    def node_token(self, node: str) -> str:
        """Return the part of the marks that all runs on the node share."""
        return hashlib.sha256(f"{self.owner}\0{node}".encode()).hexdigest()[:16]

    def run_marker(self, node: str, run_id: str) -> str:
        """Return the mark of one run on the node; it contains the run's id."""
        return f"rolloutd-run-{self.node_token(node)}-{run_id}+"


def run_name(run_id: str) -> str:
    """Return the run's id, shortened if it is long; raises ValueError if it is not safe as a file name.

    An id has the names of a rollout, a node and a stage, which may have 260 characters together.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise ValueError(f"{run_id!r} is not a run id; use letters, digits and ._:@=-")
    if len(run_id) <= MAX_RUN_NAME:
        return run_id
    machine = _MACHINE.search(run_id)
    end = f"-{hashlib.sha256(run_id.encode()).hexdigest()[:16]}{machine[0] if machine else ''}"
    return f"{run_id[: MAX_RUN_NAME - len(end)]}{end}"


def run_id_on(machine: str, name: str) -> str:
    """Return the id of a run that names the machine on which it begins."""
    return f"{name}@{machine}" if machine else name


def machine_of(handle: str) -> str:
    """Return the machine that a handle names; empty for one of an older version."""
    machine = _MACHINE.search(id_of(handle))
    return machine[0][1:] if machine else ""


def name_of(handle: str) -> str:
    """Return the name of a handle's run, which is the same on each machine."""
    return id_of(handle).removesuffix(f"@{machine_of(handle)}")


async def end_stale_processes(
    shell: Shell,
    host: Host,
    tokens: Collection[str],
    *,
    timeout_s: float,
    grace_share: float,
    remote_tmp_dirs: tuple[str, ...],
    oldest_run_age_s: float,
) -> Ok | Failed | Unknown:
    """End all processes of runs on the node with a mark of these one or two tokens, and remove their files.

    Unknown if the login may not inspect a process that may be a run's.  Failed if processes remain, or
    if the node gave no result.
    """
    numbers = (timeout_s * grace_share, max(1.0, timeout_s * TERM_SHARE), oldest_run_age_s)
    arguments = [" ".join(tokens), *(str(int(number)) for number in numbers), *remote_tmp_dirs]
    try:
        answer = await run_as_root(shell, host, SCRIPT, *arguments, timeout_s=timeout_s + ANSWER_MARGIN_S)
    except TimeoutError:
        asked = "was asked for processes of older runs"
        return Failed(f"{host.name} {asked} and did not answer in {timeout_s + ANSWER_MARGIN_S:g} s")
    except NodeUnreachable as error:
        return Failed(f"{host.name} could not be asked for processes of older runs: {error}")
    report = answer.stdout.strip()
    if answer.exit_status == 0 and report.startswith("clear"):
        ended = report.removeprefix("clear").split()
        return Ok(
            f"ended {pluralize(len(ended), 'process', 'processes')} of an older run on {host.name}"
            if ended
            else "",
            report,
        )
    pids = report.partition("\n")[0].partition(" ")[2].strip()
    if report.startswith("left"):
        return Failed(f"processes of an older run would not end on {host.name}: {pids}", report)
    if report.startswith("unseen"):
        return Unknown(
            f"{host.name}: processes that may be an older run's cannot be inspected ({pids}); "
            "end them, or let the login use sudo"
        )
    evidence = f"{report}\n{answer.stderr}".strip()
    return Failed(f"{host.name} could not look for processes of older runs", evidence)
