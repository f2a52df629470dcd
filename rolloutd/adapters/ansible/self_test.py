"""Self-test of fast runs: one play, run fast and plain, must show the same.

It needs no node: a script stands for ssh and runs here what would run there, and another one for sudo.  So
the play goes through the real fence, ssh script and callback.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rolloutd import __version__
from rolloutd.adapters.ansible.run_directory import RunDirectory
from rolloutd.adapters.ansible.runner import AnsibleRunner
from rolloutd.adapters.ansible.tree_cache import TreeCache
from rolloutd.concurrency import threads
from rolloutd.ports import Host, InventorySnapshot, Ok, PinnedSource, RunRequest, Shell

RUN_TIMEOUT_S = 120.0
"""Limit of one run, which takes some seconds on a busy machine."""

TOKEN = "1.1 self-test 1"  # noqa: S105 - no secret
"""The fence's: epoch and number, the database, the second of the start."""

NODE, OTHER = "node", "other"

PLAYBOOK = """\
- name: self-test
  hosts: all
  gather_facts: false
  tasks:
    - name: hosts and variables
      ansible.builtin.debug:
        msg: "{{ groups }} {{ hostvars[item] }}"
      loop: "{{ groups.all }}"
    - name: a module as another user
      ansible.builtin.command: printenv ROLLOUTD_RUN_MARK
      become: true
      changed_when: false
      register: answer
    - name: its answer
      ansible.builtin.debug:
        msg: "{{ answer.stdout }} {{ derived }}"
    - name: a failure
      ansible.builtin.fail: {msg: on purpose}
      ignore_errors: true
"""

SSH = """\
#!/bin/sh
for command do case $command in -O | -V) exit 0 ;; esac; done
exec /bin/sh -c "$command"
"""

SUDO = """\
#!/bin/sh
# As sudo does, it drops the environment.
while :; do case $1 in -u) shift 2 ;; -*) shift ;; *) break ;; esac; done
exec env -i PATH="$PATH" "$@"
"""


async def run(state_dir: Path, shell: Shell) -> str:
    """Return how a fast run differs from a plain one; a test that was passed is not repeated."""
    directory, passed = state_dir / "self-test", state_dir / "self-test.json"
    if await threads.RUNS.run(_read, passed) == _key():
        return ""
    try:
        await threads.RUNS.run(_write_tree, directory)
        problem = await _compare(directory, shell)
    finally:
        await threads.RUNS.run(shutil.rmtree, directory, ignore_errors=True)
    if not problem:
        await threads.RUNS.run(remember, state_dir)
    return problem


def remember(state_dir: Path) -> None:
    """Record that the test was passed with these versions; a full disk only repeats it."""
    with contextlib.suppress(OSError):
        (state_dir / "self-test.json").write_text(json.dumps(_key()))


def _key() -> list[str]:
    return [metadata.version("ansible-core"), sys.version, __version__]


def _read(path: Path) -> Any:
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text())
    return None


def _write_tree(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    tree = directory / "tree"
    tree.mkdir(mode=0o700, parents=True)
    (tree / "play.yml").write_text(PLAYBOOK)
    for name, script in (("ssh", SSH), ("sudo", SUDO)):
        (tree / name).write_text(script)
        (tree / name).chmod(0o700)


async def _compare(directory: Path, shell: Shell) -> str:
    shown = []
    for warm in (False, True):
        runs = directory / ("fast" if warm else "plain")
        runner = AnsibleRunner(
            runs,
            shell,
            lambda source: directory / "tree",
            lambda: _inventory(directory),
            fence_dir=str(directory / "fence"),
            tree_cache=TreeCache(directory / "ansible"),
            warm=warm,
            pipelining=True,
            marks="self-test",
        )
        try:
            problem, observed = await _observe(runner, runs, directory)
        finally:
            await runner.close()
        if problem:
            return f"the {runs.name} run failed: {problem}"
        shown.append(observed)
    plain, fast = shown
    return next((f"{name} of the runs differ" for name in plain if plain[name] != fast[name]), "")


def _inventory(directory: Path) -> InventorySnapshot:
    node = {
        "ansible_python_interpreter": sys.executable,
        "ansible_remote_tmp": str(directory / "tmp"),
        "ansible_ssh_executable": str(directory / "tree/ssh"),
        "ansible_become_exe": str(directory / "tree/sudo"),
        "number": 1,
        "derived": "{{ number + 1 }}",
    }
    hosts: Mapping[str, Mapping[str, Any]] = {
        NODE: node,
        OTHER: {"listed": [1, "two"], "unsafe": {"__ansible_unsafe": "{{ number }}"}},
    }
    return InventorySnapshot(hosts, {"first": [NODE], "second": [NODE, OTHER]}, generation=1)


async def _observe(runner: AnsibleRunner, runs: Path, directory: Path) -> tuple[str, Mapping[str, Any]]:
    """Run the play; return what failed, or all that it shows but times and the directory of the runs."""
    handle = await runner.start(
        RunRequest(
            "self-test",
            Host(NODE, connection=_inventory(directory).hosts[NODE]),
            PinnedSource("tree", "self-test"),
            "play.yml",
            timeout_s=RUN_TIMEOUT_S,
            fencing_token=TOKEN,
            rollout="",
        )
    )
    while (result := (await runner.wait_for_change(handle)).result) is None:
        pass
    run = RunDirectory(runs / handle)
    if not isinstance(result, Ok):
        return f"{result.text} {run.read_output_tail()[-500:]}", {}
    events = [dict(line.event) for line in run.read_events(0)]
    ways = [event["text"] for event in events if event["kind"] == "process"]
    if runs.name == "fast" and runner.status.started["fork"] != 1:
        return ways[0], {}
    compared = [
        {name: value for name, value in event.items() if name not in {"at", "seconds"}}
        for event in events
        if event["kind"] != "process"
    ]
    texts = {"events": json.dumps(compared), "output": run.read_output_tail()}
    return "", {name: text.replace(str(runs), "RUNS") for name, text in texts.items()}
