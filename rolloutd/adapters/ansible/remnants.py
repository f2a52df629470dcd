"""What older runs left on a node: found by their mark, waited for, then ended.

When a run is killed here, its module goes on there, and a module's child
(`sleep 60`) says nothing of us on its command line.  So the node is asked for
processes whose command line bears the mark of our runs on that node, and for
everything in their sessions and below them.  The mark names this daemon's runs
directory and the node, because several nodes may share one process table.
What was found stays found until it is gone, whatever becomes of its marked
parents, and a node is clear when nothing is found twice, a second apart.

The script is POSIX sh and needs /proc, kill, grep and sleep; it arrives on
stdin, so that its own command line bears no mark.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from rolloutd.counting import count
from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Failed, Host, Ok, Shell

WAIT_SHARE = 0.5
"""The part of the time in which a remnant may end by itself: half a package installation is worse."""

TERM_SHARE = 0.2
"""The part of the time between TERM and KILL."""

ANSWER_S = 30.0
"""What the node gets beyond the time asked for, to start the script and answer."""

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@=-]{0,119}")

SCRIPT = r"""
token=$1 keep=$2 wait_s=$3 term_s=$4
shift 4
own=$$

# Sets `found` to the live processes of marked runs, their sessions and all below them, and to what of
# the last look is left: who bears the mark may have ended before those that do not.
look() {
    before=$found found=' '
    for file in $(grep -l "[r]olloutd-run-$token-" /proc/[0-9]*/cmdline 2>/dev/null); do
        [ -n "$keep" ] && grep -q "[r]olloutd-run-$token-$keep+" "$file" 2>/dev/null && continue
        pid=${file#/proc/}
        found="$found${pid%/cmdline} "
    done
    [ "$found$before" = '  ' ] && return 0
    table=
    for file in /proc/[0-9]*/stat; do
        { read -r line < "$file"; } 2>/dev/null || continue
        pid=${line%% *}
        set -f; set -- ${line##*) }; set +f
        case $1 in
        Z | X) case $found in *" $pid "*) found="${found%% "$pid" *} ${found#* "$pid" }" ;; esac ;;
        *)
            table="$table $pid:$2:$4"
            case "$found|$before" in *" $pid "*"|"*) ;; *"|"*" $pid "*) found="$found$pid " ;; esac ;;
        esac
    done
    grown=yes
    while [ -n "$grown" ]; do
        grown=
        for entry in $table; do
            pid=${entry%%:*} rest=${entry#*:}
            case $found in *" $pid "*) continue ;; esac
            [ "$pid" = "$own" ] && continue
            case $found$before in *" ${rest%:*} "* | *" ${rest#*:} "*) found="$found$pid " grown=yes ;; esac
        done
    done
}

send() {
    for pid in $found; do
        kill "-$1" "$pid" 2>/dev/null || sudo -n kill "-$1" "$pid" 2>/dev/null
    done
}

# Looks every second until nothing is found twice, or so many seconds are over; may send a signal each time.
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

found=' ' ended=
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
for base do
    case $base in '~/'*) base=$HOME/${base#??} ;; esac
    for path in "$base/rolloutd-run-$token-"*; do
        case $path in *"-$token-$keep+") continue ;; esac
        [ -d "$path" ] && rm -rf -- "$path"
    done
done
echo "clear $ended"
"""


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of one daemon's runs: `runs_dir` tells them from another daemon's."""

    runs_dir: Path

    def token(self, node: str) -> str:
        """Return what all runs on the node have in common."""
        return hashlib.sha256(f"{self.runs_dir}\0{node}".encode()).hexdigest()[:16]

    def mark(self, node: str, run: str) -> str:
        """Return what the command lines of one run on the node bear; it holds the run's id."""
        return f"rolloutd-run-{self.token(node)}-{run}+"


def check_run(run: str) -> str:
    """Return the run's id; raises ValueError for one that is not safe as a file name."""
    if not _RUN.fullmatch(run):
        raise ValueError(f"{run!r} is no name for a run: letters, digits and ._:@=- are")
    return run


async def clear(
    shell: Shell,
    host: Host,
    token: str,
    *,
    keep: str | None,
    timeout_s: float,
    wait_share: float = WAIT_SHARE,
    bases: tuple[str, ...],
) -> Ok | Failed:
    """See to it that no marked process but those of `keep` is left on the node, nor their files."""
    kept = (keep or "").replace(".", r"\.")
    waits = (str(int(timeout_s * wait_share)), str(max(1, int(timeout_s * TERM_SHARE))))
    command = shlex.join(["/bin/sh", "-s", "--", token, kept, *waits, *bases])
    try:
        answer = await shell.run(host, command, timeout_s=timeout_s + ANSWER_S, stdin=SCRIPT)
    except TimeoutError:
        asked = "was asked for processes of older runs"
        return Failed(f"{host.name} {asked} and did not answer in {timeout_s + ANSWER_S:g} s")
    except NodeUnreachable as error:
        return Failed(f"{host.name} could not be asked for processes of older runs: {error}")
    said = answer.stdout.strip()
    if answer.exit_status == 0 and said.startswith("clear"):
        ended = said.removeprefix("clear").split()
        return Ok(
            f"ended {count(len(ended), 'process', 'processes')} of an older run on {host.name}"
            if ended
            else "",
            said,
        )
    if said.startswith("left"):
        pids = said.partition("\n")[0].removeprefix("left").strip()
        return Failed(f"processes of an older run would not end on {host.name}: {pids}", said)
    evidence = f"{said}\n{answer.stderr}".strip()
    return Failed(f"{host.name} could not look for processes of older runs", evidence)
