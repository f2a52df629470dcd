"""Nodes that cut themselves off restore themselves: real sshds in network namespaces, real Ansible.

n1 drops its route, n3 stops its sshd; n2 is never begun.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.daemon_environment import DaemonEnvironment, plan
from tests.support.playbook_node import playbook_files
from tests.support.sshd import Sshd

AFTER_S = 4
LIMIT_S = AFTER_S + 5
"""Within so many seconds after the cut the node is back."""

PORT = 2222
"""Of the sshd in the namespace, where nothing else listens."""

CUT_OFF = """\
- hosts: all
  gather_facts: false
  vars:
    own: "{{ net }}/{{ inventory_hostname }}"
  tasks:
    - name: write a configuration that cuts the node off
      ansible.builtin.copy: {content: "blackhole\\n", dest: "{{ own }}/route", mode: "0600"}
    - name: write another file
      ansible.builtin.copy: {content: "new\\n", dest: "{{ own }}/new"}
    - name: apply it
      ansible.builtin.shell: touch {{ own }}.cut-at && {{ cut[inventory_hostname] }}
    - name: go on
      ansible.builtin.shell: echo late >> {{ own }}/route
"""

LABELS = {
    name: {"team": team, "rack": "r1", "role": "worker", "canary": canary}
    for name, team, canary in (("n1", "t1", "true"), ("n2", "t1", "false"), ("n3", "t3", "true"))
}
CUT = ("n1", "n3")

pytestmark = [
    pytest.mark.servers,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for a namespace"
    ),
]


class NamespaceEnvironment(DaemonEnvironment):
    """A daemon over n1 and n3, each in a network namespace with one route to it, and n2 on this machine."""

    def namespace(self, name: str) -> str:
        return f"rolloutd-{os.getpid()}-{name}"

    def address(self, name: str, host: int) -> str:
        """Return an address of the node's network: 1 is the daemon, 2 the node."""
        subnet = f"10.{200 + os.getpid() % 50}.{os.getpid() // 50 % 256}"
        return f"{subnet}.{10 * int(name[1:]) + host}"

    def link(self, name: str, end: str = "a") -> str:
        return f"ro{os.getpid()}{name}{end}"

    def gateway(self, name: str) -> str:
        return f"{self.address(name, 1)}/32"

    @property
    def net(self) -> Path:
        """The directory with each node's network configuration."""
        return self.directory / "etc" / "net"

    def make_sshd(self, name: str) -> Sshd:
        if name not in CUT:
            return Sshd()
        sshd = Sshd((self.address(name, 2),), ("ip", "netns", "exec", self.namespace(name)))
        sshd.port = PORT
        return sshd

    def make_namespace(self, name: str) -> None:
        host, node = self.link(name), self.link(name, "b")
        namespace, address = self.namespace(name), f"{self.address(name, 2)}/32"
        route = self.net / name / "route"
        route.parent.mkdir(parents=True)
        route.write_text(f"{self.gateway(name)} dev {node}\n")
        route.chmod(0o640)
        for command in (
            f"ip netns add {namespace}",
            f"ip link add {host} type veth peer name {node} netns {namespace}",
            f"ip addr add {self.gateway(name)} dev {host}",
            f"ip link set {host} up",
            f"ip route add {address} dev {host}",
            f"ip -n {namespace} addr add {address} dev {node}",
            f"ip -n {namespace} link set {node} up",
            f"ip -n {namespace} link set lo up",
            f"ip -n {namespace} route add {self.gateway(name)} dev {node}",
        ):
            subprocess.run(command.split(), check=True)

    def stop(self) -> None:
        super().stop()
        for name in CUT:
            # An sshd that the guard has started has no mark in its environment, which holds its title.
            listed = subprocess.run(
                ["ip", "netns", "pids", self.namespace(name)], check=False, capture_output=True, text=True
            )
            for pid in listed.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            # The kernel ends a namespace later than the command; the next test may use the link's name.
            subprocess.run(["ip", "link", "del", self.link(name)], check=False)
            subprocess.run(["ip", "netns", "del", self.namespace(name)], check=False)

    def configuration(self) -> dict[str, tuple[str, int]]:
        """Return the content and the mode of each file of the nodes' configurations."""
        return {
            str(path): (path.read_text(), stat.S_IMODE(path.stat().st_mode)) for path in self.net.glob("*/*")
        }


