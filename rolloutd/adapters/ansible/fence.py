"""The fence on the node: a run that is older than one already seen there is refused by the node itself.

Claims keep a late run from beginning on this machine.  The fence is for what no
claim can reach: two state directories, a restored backup, a wrapper that slept.
It is one `raw` task (no Python is needed) in a play of ours before the user's,
on the same command line, and compares the run's token with the one in a file.

A token is `epoch.number`, and may be followed by whose numbers these are and by
the second in which the run began.  Numbers of one database are compared; those of
two say nothing of each other, so there a run is refused only that began long before:
a daemon that lost its state, or took over nodes, must not be refused for ever.

Every run waits for it, so the script starts no program but the one `mv` that
makes the new token appear whole.
"""

from __future__ import annotations

from rolloutd.ports import JSON, RunRequest

PLAY = "rolloutd fence"
"""The play's name, by which the callback tells it from the user's.

Not imported from there: the callback loads Ansible, which makes directories in the home before
anything else, so a daemon that loaded it could not start on a full disk.
"""

SLACK_S = 60
"""By how much two machines' clocks, and the time from a run's beginning to its fence, may differ."""

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


def playbook(request: RunRequest) -> list[dict[str, JSON]]:
    """Return the play that goes before the user's, as YAML that is also JSON."""
    words = " ".join(_quoted(word) for word in (request.fence, request.fence_dir, request.node, str(SLACK_S)))
    task = {
        "name": "refuse a run that is older than one that was here",
        "ansible.builtin.raw": f"sh -c {_quoted(SCRIPT)} fence {words}",
        "changed_when": False,
        "become": False,
    }
    return [{"name": PLAY, "hosts": "all", "gather_facts": False, "any_errors_fatal": True, "tasks": [task]}]


def _quoted(word: str) -> str:
    """Return a shell word that Ansible's templating leaves alone."""
    return "'" + word.replace("'", "'\\''") + "'"
