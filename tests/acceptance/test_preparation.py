"""Preparation of real nodes without a default route: artifacts, checkpoints, disturbances."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rolloutd.control.client import api_path
from tests.support.daemon_environment import CHANGE_PLAYBOOK, plan
from tests.support.private_nodes import SERVICE_PORT, PrivateNodes, private_nodes

pytestmark = [
    pytest.mark.servers,
    pytest.mark.long,  # about twelve runs of Ansible, and a restart of a node
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for namespaces"
    ),
]

# The nodes share this machine's kernel and package database.
SHARED = ["module/*", "sysctl/kernel.*", "sysctl/fs.*", "sysctl/vm.*", "package-lock/*"]

INSTALL = """\
- hosts: all
  gather_facts: true
  gather_subset: ["!all", "!min", local]
  fact_path: "{{ rolloutd_fact_path }}"
  tasks:
    - name: install
      ansible.builtin.raw: |
        cat {{ ansible_local.rolloutd.stages['sound/stage'].artifacts.app.path }} > {{ private }}/installed
        echo x >> {{ private }}/runs
"""

OPENED_PORT = 9090

DISTURB = """\
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.raw: touch {{ private }}/touched
"""

# What each playbook does to a node in service, and what the daemon says of it.
DISTURBANCES = {
    "restart": (
        """\
    - ansible.builtin.raw: |
        kill $(cat {{ private }}/service.pid); rm {{ private }}/service.pid
        until test -e {{ private }}/service.pid; do sleep 0.02; done
""",
        rf"process/tcp/{SERVICE_PORT}: (python\S*) pid \d+, since tick \d+ -> \1 pid \d+, since tick \d+",
    ),
    "port": (
        f"""\
    - ansible.builtin.raw: |
        setsid {sys.executable} -SE {{{{ private }}}}/service {OPENED_PORT} {{{{ private }}}}/opened.pid \\
            > /dev/null 2>&1 < /dev/null &
        until test -e {{{{ private }}}}/opened.pid; do sleep 0.02; done
