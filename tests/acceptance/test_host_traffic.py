"""Client traffic on plain hosts: a real TCP session keeps its node pending, and its end lets the node go."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from typing import Any

import pytest

from tests.support.daemon_environment import CHANGE_PLAYBOOK, DaemonEnvironment, plan

pytestmark = pytest.mark.servers

POLL_S = 10.0
"""Long enough that a loaded machine probes within the second poll, short enough to wait for."""


class TrafficEnvironment(DaemonEnvironment):
    """Hosts of one team whose label `port` is the port that clients use."""

    def write_settings(self, **more: Any) -> None:
        path = str(self.directory / "hosts.yml")
        super().write_settings(inventory=[{"ansible": {"path": path, "labels": ["team", "role", "port"]}}])


def test_session_keeps_node_pending_until_it_ends(tmp_path_factory: pytest.TempPathFactory) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        ports = {f"n{number}": str(server.getsockname()[1]) for number, server in enumerate(servers, 1)}
        ports["n3"] = "unset"
        labels = {node: {"team": "t1", "role": "worker", "port": port} for node, port in ports.items()}
        made = TrafficEnvironment(tmp_path_factory.mktemp("w"), labels)
        stack.callback(made.stop)
        made.start_nodes()
        made.write_settings()
        made.start_daemon()
        client = stack.enter_context(socket.create_connection(servers[0].getsockname()))
        session = stack.enter_context(servers[0].accept()[0])

        rollout = made.submit(traffic_plan(made), {"change.yml": CHANGE_PLAYBOOK})
        made.vote(rollout, "start")
        made.wait_until(lambda: made.status(rollout)["done"] == 1, "the idle node is done")
        nodes = made.nodes(rollout)
        assert nodes["n2"]["phase"] == "done", "another node of the pool went first"
        assert (nodes["n1"]["phase"], nodes["n1"]["attempt"]) == ("pending", 0)
        busy = nodes["n1"]["reason"]
        assert (busy["code"], busy["params"]["count"]) == ("traffic", 1)
        assert busy["text"].startswith(f"n1 is busy: 1 connection on :{ports['n1']} from 1 address")
        unknown = nodes["n3"]["reason"]
        assert (unknown["code"], nodes["n3"]["attempt"]) == ("traffic-unknown", 0)
        assert "'unset' is not a port" in unknown["text"]

        client.close()
        session.close()
        ended_at = time.time()
        made.wait_until(lambda: made.status(rollout)["done"] == 2, "the node goes once its session has ended")
        assert ended_at <= admitted_at(made, "n1") <= ended_at + 2 * POLL_S
        assert made.nodes(rollout)["n3"]["attempt"] == 0
        assert {span.node for span in made.spans()} == {"n1", "n2"}
        shown = made.status(rollout)
        assert shown["not_probed"] == [
            "connections of pods and containers with a network namespace of their own (probe ssh)"
        ]


def traffic_plan(made: DaemonEnvironment) -> dict[str, Any]:
    return plan(
        "connections",
        traffic=[{"ssh": {"established": ["{{ node.labels.port }}"]}}],
        poll=f"{POLL_S:.0f}s",
        canary={"select": "role=worker", "max_parallel": 3},
        isolate=[{"none": {}}],
        maintain={"playbook": "change.yml", "vars": {"log_file": str(made.log_file)}},
    )


def admitted_at(made: DaemonEnvironment, node: str) -> float:
    """Return when the node was admitted, by the audit (epoch seconds)."""
    entries = [each["entry"] for each in made.client.get("/v1/audit", {"node": node})["entries"]]
    [at] = [each["at"] for each in entries if each["fields"].get("trigger") == "admitted"]
    return float(at)
