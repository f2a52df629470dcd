"""A run is killed while its command goes on on the node; nothing runs twice, nothing stays behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon_environment import DaemonEnvironment, daemon_environment, fleet_labels, plan

pytestmark = pytest.mark.servers

PLAYBOOK = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: begin
      ansible.builtin.raw: >-
        echo "begin {{ inventory_hostname }} $(date +%s.%N)" >> {{ log_file }};
        ps -eo args | grep -c '^sleep 15.{{ mark }}' >> {{ log_file }}.asleep; true
    - name: work
      ansible.builtin.shell: test -e {{ log_file }}.quick || sleep 15.{{ mark }}
      changed_when: true
    - name: end
      ansible.builtin.raw: echo "end {{ inventory_hostname }} $(date +%s.%N)" >> {{ log_file }}
"""

LASTING_PLAYBOOK = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: start what outlives its task
      ansible.builtin.shell: nohup sleep 15.{{ mark }} >/dev/null 2>&1 </dev/null &
      changed_when: true
    - name: work
      ansible.builtin.command: sleep 3600
      changed_when: true
"""


def test_killed_run_cleared_before_next_run(tmp_path: Path) -> None:
    """SIGKILL of a run in the middle of a remote command, then a retry."""
    with daemon_environment(tmp_path, fleet_labels(1, 1, 1)) as made:
        rollout = submit(made)
        made.vote(rollout, "start")
        made.wait_until(lambda: asleep(made), "the command runs on the node")
        for pid in made.run_processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        made.wait_until(lambda: made.status(rollout)["state"] == "paused", "the lost run pauses the rollout")
        status = made.status(rollout)
        assert status["failed"] == 1
        assert "n1" in status["reason"]["text"]
        Path(f"{made.log_file}.quick").touch()
        made.client.post(f"/v1/rollouts/{rollout}/nodes/n1/retry", {"reason": "the machine was rebooted"})
        made.vote(rollout, "proceed", reason="retried")
        made.wait_until(lambda: made.status(rollout)["state"] == "done", "the rollout ends")
        assert [span.node for span in made.spans()] == ["n1", "n1"]
        counted = Path(f"{made.log_file}.asleep").read_text().split()
        assert counted == ["0", "0"], "the first run's command was still there when the second began"
        assert not asleep(made)
        # The last run's wrapper ends a moment after it has said how the run ended.
        made.wait_until(
            lambda: made.run_processes() == [] == ssh_processes(made), "nothing of a run is left here"
        )


def test_time_limit_ends_what_the_run_started(tmp_path: Path) -> None:
    with daemon_environment(tmp_path, fleet_labels(1, 1, 1)) as made:
        variables = {"mark": made.sshds["n1"].port}
        stage = {"playbook": "change.yml", "vars": variables, "timeout": "4s"}
        rollout = made.submit(plan("limited", maintain=stage), {"change.yml": LASTING_PLAYBOOK})
        made.vote(rollout, "start")
        made.wait_until(lambda: made.status(rollout)["state"] == "paused", "the limit pauses the rollout")
        assert "time limit of 4s passed" in made.status(rollout)["reason"]["text"]
        assert not asleep(made), "nobody has retried, and the node goes on changing"


def submit(made: DaemonEnvironment) -> str:
    """Submit a plan that leaves a lost run to people."""
    variables = {"log_file": str(made.log_file), "mark": made.sshds["n1"].port}
    stage: dict[str, Any] = {"playbook": "change.yml", "vars": variables, "on_unknown": "pause"}
    return made.submit(plan("killed", maintain=stage), {"change.yml": PLAYBOOK})


def asleep(made: DaemonEnvironment) -> bool:
    """Whether the command runs on the node."""
    mark = f"sleep\x0015.{made.sshds['n1'].port}\x00".encode()
    return any(mark in command for command in commands())


def ssh_processes(made: DaemonEnvironment) -> list[bytes]:
    """Return ssh clients that still talk to a node of this world."""
    ports = [str(sshd.port).encode() for sshd in made.sshds.values()]
    return [
        command
        for command in commands()
        if command.split(b"\0")[0].endswith(b"ssh") and any(port in command for port in ports)
    ]


def commands() -> list[bytes]:
    """Return the command lines of everything that runs on this machine."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                found.append((entry / "cmdline").read_bytes())
            except OSError:
                continue
    return found
