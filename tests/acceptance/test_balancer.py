"""Web servers behind a real HAProxy are changed one after the other, and no client's request fails.

Real sshd nodes, Ansible and the daemon.  The playbook kills each node's web server for three seconds.  What
happened is judged by the client, which never retries, and by HAProxy's own statistics.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from tests.support import web_server
from tests.support.daemon_environment import POLL_S, DaemonEnvironment, daemon_environment, plan
from tests.support.haproxy import Haproxy
from tests.support.ports import free_port
from tests.support.waiting import wait_until
from tests.support.web_client import WebClient

pytestmark = pytest.mark.servers("haproxy")

STOP_PLAYBOOK = r"""- hosts: all
  gather_facts: false
  tasks:
    - name: stop the web server
      ansible.builtin.raw: kill -9 $(cat {{ directory }}/{{ inventory_hostname }}.pid)
    - name: begin
      ansible.builtin.raw: echo "begin {{ inventory_hostname }} $(date +%s.%N)" >> {{ log_file }}
    - name: change it
      ansible.builtin.raw: |
        sleep 3
        while test -e {{ log_file }}.hold; do sleep 0.1; done
    - name: end
      ansible.builtin.raw: echo "end {{ inventory_hostname }} $(date +%s.%N)" >> {{ log_file }}
    - name: start the web server, which the terminal's end must not end
      ansible.builtin.raw: |
        trap '' HUP
        rm {{ directory }}/{{ inventory_hostname }}.pid
        setsid {{ ansible_python_interpreter }} {{ web_server }} {{ port }} \
          {{ directory }}/{{ inventory_hostname }}.pid >/dev/null 2>&1 </dev/null &
        while ! test -s {{ directory }}/{{ inventory_hostname }}.pid; do sleep 0.1; done
"""

NODES, TEAMS = 12, 3

LIMIT_S = 900.0
"""A team's nodes go one after the other, and each waits for responses of ten seconds."""

READY, MAINT, DRAINING = (0, 40), (1, 40), (8, 40)
"""Admin state, as HAProxy's bit mask, and weight."""

DRAIN = {"haproxy": {"backend": "web", "server": "{{ node.name }}", "drain_timeout": "5m"}}
NO_DRAIN = {"command": {"do": "true", "undo": "true"}}


class WebFleet:
    """Nodes with a web server each, a balancer before them, and a daemon that knows both."""

    def __init__(self, daemon: DaemonEnvironment, balancer: Haproxy) -> None:
        self.daemon = daemon
        self.balancer = balancer

    def submit(self, isolate: dict[str, Any]) -> str:
        """Submit the change over all nodes and open its start gate."""
        variables = {
            "log_file": str(self.daemon.log_file),
            "directory": str(self.daemon.directory),
            "web_server": str(Path(web_server.__file__)),
        }
        change = plan(
            "web",
            isolate=[isolate],
            canary={"select": "canary=true", "max_parallel": 10},
            maintain={"playbook": "stop.yml", "vars": variables},
            verify=[
                {"reachable": {"within": "60s"}},
                {"http": {"url": "http://127.0.0.1:{{ node.labels.port }}/", "within": "60s"}},
            ],
        )
        rollout = self.daemon.submit(change, {"stop.yml": STOP_PLAYBOOK})
        self.daemon.vote(rollout, "start")
        return rollout

    def finish(self, rollout: str) -> None:
        """Open the gate after the canaries and wait until all nodes are done."""
        self.daemon.wait_for_gate(rollout, "continue")
        self.daemon.vote(rollout, "continue")
        self.wait_until_done(rollout)

    def wait_until_done(self, rollout: str) -> None:
        self.daemon.wait_until(
            lambda: self.daemon.status(rollout)["state"] == "done", "all nodes are done", LIMIT_S
        )

    def reason_of(self, rollout: str, node: str) -> str:
        """Return the text of the node's reason, "" for none."""
        return (self.daemon.nodes(rollout)[node]["reason"] or {"text": ""})["text"]

    def unavailable(self) -> list[str]:
        """Return the servers that get no new clients now."""
        statistics = self.balancer.statistics()
        return [name for name, row in statistics.items() if row["status"].split()[0] not in ("UP", "no")]