@contextmanager
def environment(directory: Path) -> Iterator[NamespaceEnvironment]:
    made = NamespaceEnvironment(directory, LABELS)
    try:
        for name in CUT:
            made.make_namespace(name)
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
        extra = made.address("n1", 9)
        route, added = made.net / "n1" / "route", made.net / "n1" / "added"
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
        spec = plan(
            "network",
            targets="team=t1",
            maintain={"playbook": "network.yml", "vars": variables, "timeout": "60s", "expected": "10s"},
            guard={"paths": [str(made.net / "n1")], "commands": [str(apply)], "after": "60s"},
            verify=[{"reachable": {}}, {"playbook": {"file": "network-verify.yml"}}],
        )
        rollout = made.submit(spec, playbook_files())
        made.vote(rollout, "start")
        made.wait_for_gate(rollout, "continue")
        assert made.nodes(rollout)["n1"]["outcome"] == "changed"
        routes = ["ip", "-n", made.namespace("n1"), "route", "show"]
        assert extra in subprocess.run(routes, check=True, capture_output=True, text=True).stdout
        assert (tmp_path / "guards" / "n1" / f"{rollout}.1" / "confirmed").exists()
        assert not (tmp_path / "guards" / "n1" / f"{rollout}.1" / "backup").exists()


@pytest.mark.parametrize(
    "is_killed", [False, pytest.param(True, marks=pytest.mark.long)], ids=["cut off", "killed"]
)
def test_cut_off_nodes_restore_themselves(tmp_path: Path, is_killed: bool) -> None:
    with environment(tmp_path) as made:
        before = made.configuration()
        own = f"{made.net}/{{{{ node.name }}}}"
        sshd = made.sshds["n3"].directory
        apply = {
            "n1": f"ip route replace $(cat {made.net}/n1/route)",
            "n3": f"/usr/sbin/sshd -f {sshd}/sshd_config -E {sshd}/sshd.log",
        }
        cut = {"n1": f"ip route del {made.gateway('n1')}", "n3": f"kill $(cat {sshd}/sshd.pid)"}
        for name, command in apply.items():
            (made.net / f"{name}.apply").write_text(command)
        spec = plan(
            "route",
            canary={"select": "canary=true", "max_parallel": 2},
            maintain={
                "playbook": "change.yml",
                "vars": {"net": str(made.net), "cut": cut},
                "timeout": "60s",
                "expected": "10s",
            },
            guard={
                "paths": [f"{own}/route", f"{own}/new"],
                "commands": [f"sh {own}.apply"],
                "after": f"{AFTER_S}s",
                "confirm": [{"reachable": {}}, {"node": {"tcp": f"{{{{ node.address }}}}:{PORT}"}}],
            },
        )
        rollout = made.submit(spec, {"change.yml": CUT_OFF})
        made.vote(rollout, "start")
        cuts = [made.net / f"{name}.cut-at" for name in CUT]
        made.wait_until(lambda: all(each.exists() for each in cuts), "the nodes cut themselves off")
        if is_killed:
            made.kill_daemon()
        records = [tmp_path / "guards" / name / f"{rollout}.1" / "restored" for name in CUT]
        made.wait_until(lambda: all(each.exists() for each in records), "the nodes restore themselves")
        for at, restored in zip(cuts, records, strict=True):
            assert restored.stat().st_mtime - at.stat().st_mtime <= LIMIT_S
        if is_killed:
            made.start_daemon()

        def are_failed() -> bool:
            nodes = made.nodes(rollout)
            return all(nodes[name]["phase"] == "failed" for name in CUT)

        made.wait_until(are_failed, "the daemon finds that")
        for name in CUT:
            failure = made.client.get(f"/v1/rollouts/{rollout}/nodes/{name}")["failure"]
            assert failure["code"] == "restored-itself"
            said = f"{name} restored itself because the daemon was silent: {made.net}/{name}/new"
            assert said in failure["message"]
        assert made.configuration() == before
        waiting = made.nodes(rollout)["n2"]
        assert (waiting["phase"], waiting["attempt"]) == ("pending", 0)
        assert made.status(rollout)["state"] == "paused"
        assert made.run_processes() == []
