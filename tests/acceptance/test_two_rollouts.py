"""Two rollouts of kernel parameters on nodes with kernels of their own, undone in either order.

A node has its own network namespace, so these parameters are real ones of the kernel, and no others' ones.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from rolloutd.control.client import api_path
from tests.support.daemon_environment import fleet_labels, plan
from tests.support.playbook_node import playbook_files
from tests.support.private_nodes import PrivateNodes, private_nodes

pytestmark = [
    pytest.mark.servers,
    pytest.mark.long,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for namespaces"
    ),
]

FIRST = {"net.core.somaxconn": 5000, "net.ipv4.tcp_rmem": "4096 87380 500000"}
SECOND = {"net.core.somaxconn": 6000, "net.ipv4.ip_default_ttl": 99}
NAMES = sorted(FIRST.keys() | SECOND.keys())

SITE = "# of the site\nnet.ipv4.ip_default_ttl = 64"
"""A file that was there, without a newline at its end."""


def test_two_rollouts_are_undone_in_either_order(tmp_path: Path) -> None:
    with private_nodes(tmp_path, fleet_labels(2, 2, 1), ansible={"pipelining": "on"}) as made:
        for node in made.labels:
            (made.private(node) / "sysctl.d").mkdir()
            (made.private(node) / "sysctl.d" / "90-rolloutd.conf").write_text(SITE)
        before = {node: state(made, node) for node in made.labels}
        first = roll_out(made, "first", FIRST)
        after_first = {node: state(made, node) for node in made.labels}
        second = roll_out(made, "second", SECOND)
        assert {node: configured_by(made, node) for node in made.labels} == {"n1": second, "n2": second}
        assert drift(made, second) == {"n1": "compliant", "n2": "compliant"}
        made.set_sysctl("n2", "net.core.somaxconn", "4000")
        assert drift(made, second) == {"n1": "compliant", "n2": "would-change"}
        made.set_sysctl("n2", "net.core.somaxconn", "6000")

        roll_back(made, second, "n1")
        assert configured_by(made, "n1") == first
        assert state(made, "n1") == after_first["n1"]
        roll_back(made, first, "n2")
        left = state(made, "n2")
        assert {name: left[name] for name in SECOND} == {name: str(value) for name, value in SECOND.items()}
        assert left["net.ipv4.tcp_rmem"] == before["n2"]["net.ipv4.tcp_rmem"]
        assert "tcp_rmem" not in left["90-rolloutd.conf"]

        assert configured_by(made, "n2") == second

        roll_back(made, first, "n1")
        roll_back(made, second, "n2")
        assert {node: configured_by(made, node) for node in made.labels} == {"n1": None, "n2": None}
        assert {node: state(made, node) for node in made.labels} == before


def roll_out(made: PrivateNodes, name: str, parameters: dict[str, Any]) -> str:
    """Walk a plan over both nodes; return its rollout."""
    variables = {
        "sysctl_settings": parameters,
        "sysctl_file": "{{ private }}/sysctl.d/90-rolloutd.conf",
        "ansible_become": False,
    }
    spec = plan(
        name,
        soak="1s",
        maintain={"playbook": "sysctl.yml", "vars": variables},
        rollback={"playbook": "sysctl-undo.yml"},
        verify=[{"playbook": {"file": "sysctl-verify.yml"}}],
    )
    rollout = made.submit(spec, playbook_files())
    made.vote(rollout, "start")
    made.finish(rollout)
    assert {node["outcome"] for node in made.nodes(rollout).values()} == {"changed"}
    return rollout


def configured_by(made: PrivateNodes, node: str) -> str | None:
    """Return the rollout whose content the node has, as `rolloutctl config` says."""
    current = made.client.get(api_path("nodes", node, "configuration"))["current"]
    return None if current is None else str(current["rollout"])


def drift(made: PrivateNodes, rollout: str) -> dict[str, str]:
    """Return what check mode says of each node of a rollout that is done."""
    lines = made.client.stream(api_path("rollouts", rollout, "drift"), method="POST", body={})
    return {line["node"]: line["compliance"] for line in lines if "compliance" in line}


def roll_back(made: PrivateNodes, rollout: str, node: str) -> None:
    made.client.post(f"/v1/rollouts/{rollout}/nodes/{node}/rollback", {"reason": "as it was"})
    made.wait_until(lambda: made.nodes(rollout)[node]["outcome"] == "rolled-back", f"{node} is rolled back")


def state(made: PrivateNodes, node: str) -> dict[str, str]:
    """Return the parameters in force and all files of the node's sysctl.d."""
    files = (made.private(node) / "sysctl.d").iterdir()
    return made.sysctls(node, NAMES) | {path.name: path.read_text() for path in files}
