"""What is searched on a machine, and what is proposed from an inventory."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rolloutd.admin.init import discovery, proposal
from rolloutd.admin.init.discovery import Machine

NODES = {
    "w1": {"team": "web", "rack": "r1", "site": "ams"},
    "w2": {"team": "web", "rack": "r2", "site": "ams"},
    "d1": {"team": "db", "rack": "r1", "site": "ams"},
    "x1": {"site": "fra"},
}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    for name in ("home", "cwd", "etc/rolloutd", "etc/haproxy", "etc/ansible"):
        (tmp_path / name).mkdir(parents=True)
    return Machine({"PATH": os.environ["PATH"]}, tmp_path / "home", tmp_path / "cwd", tmp_path)


def settings_directory(machine: Machine) -> Path:
    return machine.root / "etc/rolloutd"


def test_inventories_are_named_once(machine: Machine) -> None:
    """One file that the environment, ansible.cfg and its name lead to is one inventory."""
    hosts = machine.cwd / "hosts.yml"
    hosts.write_text("all: {hosts: {n1: {}}}\n")
    (machine.cwd / "ansible.cfg").write_text("[defaults]\ninventory = hosts.yml,more\n")
    (machine.cwd / "more").write_text("n2\n")
    (machine.root / "etc/ansible/hosts").write_text("# only comments, as Debian installs it\n")
    named = Machine(
        {**machine.environ, "ANSIBLE_INVENTORY": "hosts.yml"}, machine.home, machine.cwd, machine.root
    )
    candidates = discovery.find_inventories(named, settings_directory(machine))
    assert [(Path(c.text).name, c.origin) for c in candidates] == [
        ("hosts.yml", "$ANSIBLE_INVENTORY"),
        ("more", str(machine.cwd / "ansible.cfg")),
    ]


def test_kubeconfig_of_the_user_is_personal(machine: Machine) -> None:
    text = "current-context: ams/admin\ncontexts: []\n"
    (machine.home / ".kube").mkdir()
    (machine.home / ".kube/config").write_text(text)
    (settings_directory(machine) / "fra.kubeconfig").write_text(text)
    (settings_directory(machine) / "broken.kubeconfig").write_text("{")
    candidates = discovery.find_clusters(machine, settings_directory(machine))
    assert [(c.name, c.is_personal) for c in candidates] == [
        ("broken", False),
        ("fra", False),
        ("ams-admin", True),
    ]
    assert [c.name for c in candidates if c.problem] == ["broken"]


def test_only_admin_sockets_of_haproxy_count(machine: Machine) -> None:
    (machine.root / "etc/haproxy/haproxy.cfg").write_text(
        "global\n"
        "  stats socket /run/haproxy/admin.sock mode 660 level admin expose-fd listeners\n"
        "  stats socket /run/haproxy/user.sock level user\n"
        "  stats socket ipv4@127.0.0.1:9999 level admin\n"
        "  # stats socket /run/old.sock level admin\n"
    )
    candidates = discovery.find_balancers(machine)
    assert [(c.name, c.params) for c in candidates] == [
        ("lb1", {"socket": "/run/haproxy/admin.sock"}),
        ("lb2", {"tcp": "127.0.0.1:9999"}),
    ]


def test_netbox_without_a_token_file_is_not_usable(machine: Machine) -> None:
    environ = {"NETBOX_API": "https://netbox.example/api/", "NETBOX_TOKEN": "secret"}
    named = Machine(environ, machine.home, machine.cwd, machine.root)
    [candidate] = discovery.find_netbox(named, settings_directory(machine))
    assert (candidate.params, candidate.is_personal) == ({"url": "https://netbox.example"}, True)
    (settings_directory(machine) / "netbox-token").write_text("secret")
    [candidate] = discovery.find_netbox(named, settings_directory(machine))
    assert candidate.params["token_file"] == str(settings_directory(machine) / "netbox-token")
    assert not candidate.is_personal


@pytest.mark.servers
def test_ssh_configuration_is_read_by_ssh(machine: Machine) -> None:
    (machine.home / ".ssh").mkdir(stat.S_IRWXU)
    (machine.home / ".ssh/config").write_text("Host 10.0.0.*\n  User ops\n  ProxyJump jump.example\n")
    inside, outside = discovery.read_ssh_views(machine, ["10.0.0.7", "192.0.2.1"])
    assert (inside.user, inside.jump) == ("ops", "jump.example")
    assert outside.jump == ""
    assert discovery.read_ssh_views(machine, ["-oProxyCommand=x"]) == []


def test_labels_are_plain_variables() -> None:
    hosts = [
        {"team": "web", "rack": ["r1"], "canary": True, "os": "debian", "ansible_host": "a", "serial": "s1"},
        {"team": "{{ group }}", "os": "rocky", "ansible_host": "b", "serial": "s2"},
        {"os": "debian", "ansible_host": "c"},
    ]
    assert proposal.choose_labels(hosts) == ["team", "canary"]
    assert proposal.other_labels(hosts) == ["os", "serial"]


def test_pools_are_teams_and_failure_domains() -> None:
    changes = proposal.propose_pools(NODES)
    assert [change.key for change in changes] == ["pools.team", "pools.rack"]
    assert "nodes by team: web 2, db 1" in changes[0].reason
    assert "1 node without the label team share the pool team/none" in changes[0].reason


def test_reasons_stay_true_after_a_change() -> None:
    """A later run changes values and keeps comments, so no comment may repeat a value as present."""
    nodes = {"n1": {"team": "web", "rack": "r1"}, "n2": {"rack": "r2"}}
    pools, teams = proposal.propose_pools(nodes), proposal.propose_teams(nodes, lambda _: False, None)
    reasons = [change.reason for change in (*pools, *teams)]
    assert not any("is down at once" in reason or "have no voters" in reason for reason in reasons)


def test_teams_without_voters_get_an_owner() -> None:
    alone = proposal.propose_teams(NODES, lambda name: False, "alice")
    assert [(c.path[1], c.value["members"]) for c in alone] == [("infra", ["alice"]), ("db", []), ("web", [])]
    grouped = proposal.propose_teams(NODES, lambda name: name == "db", "alice")
    assert [(c.path[1], c.value["members"]) for c in grouped] == [("db", ["@db"]), ("web", [])]


def test_cluster_labels_give_fleet_labels() -> None:
    nodes = [{"example.com/team": "web", "topology.kubernetes.io/zone": "a", "kubernetes.io/os": "linux"}]
    assert proposal.choose_cluster_labels(nodes) == {
        "team": "example.com/team",
        "zone": "topology.kubernetes.io/zone",
    }
