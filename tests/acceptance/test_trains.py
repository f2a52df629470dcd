"""Three changes in one outage of each node, with real web servers behind a real HAProxy.

The daemon is killed again and again.  The first change stops a node's web server and the last one starts it,
so a node that returns between two changes fails a client.  Each node writes a journal of its own: which
change ran, and the state of its server at the balancer.

`make trains` runs it over 24 nodes with 20 kills; the defaults are a small fleet and a few kills.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rolloutd import settings
from rolloutd.control.client import api_path
from tests.acceptance.test_balancer import DRAIN, READY, WebFleet, web_fleet
from tests.support import web_server
from tests.support.audit_judge import judge_audit
from tests.support.daemon_environment import plan
from tests.support.web_client import WebClient

pytestmark = [pytest.mark.servers("haproxy"), pytest.mark.long]

NODES = int(os.environ.get("ROLLOUTD_TEST_TRAIN_NODES", "4"))
KILLS = int(os.environ.get("ROLLOUTD_TEST_TRAIN_KILLS", "3"))
SEED = int(os.environ.get("ROLLOUTD_TEST_SEED", "1"))

TEAMS = min(3, NODES // 2)
LONGEST_LIFE_S = 5.0
WORK_PER_KILL_S = 0.3  # of each change: the rounds of nodes then last longer than all lives and restarts

CHANGES = ("kernel", "driver", "certificates")

MAINT = "1"
"""The admin state of a server that HAProxy gives no clients."""

CHANGE = r"""- hosts: all
  gather_facts: false
  tasks:
    - name: begin
      ansible.builtin.raw: |
        bash -c '
        exec 3<>/dev/tcp/127.0.0.1/{{ balancer_port }}; echo "show servers state web" >&3
        state=$(awk "\$4 == \"{{ inventory_hostname }}\" {print \$7}" <&3)
        echo "begin {{ change }} $state" >> {{ journal }}/{{ inventory_hostname }}'
    - name: stop the web server
      ansible.builtin.raw: kill -9 $(cat {{ directory }}/{{ inventory_hostname }}.pid)
      when: change == "kernel"
    - name: change it
      ansible.builtin.raw: sleep {{ work_s }}
    - name: start the web server, which the terminal's end must not end
      ansible.builtin.raw: |
        trap '' HUP
        rm {{ directory }}/{{ inventory_hostname }}.pid
        setsid {{ ansible_python_interpreter }} {{ web_server }} {{ port }} \
          {{ directory }}/{{ inventory_hostname }}.pid >/dev/null 2>&1 </dev/null &
        while ! test -s {{ directory }}/{{ inventory_hostname }}.pid; do sleep 0.1; done
      when: change == "certificates"
    - name: end
      ansible.builtin.raw: |
        bash -c '
        exec 3<>/dev/tcp/127.0.0.1/{{ balancer_port }}; echo "show servers state web" >&3
        state=$(awk "\$4 == \"{{ inventory_hostname }}\" {print \$7}" <&3)
        echo "end {{ change }} $state" >> {{ journal }}/{{ inventory_hostname }}'
