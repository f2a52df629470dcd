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

The script is POSIX sh and needs /proc, awk, find, grep and xargs.  It arrives on
stdin, so that its own command line has no mark.  A node may have thousands of
processes, so the shell itself looks only at those of runs.
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
for program in awk find grep xargs; do
    command -v "$program" >/dev/null || { echo "$program: not on this node; install it" >&2; exit 3; }
done
own=$$
ticks=$(getconf CLK_TCK 2>/dev/null || echo 100)
# Names of processes may be no text.
export LC_ALL=C

# Prints the pids that bear the mark of a run of this node.
marked() {
    # The brackets keep grep's own command line from matching.
    printf '%s\n' /proc/[0-9]*/environ /proc/[0-9]*/cmdline /proc/[0-9]*/cgroup |
        xargs grep -lsE "[r]olloutd-run-(${token% *}|${token#* })-" 2>/dev/null |
        sed 's|/[a-z]*$||; s|.*/||' | sort -u | tr '\n' ' '
}

# Prints a line for each live process: pid, parent, group, session, start in clock ticks since the boot.
processes() {
    printf '%s\n' /proc/[0-9]*/stat | awk '{
        text = ""
        while ((getline line < $0) > 0) text = text line " "
        close($0)
        pid = text + 0
        # A name may have spaces and brackets.
        if (sub(/^.*\) /, "", text) && split(text, field, " ") > 19 && field[1] !~ /[ZX]/)
            print pid, field[2], field[3], field[4], field[20]
    }'
}

# Prints those of the processes that the first line of a pid file names: in the usual places, their
# directories, their arguments.  A file that is older than the process names an earlier one of the same pid.
with_pid_file() {
    {
        find /run /var/run/ /var/lock/ -xdev -maxdepth 3 -type f -name '*.pid'
        find /tmp /var/tmp -xdev -maxdepth 6 -type f -name '*.pid'
        find "$home" $(printf '/proc/%s/cwd/ ' "$@") -xdev -maxdepth 2 -type f -name '*.pid'
        cat $(printf '/proc/%s/cmdline ' "$@") | tr '\0' '\n' | sed -n 's|^[^/]*\(/.*\.pid\)$|\1|p'
    } 2>/dev/null | while IFS= read -r file; do
        first=
        [ -f "$file" ] && { read -r first rest < "$file"; } 2>/dev/null
        case " $* " in *" ${first:-none} "*) ;; *) continue ;; esac
        # A node without stat spares both.
        written=$(stat -L -c %Y "$file" 2>/dev/null || date +%s)
        [ "$written" -ge "$(started "$first")" ] && printf '%s ' "$first"
    done
}

# Prints the second before which no pid file of the process was written; two earlier, because the clock of
# the boot and that of some file systems count whole seconds.
started() {
    printf '%s\n' "$table" | awk -v pid="$1" -v boot="$(sed -n 's/^btime //p' /proc/stat)" -v ticks="$ticks" '
        $1 == pid { print boot + int($5 / ticks) - 2; exit }'
}

# Sets `daemons` to those of the processes of a run that are to stay: a daemon has left the run's sessions
# and its parent (a double fork), and a pid file says that it is to stay.
find_daemons() {
    set -- $(printf '%s\n' "$table" | awk -v known="$found $before" '
        BEGIN { split(known, pids, " "); for (i in pids) run[pids[i]] }
        { parent[$1] = $2; session[$1] = $4 }
        END {
            for (pid in parent)
                if (pid in run && !(parent[pid] in run) && (session[pid] == pid || !(session[pid] in parent)))
                    print pid
        }')
    daemons=
    for pid do
        shift
        case " $spared " in *" $pid "*) daemons="$daemons$pid " ;; *) set -- "$@" "$pid" ;; esac
    done
    [ $# = 0 ] || daemons="$daemons$(with_pid_file "$@")"
    spared=$daemons
}

# Sets `found` to the live processes of marked runs, their sessions, groups and descendants, and to what is
# left of the last look: a process that bears the mark may have ended before those that do not.  Daemons
# that are to stay are left out, with their sessions and descendants.
look() {
    before=$found found=$(marked)
    [ -n "$found$before" ] || return 0
    table=$(processes) || exit 3
    find_daemons
    found=$(printf '%s\n' "$table" | awk -v known="$found $before" -v daemons="$daemons" -v own="$own" '
        function chain(kind, of, pid) { next_of[kind, pid] = first_of[kind, of]; first_of[kind, of] = pid }
        # Adds to the set what belongs to its members, each of which is looked at once.
        function spread(kinds, set,    kind, count, at, pid, i) {
            for (pid in set) queue[++count] = pid
            for (at = 1; at <= count; at++)
                for (i = 1; kind = substr(kinds, i, 1); i++)
                    for (pid = first_of[kind, queue[at]]; pid; pid = next_of[kind, pid])
                        if (!(pid in set) && !(pid in left_out)) { set[pid]; queue[++count] = pid }
        }
        { live[$1]; chain("p", $2, $1); chain("g", $3, $1); chain("s", $4, $1) }
        END {
            split(daemons, pids, " "); for (i in pids) stay[pids[i]]
            spread("ps", stay)
            for (pid in stay) left_out[pid]
            left_out[own]
            split(known, pids, " "); for (i in pids) if (!(pids[i] in left_out)) run[pids[i]]
            spread("pgs", run)
            for (pid in run) if (pid in live) printf "%s ", pid
        }') || exit 3
}

# Prints the processes that can be the run's and that this user may not inspect: orphans of an ended session
# that are younger than the run.  Processes of a service are the service manager's.
unseen() {
    [ "$(id -u)" = 0 ] && return
    [ -d /proc/1 ] || { echo 'all of other users'; return; }
    read -r up rest < /proc/uptime
    slice=$(grep -o '/user-[0-9]*\.slice/' /proc/self/cgroup | head -n 1)
    # Kernel threads have the parent 2 or no session.
    for pid in $(processes | awk -v since=$(((${up%.*} - age_s) * ticks)) '
        { live[$1] }
        $2 != 2 && $4 != 0 && $5 >= since { session[$1] = $4 }
        END { for (pid in session) if (!(session[pid] in live)) print pid }')
    do
        [ -d "/proc/$pid" ] && [ ! -r "/proc/$pid/environ" ] || continue
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
        if [ -z "$found" ]; then
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

found= ended= spared=
if ! await "$wait_s"; then
    ended=$found
    send TERM
    sleep 0.2 2>/dev/null || sleep 1
    await "$term_s" || await 5 KILL
fi
if [ -n "$found" ]; then
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
