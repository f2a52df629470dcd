"""Module wrapper: the Python of one run on its node, a script that starts each module of the run.

AWX has no place for a wrapper around ssh, so the run's host variables name this script as the interpreter.
It refuses a run that a newer one has superseded (ansible/fence.py), and a second job, or a second begin of
one job, of the same run.  It marks what the run starts, so that it is found (ansible/stale_processes.py).
Without the script no module of the run can start, so its removal ends the run too.

It cannot see what starts no Python: `raw` tasks, `script` tasks and network modules.  The variables of a
playbook's own files are stronger than those of an inventory, so a run whose tree names an interpreter has
none.
"""

from __future__ import annotations

import re
import shlex

from machines.model.rollout import FailureCode
from rolloutd.adapters.ansible import fence
from rolloutd.adapters.ansible.older_runs import SHARED_TMP
from rolloutd.adapters.ansible.stale_processes import ENTER_CGROUP, MARK_VARIABLE
from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Failed, Host, Shell

PREPARE_TIMEOUT_S = 30.0
"""Limit of one short script; a slower node counts as unreachable."""

JOB = "{{ awx_job_id }}-{{ lookup('env', 'HOSTNAME') }}"
"""Names one begin of a job, rendered in its container; the container's name is new for each begin."""

SECOND_JOB = "another job runs this playbook on this node"
"""What the wrapper tells a second job of a run."""

_WRAPPER = r"""
{fence}
case $1 in
"$dir"/job-*)
    job=${{1#"$dir"/job-}} job=${{job%%/*}}
    (umask 022; set -C; echo "$job" > "$dir/job") 2>/dev/null
    read -r first < "$dir/job"
    if [ "$first" != "$job" ]; then
        echo "{second_job} ($first): job $job is refused" >&2
        exit 4
    fi ;;
esac
export {variable}={marker}
{enter}
exec {python} "$@"
"""

_PREPARE = r"""
set -u
umask 022
wrapper=$(cat)
for base in "$2" "${HOME:-/}/.ansible/tmp"; do
    dir=$base/$1
    rm -rf -- "$base/$3"+ "$base/$3~"*
    mkdir -p "$base" 2>/dev/null
    mkdir "$dir" 2>/dev/null || continue
    { echo '#!/bin/sh'; echo "login_home='${HOME:-/}' dir='$dir'"; printf '%s\n' "$wrapper"; } > "$dir/python"
    chmod 755 "$dir/python"
    "$dir/python" -c pass && echo "$dir" && exit 0
    rm -rf -- "$dir"
done
echo "programs can run neither in $2 nor in the home directory" >&2
exit 1
"""
# A mount of /var/tmp may forbid programs, and other users may not enter a home directory.

_SAFE = re.compile(r"[A-Za-z0-9._@:=+/~-]+")


def has_safe_name(node: str) -> bool:
    """Return whether a node's name needs no quotes in a shell."""
    return _SAFE.fullmatch(node) is not None


async def build(
    shell: Shell, host: Host, *, marker: str, run_marker: str, token: str, fence_dir: str, python: str
) -> str | Failed:
    """Write the wrapper of a run on its node; return its directory, or why it cannot be.

    That of an earlier claim of the run is removed, so a job of it can start no module any more.
    """
    prefix = "-".join([*marker.split("-")[:3], ""])
    wrapper = _WRAPPER.format(
        fence=fence.refuse_command(token, fence_dir, host.name).replace("~/", '"$login_home"/'),
        second_job=SECOND_JOB,
        variable=MARK_VARIABLE,
        marker=marker,
        enter=ENTER_CGROUP.format(prefix=prefix, marker=marker, pid="$$"),
        python=shlex.quote(python),
    )
    command = shlex.join(["sh", "-c", _PREPARE, "wrapper", marker, SHARED_TMP, run_marker.removesuffix("+")])
    try:
        answer = await shell.run(host, command, timeout_s=PREPARE_TIMEOUT_S, stdin=wrapper)
    except (NodeUnreachable, TimeoutError) as error:
        text = str(error) or f"no answer within {PREPARE_TIMEOUT_S:g} s"
        return Failed(f"{host.name} was unreachable: {text}", code=FailureCode.UNREACHABLE)
    directory = answer.stdout.strip().rpartition("\n")[2]
    if answer.exit_status == 0 and directory.startswith("/"):
        return directory
    problem = answer.stderr.strip().rpartition("\n")[2]
    return Failed(
        f"{host.name}: the run's files cannot be written: {problem}", code=FailureCode.NEVER_STARTED
    )


def wrapper_variables(directory: str) -> dict[str, str]:
    """Return the host variables by which each module of a run passes its wrapper."""
    return {
        "ansible_python_interpreter": f"{directory}/python",
        # Pipelining gives the interpreter no argument, which names the job here.
        "ansible_pipelining": "false",
        "ansible_remote_tmp": f"{directory}/job-{JOB}",
    }
