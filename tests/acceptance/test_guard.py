"""A node that drops its own route restores itself: a real sshd in a network namespace, real Ansible."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.daemon_environment import DaemonEnvironment, plan
from tests.support.sshd import Sshd

PLAYBOOKS = Path(__file__).parents[2] / "playbooks"

AFTER_S = 4
LIMIT_S = AFTER_S + 5
"""Within so many seconds after the cut the node is back."""

PORT = 2222
"""Of the sshd in the namespace, where nothing else listens."""

DROP_ROUTE = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: write a configuration that cuts the node off
      ansible.builtin.copy: {content: "blackhole\\n", dest: "{{ net }}/route", mode: "0600"}
    - name: write another file
      ansible.builtin.copy: {content: "new\\n", dest: "{{ net }}/new"}
    - name: apply it
      ansible.builtin.shell: touch {{ net }}/../cut-at && ip route del {{ gateway }}
    - name: go on
      ansible.builtin.shell: echo late >> {{ net }}/route
"""

LABELS = {name: {"team": "t1", "rack": "r1", "role": "worker", "canary": "false"} for name in ("n1", "n2")}

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for a namespace"
    ),
]


class NamespaceEnvironment(DaemonEnvironment):
    """A daemon over n1 in a network namespace, which it reaches by one route, and n2 on this machine."""

    @property
    def namespace(self) -> str:
        return f"rolloutd-{os.getpid()}"

    @property
    def subnet(self) -> str:
        return f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 256}"

    @property
    def gateway(self) -> str:
        return f"{self.subnet}.1/32"

    @property
    def net(self) -> Path:
        """The directory with the node's network configuration."""
        return self.directory / "etc" / "net"

    def make_sshd(self, name: str) -> Sshd:
        if name != "n1":
            return Sshd()
        sshd = Sshd((f"{self.subnet}.2",), ("ip", "netns", "exec", self.namespace))
        sshd.port = PORT
        return sshd

    def make_namespace(self) -> None:
        host, node = f"ro{os.getpid()}a", f"ro{os.getpid()}b"
        self.net.mkdir(parents=True)
        (self.net / "route").write_text(f"{self.gateway} dev {node}\n")
        (self.net / "route").chmod(0o640)
        for command in (
            f"ip netns add {self.namespace}",
            f"ip link add {host} type veth peer name {node} netns {self.namespace}",
            f"ip addr add {self.gateway} dev {host}",
            f"ip link set {host} up",
            f"ip route add {self.subnet}.2/32 dev {host}",
            f"ip -n {self.namespace} addr add {self.subnet}.2/32 dev {node}",
            f"ip -n {self.namespace} link set {node} up",
            f"ip -n {self.namespace} link set lo up",
            f"ip -n {self.namespace} route add {self.gateway} dev {node}",
        ):
            subprocess.run(command.split(), check=True)

    def stop(self) -> None:
        super().stop()
        subprocess.run(["ip", "netns", "del", self.namespace], check=False)

    def configuration(self) -> dict[str, tuple[str, int]]:
        """Return the content and the mode of each file of the network configuration."""
        return {
            path.name: (path.read_text(), stat.S_IMODE(path.stat().st_mode)) for path in self.net.iterdir()
        }


@contextmanager
def environment(directory: Path) -> Iterator[NamespaceEnvironment]:
    made = NamespaceEnvironment(directory, LABELS)
    try:
        made.make_namespace()
        made.start_nodes()
        made.write_settings(
            ssh={"known_hosts": str(directory / "known_hosts"), "guard_dir": str(directory / "guards")}
        )
        made.start_daemon()
        yield made
    finally:
        made.stop()


@pytest.mark.long
def test_network_playbook_is_confirmed_under_guard(tmp_path: Path) -> None:
    with environment(tmp_path) as made:
        extra = f"{made.subnet}.9"
        route, added = made.net / "route", made.net / "added"
        apply = made.directory / "apply"
        apply.write_text(f"#!/bin/sh\nfor file in {route} {added}; do ip route replace $(cat $file); done\n")
        apply.chmod(0o755)
        device = route.read_text().split()[-1]
        variables = {
            "network_files": {str(added): f"{extra} dev {device}\n"},
            "network_backend": "ifupdown",
            "network_command": str(apply),
            "network_prior_file": str(made.directory / "prior.json"),
            "network_routes": [f"{extra} dev {device}"],
            "ansible_become": False,
        }
        names = ("network.yml", "network-verify.yml", "tasks/network-backend.yml")
        spec = plan(
            "network",
            maintain={"playbook": "network.yml", "vars": variables, "timeout": "60s", "expected": "10s"},
            guard={"paths": [str(made.net)], "commands": [str(apply)], "after": "60s"},
            verify=[{"reachable": {}}, {"playbook": {"file": "network-verify.yml"}}],
        )
        rollout = made.submit(spec, {name: (PLAYBOOKS / name).read_text() for name in names})
        made.vote(rollout, "start")
        made.wait_for_gate(rollout, "continue")
        assert made.nodes(rollout)["n1"]["outcome"] == "changed"
        routes = ["ip", "-n", made.namespace, "route", "show"]
        assert extra in subprocess.run(routes, check=True, capture_output=True, text=True).stdout
        assert (tmp_path / "guards" / "n1" / f"{rollout}.1" / "confirmed").exists()
        assert not (tmp_path / "guards" / "n1" / f"{rollout}.1" / "backup").exists()


@pytest.mark.parametrize(
    "is_killed", [False, pytest.param(True, marks=pytest.mark.long)], ids=["cut off", "killed"]
)
def test_cut_off_node_restores_itself(tmp_path: Path, is_killed: bool) -> None:
    with environment(tmp_path) as made:
        before = made.configuration()
        spec = plan(
            "route",
            maintain={
                "playbook": "change.yml",
                "vars": {"net": str(made.net), "gateway": made.gateway},
                "timeout": "60s",
                "expected": "10s",
            },
            guard={
                "paths": [str(made.net / "route"), str(made.net / "new")],
                "commands": [f"ip route replace $(cat {made.net}/route)"],
                "after": f"{AFTER_S}s",
                "confirm": [{"reachable": {}}, {"node": {"tcp": f"{made.subnet}.2:{PORT}"}}],
            },
        )
        rollout = made.submit(spec, {"change.yml": DROP_ROUTE})
        made.vote(rollout, "start")
        cut = made.net.parent / "cut-at"
        made.wait_until(cut.exists, "the node drops its route")
        if is_killed:
            made.kill_daemon()
        restored = tmp_path / "guards" / "n1" / f"{rollout}.1" / "restored"
        made.wait_until(restored.exists, "the node restores itself")
        assert restored.stat().st_mtime - cut.stat().st_mtime <= LIMIT_S
        if is_killed:
            made.start_daemon()
        made.wait_until(lambda: made.nodes(rollout)["n1"]["phase"] == "failed", "the daemon finds that")
        nodes = made.nodes(rollout)
        failure = made.client.get(f"/v1/rollouts/{rollout}/nodes/n1")["failure"]
        assert failure["code"] == "restored-itself"
        assert f"n1 restored itself because the daemon was silent: {made.net}/new" in failure["message"]
        assert made.configuration() == before
        assert (nodes["n2"]["phase"], nodes["n2"]["attempt"]) == ("pending", 0)
        assert made.status(rollout)["state"] == "paused"
        assert made.run_processes() == []
