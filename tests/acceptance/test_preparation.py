"""Preparation of real nodes: artifacts over ssh, checkpoints, and a disturbance that is noticed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from rolloutd.control.client import api_path
from rolloutd.planfile.manifest import format_manifest
from tests.support.daemon_environment import (
    CHANGE_PLAYBOOK,
    DaemonEnvironment,
    daemon_environment,
    fleet_labels,
    plan,
)

NODES = 3

DOMAIN_NAME = Path("/proc/sys/kernel/domainname")
"""A kernel parameter that nothing on this machine depends on."""

# The nodes are this machine, on which other tests listen and mount.
OTHERS = ["port/*", "process/*", "mount/*", "route/*", "address/*", "package-lock/*"]

INSTALL = """\
- hosts: all
  gather_facts: true
  gather_subset: ["!all", "!min", local]
  fact_path: "{{ rolloutd_fact_path }}"
  tasks:
    - name: install
      ansible.builtin.shell: |
        cat {{ ansible_local.rolloutd.stages['app/stage'].artifacts.app.path }} > {{ installed }}
        echo x >> {{ installed }}.runs
      changed_when: true
"""

DISTURB = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: disturb
      ansible.builtin.shell: |
        echo {{ inventory_hostname }} >> {{ disturbed }}
        echo disturbed > /proc/sys/kernel/domainname
      changed_when: true
"""


@pytest.mark.long  # nine runs of Ansible
@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes a kernel parameter")
def test_nodes_are_prepared_once_and_a_disturbance_stops_all(tmp_path: Path) -> None:
    content = os.urandom(300_000)
    labels = fleet_labels(NODES, 1, 1)
    for name, each in labels.items():
        each["rolloutd_fact_path"] = str(tmp_path / "facts" / name)
        each["disturbed"] = str(tmp_path / "disturbed")
        each["installed"] = str(tmp_path / f"installed-{name}")
    with daemon_environment(tmp_path, labels) as env:
        tree = tmp_path / "tree"
        tree.mkdir()
        (tree / "app.bin").write_bytes(content)
        entry = {
            "name": "app",
            "version": "1",
            "path": "app.bin",
            "size": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
        playbooks = {
            "change.yml": CHANGE_PLAYBOOK,
            "install.yml": INSTALL,
            "disturb.yml": DISTURB,
            "artifacts.yml": format_manifest([entry]),
        }
        to = str(tmp_path / "cache/{{ node.name }}")
        stages: list[dict[str, Any]] = [
            {"stage": {"to": to, "may_change": OTHERS}},
            {"install": {"playbook": "install.yml", "may_change": OTHERS}},
        ]
        variables = {"vars": {"log_file": str(env.log_file)}}
        spec = {
            "prepare": stages,
            "max_parallel": 3,
            "soak": "0s",
            "maintain": {"playbook": "change.yml", **variables},
        }
        first = finish(env, plan("app", **spec), playbooks)
        for name in labels:
            assert Path(f"{tmp_path}/installed-{name}").read_bytes() == content + b""
        assert carried(env, first) == [(entry["sha256"], entry["sha256"], sorted(labels))]
        before = DOMAIN_NAME.read_text().strip()
        finish(env, plan("app", **spec), playbooks, again=True)
        assert [Path(f"{tmp_path}/installed-{name}.runs").read_text() for name in labels] == ["x\n"] * NODES
        stages.append({"install": {"name": "disturb", "playbook": "disturb.yml", "may_change": OTHERS}})
        third = env.submit(plan("app", **spec), playbooks)
        try:
            env.vote(third, "start")
            env.wait_until(lambda: env.status(third)["failed"], "the disturbance is noticed")
        finally:
            DOMAIN_NAME.write_text(before)
        change = f"sysctl/kernel.domainname: {before} -> disturbed"
        assert env.nodes(third)["n1"]["reason"]["params"] == {"step": "prepare.disturb", "message": change}
        assert {node["phase"] for name, node in env.nodes(third).items() if name != "n1"} == {"pending"}
        assert (tmp_path / "disturbed").read_text() == "n1\n"


def carried(env: DaemonEnvironment, rollout: str) -> list[tuple[str, str, list[str]]]:
    """Return the digests that the nodes carry: expected, found, and the nodes."""
    answer = env.client.get(api_path("rollouts", rollout, "artifacts"))
    return [(each["expected"], each["found"], sorted(each["nodes"])) for each in answer["artifacts"]]


def finish(env: DaemonEnvironment, wanted: dict[str, Any], playbooks: dict[str, str], **more: Any) -> str:
    """Submit a plan, vote where votes are asked for, and return the rollout once it is done."""
    rollout = env.submit(wanted, playbooks, **more)

    def is_done() -> bool:
        status = env.status(rollout)
        for gate in status["gates"]:
            if gate["state"] == "waiting" and status["state"] != "done":
                env.vote(rollout, gate["gate"])
        return bool(status["state"] == "done")

    env.wait_until(is_done, f"{rollout} is done", 100.0)
    return rollout
