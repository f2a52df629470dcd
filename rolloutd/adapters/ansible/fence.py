"""The fence on the node: a run that is older than one already seen there is refused by the node itself.

Claims keep a late run from beginning on this machine.  The fence is for what no
claim can reach: two state directories, a restored backup, a wrapper that slept.
It is one `raw` task (no Python is needed) in a play of ours before the user's,
on the same command line, and compares the run's token with the one in a file.
"""

from __future__ import annotations

from rolloutd.adapters.ansible.callback.rolloutd_events import FENCE_PLAY
from rolloutd.ports import JSON, RunRequest

SCRIPT = r"""
set -u
new=$1 dir=$2 node=$3
for place in "$dir" "${HOME:-/}/.rolloutd-fence"; do
    mkdir -p "$place" 2>/dev/null && [ -w "$place" ] && break
    place=
done
[ -n "$place" ] || { echo "neither $dir nor the home directory can be written" >&2; exit 3; }
file=$place/$node
old=$(cat "$file" 2>/dev/null) || old=
old=${old:-0.0}
case $old in *[!0-9.]* | *.*.*) echo "$file holds no token: $old" >&2; exit 3 ;; esac
if [ "${old%%.*}" -gt "${new%%.*}" ] ||
    { [ "${old%%.*}" -eq "${new%%.*}" ] && [ "${old#*.}" -gt "${new#*.}" ]; }; then
    echo "a newer run ($old) has been on this node: this one ($new) is refused" >&2
    exit 4
fi
printf '%s\n' "$new" > "$file.$$" && mv -f "$file.$$" "$file"
"""


def playbook(request: RunRequest) -> list[dict[str, JSON]]:
    """Return the play that goes before the user's, as YAML that is also JSON."""
    words = " ".join(_quoted(word) for word in (request.fence, request.fence_dir, request.node))
    task = {
        "name": "refuse a run that is older than one that was here",
        "ansible.builtin.raw": f"sh -c {_quoted(SCRIPT)} fence {words}",
        "changed_when": False,
        "become": False,
    }
    return [
        {"name": FENCE_PLAY, "hosts": "all", "gather_facts": False, "any_errors_fatal": True, "tasks": [task]}
    ]


def _quoted(word: str) -> str:
    """Return a shell word that Ansible's templating leaves alone."""
    return "'" + word.replace("'", "'\\''") + "'"