@contextmanager
def web_fleet(directory: Path, nodes: int, teams: int) -> Iterator[WebFleet]:
    """Run the fleet; the first node of each team is its canary."""
    ports = {f"web-{number:02}": free_port() for number in range(1, nodes + 1)}
    labels = {
        name: {
            "team": f"t{number % teams}",
            "role": "worker",
            "canary": str(number < teams).lower(),
            "port": str(port),
        }
        for number, (name, port) in enumerate(ports.items())
    }
    balancer = Haproxy(directory / "lb1", ports)
    inventory = {"path": str(directory / "hosts.yml"), "labels": ["team", "role", "canary", "port"]}
    settings = {
        "inventory": [{"ansible": inventory}],
        "haproxy": {"lb1": {"socket": str(balancer.socket)}},
        "ansible": {"parallel": 4},
    }
    servers = [start_web_server(port, directory / f"{name}.pid") for name, port in ports.items()]
    try:
        for name in ports:
            wait_until((directory / f"{name}.pid").exists)
        balancer.start()
        with daemon_environment(directory, labels, **settings) as daemon:
            yield WebFleet(daemon, balancer)
    finally:
        balancer.stop()
        for server in servers:
            server.kill()
            server.wait()


def start_web_server(port: int, pid_file: Path) -> subprocess.Popen[bytes]:
    """Start a node's first server; those that the playbook starts end with the node's sshd."""
    command = [sys.executable, web_server.__file__, str(port), str(pid_file)]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)


@contextmanager
def sampled_outages(fleet: WebFleet) -> Iterator[set[frozenset[str]]]:
    """Yield the sets of servers that were out of rotation at the same time, as HAProxy reports them."""
    seen: set[frozenset[str]] = set()
    ended = Event()

    def sample() -> None:
        while not ended.wait(POLL_S):
            seen.add(frozenset(fleet.unavailable()))

    thread = Thread(target=sample, name="outages")
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


@pytest.mark.long
def test_no_request_fails_while_every_server_is_stopped(tmp_path_factory: pytest.TempPathFactory) -> None:
    with web_fleet(tmp_path_factory.mktemp("b"), NODES, TEAMS) as fleet:
        with sampled_outages(fleet) as outages, WebClient(fleet.balancer.port) as client:
            rollout = fleet.submit(DRAIN)
            fleet.finish(rollout)
        print(f"{client.answered} answers, {client.rate:.0f}/s, {len(client.failures)} failures")
        assert client.failures == []
        assert min(client.answered.values()) > NODES
        assert sorted(span.node for span in fleet.daemon.spans()) == sorted(fleet.daemon.labels)
        assert fleet.daemon.status(rollout)["done"] == NODES
        assert set().union(*outages) == fleet.daemon.labels.keys()
        for outage in outages:
            teams = [fleet.daemon.labels[node]["team"] for node in outage]
            assert len(teams) == len(set(teams)), outage
        assert set(fleet.balancer.admin_states().values()) == {READY}


@pytest.mark.long
def test_requests_fail_when_nothing_is_drained(tmp_path_factory: pytest.TempPathFactory) -> None:
    with web_fleet(tmp_path_factory.mktemp("b"), 2, 1) as fleet:
        with WebClient(fleet.balancer.port) as client:
            fleet.submit(NO_DRAIN)
            wait_until(lambda: bool(client.failures))
        assert fleet.unavailable() == []


def test_rollout_waits_for_balancer_that_does_not_answer(tmp_path_factory: pytest.TempPathFactory) -> None:
    with web_fleet(tmp_path_factory.mktemp("b"), 3, 1) as fleet:
        with WebClient(fleet.balancer.port) as client:
            balancer, daemon = fleet.balancer, fleet.daemon
            daemon.pause_playbooks()
            rollout = fleet.submit(DRAIN)
            wait_until(lambda: balancer.admin_states()["web-01"] == DRAINING)
            balancer.hide_socket()
            daemon.wait_until(
                lambda: "there is no socket" in fleet.reason_of(rollout, "web-01"), "it waits to drain"
            )
            assert balancer.admin_states() == {"web-01": DRAINING, "web-02": READY, "web-03": READY}
            assert daemon.nodes(rollout)["web-01"]["phase"] == "isolating"

            balancer.show_socket()
            daemon.wait_until(daemon.spans, "the playbook runs")
            balancer.hide_socket()
            daemon.resume_playbooks()
            daemon.wait_until(
                lambda: "there is no socket" in fleet.reason_of(rollout, "web-01"), "it waits to return"
            )
            assert balancer.admin_states() == {"web-01": MAINT, "web-02": READY, "web-03": READY}
            assert daemon.nodes(rollout)["web-01"]["phase"] == "verifying"

            balancer.show_socket()
            daemon.wait_until(lambda: daemon.nodes(rollout)["web-01"]["phase"] == "done", "it is done")
        assert client.failures == []
        assert set(balancer.admin_states().values()) == {READY}
