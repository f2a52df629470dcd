"""A daemon that is killed while guarded nodes are at every step from arm to disarm: real sshd and Ansible.

Each node has a point of its own at which its ssh command waits.  When all nodes are there, the daemon is
killed once.  Each node must end as confirmed or as restored, and its file must say the same.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon_environment import DaemonEnvironment, plan
from tests.support.sshd import Sshd

pytestmark = [pytest.mark.servers, pytest.mark.long]

COMMANDS = {
    "arm": "*' rolloutd arm '*",
    "run": "*first-half*",
    "end": "*second-half*",
    "confirm": "true",
    "disarm": "*' rolloutd disarm '*",
    "restore": "*' rolloutd restore '*",
}
"""A shell pattern of the command at which a node waits, before it or after it."""

NODES = [f"{when}-{command}" for command in COMMANDS for when in ("before", "after")]

RESTORE_S = 5
"""How long a node may take to restore itself after `after`."""

WAIT_ONCE = """\
#!/bin/sh
# Runs the command of a login; the first one that matches waits before or after it.
exec 9>&2
hold() {{ touch {own}.reached; while [ -e {all}/hold ]; do sleep 0.05; done; }}
matches() {{
    case $SSH_ORIGINAL_COMMAND in {pattern}) mkdir {own}.taken 2> /dev/null ;; *) false ;; esac
}}
matches && waits={when}
[ "$waits" != before ] || hold
sh -c "$SSH_ORIGINAL_COMMAND"
status=$?
[ "$waits" != after ] || hold
exit $status
"""

CHANGE = """\
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.raw: echo half > {{ files }}/{{ inventory_hostname }}; true first-half
    - ansible.builtin.raw: |
        echo new > {{ files }}/{{ inventory_hostname }}
        case {{ inventory_hostname }} in *restore) exit 1 ;; esac; true second-half
"""


class HoldingEnvironment(DaemonEnvironment):
    """Nodes whose logins wait at the point that their name says."""

    @property
    def points(self) -> Path:
        return self.directory / "points"

    def make_sshd(self, name: str) -> Sshd:
        when, _, command = name.partition("-")
        script = self.points / name
        own = shlex.quote(str(script))
        text = WAIT_ONCE.format(own=own, all=self.points, pattern=COMMANDS[command], when=when)
        script.write_text(text)
        script.chmod(0o755)
        return Sshd(options=f"ForceCommand {script}")

    def ends_on_node(self, rollout: str, name: str) -> set[str]:
        """Return the states of the node's guard."""
        guard = self.directory / "guards" / name / f"{rollout}.1"
        return {each.name for each in guard.glob("*")} & {"armed", "restoring", "restored", "confirmed"}


@contextmanager
def environment(directory: Path) -> Iterator[HoldingEnvironment]:
    labels = {name: {"team": name, "rack": name, "role": "worker", "canary": "true"} for name in NODES}
    made = HoldingEnvironment(directory, labels)
    made.points.mkdir()
    (made.points / "hold").touch()
    (directory / "files").mkdir()
    for name in NODES:
        (directory / "files" / name).write_text("old\n")
    try:
        made.start_nodes()
        made.write_settings(
            ssh={"known_hosts": str(directory / "known_hosts"), "guard_dir": str(directory / "guards")},
            ansible={"parallel": len(NODES)},
        )
        made.start_daemon()
        yield made
    finally:
        made.stop()


def submit(made: HoldingEnvironment, after_s: int) -> str:
    files = made.directory / "files"
    spec = plan(
        "config",
        canary={"select": "canary=true", "max_parallel": len(NODES)},
        max_parallel=len(NODES),
        maintain={"playbook": "change.yml", "vars": {"files": str(files)}, "timeout": "120s"},
        guard={
            "paths": [f"{files}/{{{{ node.name }}}}"],
            "after": f"{after_s}s",
            "confirm": [{"reachable": {}}],
        },
    )
    rollout = made.submit(spec, {"change.yml": CHANGE})
    made.vote(rollout, "start")
    return rollout


def kill_when_all_wait(made: HoldingEnvironment) -> None:
    def missing() -> set[str]:
        return {name for name in NODES if not (made.points / f"{name}.reached").exists()}

    made.wait_until(lambda: not missing(), "all nodes are at their points")
    made.kill_daemon()
    (made.points / "hold").unlink()


def settled(made: HoldingEnvironment, rollout: str) -> dict[str, Any]:
    def nodes() -> Any:
        found = made.nodes(rollout)
        return found if all(node["phase"] in ("done", "failed") for node in found.values()) else None

    found: dict[str, Any] = made.wait_until(nodes, "all nodes are done or failed")
    return found


def assert_ends_agree(made: HoldingEnvironment, rollout: str, nodes: dict[str, Any]) -> set[str]:
    """Assert that node, file and daemon say the same of each guard; return the confirmed nodes."""
    confirmed = set()
    for name, node in nodes.items():
        ends = made.ends_on_node(rollout, name)
        file = (made.directory / "files" / name).read_text()
        if ends == {"confirmed"}:
            confirmed.add(name)
            assert (file, node["phase"], node["outcome"]) == ("new\n", "done", "changed"), name
        else:
            # A node that the daemon could not arm any more was not touched.
            assert ends == {"restored"} or (name == "before-arm" and not ends), (name, ends)
            failure = made.client.get(f"/v1/rollouts/{rollout}/nodes/{name}")["failure"]
            codes = ("never-started",) if name.endswith("-arm") else ("restored-itself",)
            assert (file, node["phase"]) == ("old\n", "failed"), name
            assert failure["code"] in codes, (name, failure)
    return confirmed


def test_daemon_killed_between_steps_ends_as_without_kill(tmp_path: Path) -> None:
    with environment(tmp_path) as made:
        rollout = submit(made, after_s=120)
        kill_when_all_wait(made)
        made.start_daemon()
        nodes = settled(made, rollout)
        restored = {"before-restore", "after-restore"}
        assert assert_ends_agree(made, rollout, nodes) == set(NODES) - restored
        assert made.run_processes() == []


def test_nodes_restore_themselves_while_daemon_is_away(tmp_path: Path) -> None:
    after_s = 8
    with environment(tmp_path) as made:
        rollout = submit(made, after_s)
        kill_when_all_wait(made)
        released_at = time.monotonic()

        def ended() -> bool:
            return all(
                not made.ends_on_node(rollout, name) & {"armed", "restoring"} for name in NODES
            ) and all(made.ends_on_node(rollout, name) for name in NODES if name != "before-arm")

        made.wait_until(ended, "no guard is armed")
        assert time.monotonic() - released_at <= after_s + RESTORE_S
        made.start_daemon()
        nodes = settled(made, rollout)
        assert "after-disarm" in assert_ends_agree(made, rollout, nodes)
