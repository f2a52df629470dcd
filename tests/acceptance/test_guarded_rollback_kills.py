"""A guarded change that fails and rolls its wave back, while the daemon is killed: real sshd and Ansible."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.support.daemon_environment import DaemonEnvironment, daemon_environment, plan

pytestmark = [pytest.mark.servers, pytest.mark.long]

NODES = ("n1", "n2", "n3", "n4")
KILLS = 3
SEED = int(os.environ.get("ROLLOUTD_TEST_SEED", "1"))
LONGEST_LIFE_S = 2.0
AFTER_S = 60
"""Longer than the daemon is away, so that a kill alone restores no node."""

CHANGE = """\
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.raw: |
        cd {{ files }} && cp -p {{ inventory_hostname }} {{ inventory_hostname }}.old
        echo new > {{ inventory_hostname }}; chmod 600 {{ inventory_hostname }}
        test {{ inventory_hostname }} != n4
"""

UNDO = """\
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.raw: |
        cd {{ files }} && test ! -e {{ inventory_hostname }}.old ||
          mv {{ inventory_hostname }}.old {{ inventory_hostname }}
"""


def test_guarded_wave_rolled_back_despite_kills(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    files = tmp_path / "files"
    files.mkdir()
    for name in NODES:
        (files / name).write_text(f"old value of {name}\n")
        (files / name).chmod(0o640)
    labels = {name: {"team": "t1", "rack": name, "role": "worker", "canary": "true"} for name in NODES}
    ssh = {"known_hosts": str(tmp_path / "known_hosts"), "guard_dir": str(tmp_path / "guards")}
    with daemon_environment(tmp_path, labels, ssh=ssh, pools={"rack": {"max_unavailable": 1}}) as made:
        own = f"{files}/{{{{ node.name }}}}"
        spec = plan(
            "config",
            canary={"select": "canary=true", "max_parallel": 2},
            maintain={"playbook": "change.yml", "vars": {"files": str(files)}},
            rollback={"playbook": "undo.yml"},
            guard={"paths": [own, f"{own}.old"], "after": f"{AFTER_S}s", "confirm": [{"reachable": {}}]},
            on_failure="rollback-wave",
        )
        rollout = made.submit(spec, {"change.yml": CHANGE, "undo.yml": UNDO})
        made.vote(rollout, "start")
        # The first kill finds nodes at work; the others come at random moments of the rest.
        made.wait_until(lambda: made.status(rollout)["in_flight"], "a node begins")
        for _ in range(KILLS):
            time.sleep(draw.uniform(0.2, LONGEST_LIFE_S))
            made.kill_daemon()
            made.start_daemon()
        made.wait_until(lambda: is_rolled_back(made, rollout), "all nodes are rolled back")
        assert made.run_processes() == []
        for guard in (tmp_path / "guards").glob("*/*/"):
            ends = {each.name for each in guard.iterdir()} & {"armed", "restoring", "restored", "confirmed"}
            assert ends in ({"confirmed"}, {"restored"}), guard
    found = {path.name: (path.read_text(), path.stat().st_mode & 0o777) for path in files.iterdir()}
    assert found == {name: (f"old value of {name}\n", 0o640) for name in NODES}


def is_rolled_back(made: DaemonEnvironment, rollout: str) -> bool:
    nodes = made.nodes(rollout)
    return {node["outcome"] for node in nodes.values()} == {"rolled-back"}
