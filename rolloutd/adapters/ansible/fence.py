"""Fence on the node that refuses a run older than one already seen there.

Claims prevent a late run on this machine.  The fence covers what a claim cannot: two state directories, a
restored backup, a suspended wrapper.  It is one `raw` task (it needs no Python) in our own play before the
user's, and compares the run's token with a file on the node.

A token is `epoch.number`, perhaps with the database's id and the second in which the run began.  Numbers of
two databases are not comparable, so such a run is refused only if it began long before: a daemon that lost
its state, or took over nodes, must not be refused for ever.

Every run waits for the fence, so the script starts no program but one `mv`, which replaces the token
atomically.
"""

from __future__ import annotations

from rolloutd.ports import JSON

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
full=$new
# Without globbing: a damaged file must not become a list of names.
set -f
set -- $new
new=$1 whose=${2:-} at=${3:-0}
old= theirs= then=
[ -r "$file" ] && read -r old theirs then < "$file"
set -- $old $theirs $then
old=${1:-0.0} theirs=${2:-} then=${3:-0}
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
fi
if [ -n "$newer" ]; then
    echo "a newer run ($old) has been on this node: this one ($new) is refused" >&2
    exit 4
fi
printf '%s\n' "$full" > "$file.$$" && mv -f "$file.$$" "$file"
"""


def build_play(token: str, fence_dir: str, node: str) -> list[dict[str, JSON]]:
    """Return the play that runs before the user's."""
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