""",
        rf"port/tcp/{OPENED_PORT}: absent -> 127\.0\.0\.1; process/tcp/{OPENED_PORT}: absent -> python.*",
    ),
    "sysctl": (
        "    - ansible.builtin.raw: echo 99 > /proc/sys/net/ipv4/ip_default_ttl\n",
        r"sysctl/net\.ipv4\.ip_default_ttl: 64 -> 99",
    ),
    "reboot": (
        '    - ansible.builtin.reboot: {reboot_command: "{{ private }}/reboot"}\n',
        r"boot-id: [0-9a-f-]{36} -> [0-9a-f-]{36}",
    ),
}


def test_prepared_rollout_passes_and_each_disturbance_stops_at_first_node(tmp_path: Path) -> None:
    labels = {
        f"{case}{number}": {
            "team": case,
            "rack": "r1",
            "role": "worker",
            "canary": "true" if f"{case}{number}" == "sound1" else "false",
            "rolloutd_fact_path": str(tmp_path / "private" / f"{case}{number}" / "facts"),
        }
        for case in ("sound", *DISTURBANCES)
        for number in (1, 2)
    }
    with private_nodes(tmp_path, labels) as env:
        assert env.routes() == ""
        sound_rollout(env)
        disturbed = {
            case: env.submit(disturbing_plan(case), {f"{case}.yml": DISTURB + tasks})
            for case, (tasks, _) in DISTURBANCES.items()
        }
        for rollout in disturbed.values():
            env.vote(rollout, "start")
        for case, rollout in disturbed.items():
            env.wait_until(partial(is_failed, env, rollout), f"{case} is noticed")
            nodes = env.nodes(rollout)
            params = nodes[f"{case}1"]["reason"]["params"]
            assert params["step"] == "prepare.install"
            assert re.fullmatch(DISTURBANCES[case][1], params["message"]), params["message"]
            status = env.status(rollout)
            assert (status["state"], status["reason"]["code"]) == ("paused", "disturbed")
            assert (env.private(f"{case}1") / "touched").exists()
            assert not (env.private(f"{case}2") / "touched").exists()
            assert nodes[f"{case}2"]["phase"] == "pending"


def is_failed(env: PrivateNodes, rollout: str) -> bool:
    return bool(env.status(rollout)["failed"])


def sound_rollout(env: PrivateNodes) -> None:
    """Roll out twice: the second one sends nothing and starts no install."""
    content = os.urandom(300_000)
    nodes = ("sound1", "sound2")
    manifest = env.write_artifacts({"app-1.0.bin": content})
    digest = hashlib.sha256(content).hexdigest()
    cache = f"{env.directory}/private/{{{{ node.name }}}}/cache"
    stage = {"stage": {"manifest": manifest, "to": cache, "may_change": SHARED}}
    wanted = plan_of("sound", [stage, {"install": {"playbook": "install.yml", "may_change": SHARED}}])
    playbooks = {"change.yml": CHANGE_PLAYBOOK, "install.yml": INSTALL}
    first = env.submit(wanted, playbooks)
    assert env.finish(first)["done"] == len(nodes)
    again = env.submit(wanted, playbooks, again=True)
    assert env.finish(again)["done"] == len(nodes)
    for node in nodes:
        assert (env.private(node) / "installed").read_bytes() == content
        assert (env.private(node) / "runs").read_text() == "x\n"
    assert env.carried_artifacts(again) == [(digest, digest, [*nodes])]
    rows = env.client.get(api_path("rollouts", again, "prepare"))["preparations"]
    assert {(row["state"], row["bytes"]) for row in rows} == {("skipped", 0)}
    file = f"cache/{digest}/app-1.0.bin"
    truncate_before_skip_and_before_slot(env, wanted, playbooks, file, content)
    install_newer_artifact_twice_and_clean(env, wanted, playbooks)


def truncate_before_skip_and_before_slot(
    env: PrivateNodes, wanted: dict[str, Any], playbooks: dict[str, str], file: str, content: bytes
) -> None:
    """A file that is truncated on its node is staged again there, whatever the node's checkpoint says."""
    files = {node: env.private(node) / file for node in ("sound1", "sound2")}
    files["sound1"].write_bytes(content[:-1])
    # Another change of the same stages: no node is found to be current.
    maintain = {**wanted["spec"]["maintain"], "timeout": "31m"}
    rollout = env.submit({**wanted, "spec": {**wanted["spec"], "maintain": maintain}}, playbooks)
    env.vote(rollout, "start")
    env.wait_until(lambda: env.nodes(rollout)["sound1"]["phase"] == "done", "the canary is done")
    env.wait_until(lambda: stage_rows(env, rollout)["sound2"]["state"] == "skipped", "sound2 is prepared")
    assert files["sound1"].read_bytes() == content
    files["sound2"].write_bytes(content[:1000])
    assert env.finish(rollout)["done"] == 2
    assert files["sound2"].read_bytes() == content
    for node, size in (("sound1", 299_999), ("sound2", 1000)):
        row = stage_rows(env, rollout)[node]
        assert (row["state"], row["bytes"]) == ("done", len(content))
        assert row["text"] == f"app 1.0: {files[node]} has {size} bytes, not 300000; staged again"


def stage_rows(env: PrivateNodes, rollout: str) -> dict[str, dict[str, Any]]:
    rows = env.client.get(api_path("rollouts", rollout, "prepare"))["preparations"]
    return {row["node"]: row for row in rows if row["stage"] == "stage"}


def install_newer_artifact_twice_and_clean(
    env: PrivateNodes, wanted: dict[str, Any], playbooks: dict[str, str]
) -> None:
    """Only the artifact is another: it is installed, and cleaning keeps it for the rollout that skips it."""
    newer = os.urandom(300_000)
    env.write_artifacts({"app-1.0.bin": newer})
    for runs in ("x\nx\n", "x\nx\n"):
        assert env.finish(env.submit(wanted, playbooks, again=True))["done"] == 2
        for node in ("sound1", "sound2"):
            assert (env.private(node) / "installed").read_bytes() == newer
            assert (env.private(node) / "runs").read_text() == runs
    kept = hashlib.sha256(newer).hexdigest()
    for node in ("sound1", "sound2"):
        lines = env.client.stream(f"/v1/clean/{node}", method="POST", body={"reason": "tests"})
        assert not [file for line in lines for file in line["files"] if kept in file["path"]]
        assert (env.private(node) / "cache" / kept).is_dir()


def disturbing_plan(case: str) -> dict[str, Any]:
    return plan_of(case, [{"install": {"playbook": f"{case}.yml", "may_change": SHARED}}])


def plan_of(case: str, stages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a plan over the nodes of a case."""
    maintain = {"playbook": "change.yml", "vars": {"log_file": "{{ private }}/log"}}
    return plan(case, targets=f"team={case}", prepare=stages, soak="0s", maintain=maintain)
