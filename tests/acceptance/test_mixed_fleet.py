"""One plan over Kubernetes nodes and plain hosts, some behind HAProxy: each isolated in its own way."""

from __future__ import annotations

import os
from itertools import combinations
from pathlib import Path

import pytest

from tests.support.cluster_environment import (
    POOLS,
    ClusterEnvironment,
    assert_restored,
    cluster_environment,
)
from tests.support.haproxy import Haproxy

pytestmark = pytest.mark.servers

NODES = 6
HOSTS = {
    f"h{number}": {"team": POOLS[number % 3], "role": "worker", "web": "true" if number <= 3 else "false"}
    for number in range(1, 7)
}
BALANCED = [name for name, labels in HOSTS.items() if labels["web"] == "true"]

PLAYBOOK = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: work
      ansible.builtin.raw: |
        echo "begin {{ inventory_hostname }} $(date +%s.%N)" >> {{ log_file }}
        test ! -e {{ flags }}/{{ inventory_hostname }} || touch {{ flags }}/{{ inventory_hostname }}.seen
        {{ show_servers }} > {{ flags }}/{{ inventory_hostname }}.servers
        echo "end {{ inventory_hostname }} $(date +%s.%N)" >> {{ log_file }}
"""
"""It records how the node is isolated while it is changed: its flag, and the balancer's servers."""

SHOW_SERVERS = (
    "python3 -c \"import socket;s=socket.create_connection(('127.0.0.1',{port}));"
    "s.sendall(b'show servers state web\\n');print(s.makefile().read())\""
)
MAINT = 0x01
"""Bit of HAProxy's srv_admin_state (`show servers state`): a person or program set maintenance."""


@pytest.mark.long
async def test_each_kind_isolated_in_its_own_way(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("m")
    flags = directory / "flags"
    cluster = directory / "k"
    for each in (flags, cluster):
        each.mkdir()
    servers = dict.fromkeys(BALANCED, 9)  # no client asks for them here
    balancer = Haproxy(directory / "lb", servers).start()
    try:
        settings = {"haproxy": {"lb1": {"tcp": f"127.0.0.1:{balancer.admin_port}"}}}
        named = os.environ.get("ROLLOUTD_TEST_KUBECONFIG")
        real = Path(named) if named else None
        async with cluster_environment(cluster, NODES, hosts=HOSTS, kubeconfig=real, **settings) as made:
            before = balancer.admin_states()
            rollout = await submit(made, flags, balancer)
            status = await made.in_thread(made.daemon.status, rollout)
            assert (status["total"], status["not_isolated"]) == (NODES + len(HOSTS), [])
            await made.wait_until_done(rollout)

            spans = made.daemon.spans()
            assert sorted(span.node for span in spans) == sorted([*made.nodes, *HOSTS]), "each exactly once"
            assert_one_of_a_team_at_a_time(made)
            for host in HOSTS:
                is_balanced = host in BALANCED
                assert (flags / f"{host}.seen").exists() is not is_balanced, f"{host} by its command"
                assert in_maintenance(flags / f"{host}.servers", host) is is_balanced, f"{host} by HAProxy"
            if made.fake is not None:
                patched = {each.name for each in made.fake.server.requests if each.verb == "patch"}
                assert set(made.nodes) <= patched
                assert patched.isdisjoint(HOSTS)
            for node in made.nodes:
                assert not (flags / f"{node}.seen").exists()
                await assert_restored(made, node)
            assert balancer.admin_states() == before
            assert [path for path in flags.iterdir() if not path.suffix] == []
    finally:
        balancer.stop()


async def submit(made: ClusterEnvironment, flags: Path, balancer: Haproxy) -> str:
    flag = f"{flags}/{{{{ node.name }}}}"
    show = SHOW_SERVERS.format(port=balancer.admin_port)
    return await made.submit(
        "mixed",
        playbook=PLAYBOOK,
        canary={"select": "role=worker", "max_parallel": 12},
        isolate=[
            {"kubernetes": {"drain_timeout": "10m"}},
            {"haproxy": {"backend": "web", "server": "{{ node.name }}", "where": "web=true"}},
            {"command": {"do": f"touch {flag}", "undo": f"rm -f {flag}", "where": "kind=host,web!=true"}},
        ],
        verify=[
            {"kubernetes": {"ready": True, "within": "1m"}},
            {"reachable": {"within": "60s", "where": "kind=host"}},
        ],
        maintain={
            "playbook": "change.yml",
            "vars": {"log_file": str(made.daemon.log_file), "flags": str(flags), "show_servers": show},
        },
    )


def assert_one_of_a_team_at_a_time(made: ClusterEnvironment) -> None:
    team = {node: POOLS[number % len(POOLS)] for number, node in enumerate(made.nodes)}
    team |= {host: labels["team"] for host, labels in HOSTS.items()}
    assert len({team[node] for node in made.nodes} & {team[host] for host in HOSTS}) >= 3, "pools are shared"
    for one, other in combinations(made.daemon.spans(), 2):
        if team[one.node] == team[other.node]:
            assert one.end is not None
            assert one.end <= other.begin, (one, other)


def in_maintenance(servers: Path, name: str) -> bool:
    """Return whether the balancer had the server in maintenance when its playbook ran."""
    rows = [line.split() for line in servers.read_text().splitlines() if line.startswith(("2 ", "3 ", "4 "))]
    states = {row[3]: int(row[6]) for row in rows}
    return bool(states.get(name, 0) & MAINT)
