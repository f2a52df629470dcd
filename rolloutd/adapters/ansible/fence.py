"""Fence on the node that refuses a run older than one already seen there.

Claims prevent a late run on this machine.  The fence covers what a claim cannot: two machines, two state
directories, a restored backup, a suspended wrapper.  It is one `raw` task (it needs no Python) in our own
play before the user's, and compares the run's token with a file on the node.  The run's ssh script compares
again before each command (REFUSE_COMMAND), so a run that was superseded changes nothing more.

A token is `epoch.number`, perhaps with the database's id, the second in which the run began, and its holder.
Equal numbers of two holders come from two daemons that believe in one term; the second holder is refused.
Numbers of two databases are not comparable, so such a run is refused only if it began long before: a daemon
that lost its state, or took over nodes, must not be refused for ever.

Every run waits for the fence, so the script starts two programs only: `flock`, so that nothing comes between
the comparison and the token that replaces the old one, and `mv`, so that a reader never finds half a token.
"""

from __future__ import annotations

import re
import shlex

from machines.model.rollout import FailureCode
from rolloutd.errors import NodeUnreachable
from rolloutd.ports import JSON, Failed, Host, Shell

PLAY_NAME = "rolloutd fence"
"""The play's name, by which the callback recognises it.

Not imported from the callback: that loads Ansible, which creates directories in the home at once, so the
daemon could not start on a full disk.
"""

CLOCK_SLACK_S = 60
"""Allowance for the difference of two clocks and for the time from a run's start to its fence."""

SCRIPT = r"""
set -u
new=$1 dir=$2 node=$3 slack=$4
for place in "$dir" "${HOME:-/}/.rolloutd-fence"; do
    [ -d "$place" ] || mkdir -p "$place" 2>/dev/null
    [ -d "$place" ] && [ -w "$place" ] && break
    place=
done
[ -n "$place" ] || { echo "neither $dir nor the home directory can be written" >&2; exit 3; }
file=$place/$node
command -v flock > /dev/null || { echo "flock is missing on the node; install util-linux" >&2; exit 3; }
exec 9>> "$file.lock" && flock -w 30 9 || { echo "another run is taking $file" >&2; exit 3; }
full=$new
# Without globbing: a damaged file must not become a list of names.
set -f
set -- $new
new=$1 whose=${2:-} at=${3:-0} holder=${4:-}
old= theirs= then= other=
[ -r "$file" ] && read -r old theirs then other < "$file"
set -- $old $theirs $then $other
old=${1:-0.0} theirs=${2:-} then=${3:-0} other=${4:-}
case $old in
*[!0-9.]* | .* | *. | *..*) echo "$file holds no token: $old" >&2; exit 3 ;;
*.*) ;;
*) echo "$file holds no token: $old" >&2; exit 3 ;;
esac
case $then in *[!0-9]*) echo "$file holds no token: $old" >&2; exit 3 ;; esac
old_number=${old#*.} new_number=${new#*.}
newer=
if [ -n "$whose" ] && [ -n "$theirs" ] && [ "$whose" != "$theirs" ]; then
    [ "$then" -gt "$((at + slack))" ] && newer=yes
elif [ "${old%%.*}" -gt "${new%%.*}" ]; then
    newer=yes
elif [ "${old%%.*}" -eq "${new%%.*}" ] && [ "${old_number%%.*}" -gt "${new_number%%.*}" ]; then
    newer=yes
elif [ "$old" = "$new" ] && [ -n "$other" ] && [ "$other" != "$holder" ]; then
    newer=yes
fi
if [ -n "$newer" ]; then
    echo "a newer run ($old) has been on this node: this one ($new) is refused" >&2
    exit 4
fi
printf '%s\n' "$full" > "$file.$$" && mv -f "$file.$$" "$file"
"""

REFUSE_COMMAND = (
    "for f in {places}; do [ -r $f ] && read -r n o s h <$f || continue; "
    "if [ x$o != x{owner} ]; then [ $s -gt {until} ]; "
    "elif [ ${{n%%.*}} -ne {epoch} ]; then [ ${{n%%.*}} -gt {epoch} ]; "
    "elif [ ${{n##*.}} -ne {number} ]; then [ ${{n##*.}} -gt {number} ]; "
    "else [ x$h != x{holder} ]; fi "
    "&& echo a newer run has been on this node: this one is refused >&8 && exit 4; "
    "done 8>&2 2>/dev/null"
)
"""Ends a shell with the status 4 if the node has a newer token than the run's; starts no program.

It contains no quotes, because it is used inside two levels of quotes.
"""

_SHELL_SAFE = re.compile(r"[A-Za-z0-9._@:=+/~-]+")
"""A text that needs no quotes."""


def refuse_command(token: str, fence_dir: str, node: str) -> str:
    """Return REFUSE_COMMAND of a run; `:` for a run without a whole token, or a node that needs quotes."""
    words = token.split()
    if len(words) != 4 or not all(map(_SHELL_SAFE.fullmatch, (*words, fence_dir, node))):
        return ":"
    number, owner, at, holder = words
    epoch, _, last = number.partition(".")
    return REFUSE_COMMAND.format(
        places=f"{fence_dir}/{node} ~/.rolloutd-fence/{node}",
        owner=owner,
        until=int(at) + CLOCK_SLACK_S,
        epoch=epoch,
        number=last,
        holder=holder,
    )


async def take(shell: Shell, host: Host, token: str, fence_dir: str, *, timeout_s: float) -> Failed | None:
    """Give the node a token, so that it refuses each older run's commands; return why it has not taken it."""
    command = shlex.join(["sh", "-c", SCRIPT, "fence", token, fence_dir, host.name, str(CLOCK_SLACK_S)])
    try:
        answer = await shell.run(host, command, timeout_s=timeout_s)
    except (NodeUnreachable, TimeoutError) as error:
        return Failed(f"{host.name}: its fence cannot be taken: {error}", code=FailureCode.UNREACHABLE)
    if answer.exit_status == 0:
        return None
    return Failed(f"{host.name}: its fence cannot be taken: {answer.stderr.strip()}")


def build_play(token: str, fence_dir: str, node: str) -> list[dict[str, JSON]]:
    arguments = " ".join(_shell_quote(word) for word in (token, fence_dir, node, str(CLOCK_SLACK_S)))
    task = {
        "name": "refuse a run that is older than one that was here",
        "ansible.builtin.raw": f"sh -c {_shell_quote(SCRIPT)} fence {arguments}",
        "changed_when": False,
        "become": False,
    }
    return [
        {"name": PLAY_NAME, "hosts": "all", "gather_facts": False, "any_errors_fatal": True, "tasks": [task]}
    ]


def _shell_quote(word: str) -> str:
    """Return a shell word that Ansible's templating does not change."""
    return "'" + word.replace("'", "'\\''") + "'"