"""


def test_killed_daemon_isolates_each_node_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("t")
    draw = random.Random(SEED)
    with web_fleet(directory, NODES, TEAMS) as fleet:
        daemon = fleet.daemon
        with WebClient(fleet.balancer.port, fast=10, slow=0) as client:
            rollouts = submit_train(fleet)
            train = train_of(fleet)
            assert (train["rollouts"], train["approved"], train["state"]) == (rollouts, True, "active")
            assert (train["nodes_shared"], train["outages_saved"]) == (NODES, 0)
            daemon.client.delete("/v1/freezes", {"scope": "all", "reason": "begin"})
            kill_repeatedly(fleet, rollouts, draw)
            for rollout in rollouts:
                fleet.wait_until_done(rollout)
        assert client.failures == []
        assert min(client.answered["/"], NODES) == NODES
        train = train_of(fleet)
        assert (train["nodes_shared"], train["outages_saved"], train["state"]) == (NODES, 2 * NODES, "ended")
        nodes = daemon.labels
        once = [f"{what} {change} {MAINT}" for change in CHANGES for what in ("begin", "end")]
        assert {node: journal(fleet, node) for node in nodes} == dict.fromkeys(nodes, once)
        isolated = isolations(fleet)
        print(f"{KILLS} kills, {isolated.total()} isolations of {NODES} nodes for {len(rollouts)} changes")
        assert isolated == Counter(dict.fromkeys(nodes, 1))
        assert set(fleet.balancer.admin_states().values()) == {READY}
        daemon.wait_until(lambda: daemon.run_processes() == [], "no process is left")
        daemon.kill_daemon()
        daemon.start_daemon()
        assert train_of(fleet) == train
        daemon.kill_daemon()
        assert judge_audit(directory / "state", settings.load(directory / "config.yaml")) == []
        assert "InvariantViolation" not in (directory / "daemon.log").read_text()


def submit_train(fleet: WebFleet) -> list[str]:
    """Submit the changes while a freeze holds them, make a train of them, and open their gates."""
    daemon, reason = fleet.daemon, "kernel week"
    (daemon.directory / "journal").mkdir()
    daemon.client.post("/v1/freezes", {"scope": "all", "reason": reason})
    rollouts = [daemon.submit(plan_of(fleet, change), {"change.yml": CHANGE}) for change in CHANGES]
    daemon.client.put("/v1/trains/kernel-week", {"rollouts": rollouts, "reason": reason})
    for rollout in rollouts:
        daemon.vote(rollout, "start")
    return rollouts


def plan_of(fleet: WebFleet, change: str) -> dict[str, Any]:
    """Return the plan of one change; all nodes are in its first wave."""
    variables = {
        "change": change,
        "journal": str(fleet.daemon.directory / "journal"),
        "directory": str(fleet.daemon.directory),
        "web_server": str(Path(web_server.__file__)),
        "balancer_port": fleet.balancer.admin_port,
        "work_s": round(KILLS * WORK_PER_KILL_S, 1),
    }
    verify: list[dict[str, Any]] = [{"reachable": {"within": "60s"}}]
    if change == CHANGES[-1]:
        verify.append({"http": {"url": "http://127.0.0.1:{{ node.labels.port }}/", "within": "60s"}})
    return plan(
        change,
        isolate=[DRAIN],
        canary={"select": "role=worker", "max_parallel": NODES},
        soak="1s",
        maintain={"playbook": "change.yml", "vars": variables, "on_unknown": "pause"},
        verify=verify,
    )


def kill_repeatedly(fleet: WebFleet, rollouts: list[str], draw: random.Random) -> None:
    """Kill the daemon and start it again, at moments spread over the whole train."""
    for number in range(KILLS):
        time.sleep(draw.uniform(0.0, LONGEST_LIFE_S))
        done = [fleet.daemon.status(rollout)["done"] for rollout in rollouts]
        fleet.daemon.kill_daemon()
        print(f"kill {number + 1}: done {done}")
        fleet.daemon.start_daemon()
    assert not all(fleet.daemon.status(rollout)["state"] == "done" for rollout in rollouts)


def train_of(fleet: WebFleet) -> dict[str, Any]:
    """Return the train as the API shows it."""
    answer: dict[str, Any] = fleet.daemon.client.get(api_path("trains", "kernel-week"))
    return answer


def journal(fleet: WebFleet, node: str) -> list[str]:
    """Return what the node wrote about its changes."""
    return (fleet.daemon.directory / "journal" / node).read_text().splitlines()


def isolations(fleet: WebFleet) -> Counter[str]:
    """Return how often HAProxy says that each server went out of service."""
    log = fleet.balancer.log_file.read_text()
    return Counter(re.findall(r"Server web/(\S+) is going DOWN for maintenance", log))
