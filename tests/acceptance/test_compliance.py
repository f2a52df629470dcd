"""Check mode on real sshd nodes: what a plan would change, and what a rollout leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutd.cli.main import main
from tests.support.daemon_environment import DaemonEnvironment, daemon_environment, fleet_labels, plan

pytestmark = pytest.mark.servers

NODES, COMPLIANT = 12, 5

PLAYBOOK = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: set the limit
      ansible.builtin.copy: {content: "limit 9\\n", dest: "{{ conf_dir }}/{{ inventory_hostname }}.conf"}
"""


@pytest.mark.long
def test_compliant_nodes_are_left_alone(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """The preview lists exactly the others, and the rollout isolates exactly those."""
    directory = tmp_path_factory.mktemp("w")
    labels = fleet_labels(NODES, teams=3, racks=2)
    with daemon_environment(directory, labels, ansible={"parallel": 8}) as made:
        conf_dir, isolated_file = directory / "conf", directory / "isolated"
        conf_dir.mkdir()
        names = sorted(labels)
        for name in names[:COMPLIANT]:
            (conf_dir / f"{name}.conf").write_text("limit 9\n")
        others = names[COMPLIANT:]
        spec = skipping_plan(conf_dir, isolated_file)

        impact = preview_impact(made, spec, capsys)
        assert sorted(node["node"] for node in impact["would_change"]) == others
        assert all(node["changes"][0]["task"] == "set the limit" for node in impact["would_change"])
        assert "+limit 9" in impact["would_change"][0]["changes"][0]["diff"]
        assert (sorted(impact["compliant"]), impact["unknown"]) == (names[:COMPLIANT], [])
        assert sorted(path.stem for path in conf_dir.iterdir()) == names[:COMPLIANT], "nothing was changed"

        rollout = made.submit(spec, {"change.yml": PLAYBOOK})
        made.vote(rollout, "start")
        status = made.wait_until(lambda: finished(made.status(rollout)), "the rollout ends")
        assert (status["state"], status["percent"]) == ("done", 100)
        outcomes = {name: node["outcome"] for name, node in made.nodes(rollout).items()}
        assert outcomes == {name: "changed" if name in others else "already-current" for name in names}
        assert sorted(isolated_file.read_text().split()) == others


def skipping_plan(conf_dir: Path, isolated_file: Path) -> dict[str, Any]:
    return plan(
        "limits",
        skip_compliant=True,
        source={"path": "./tree"},
        canary={"select": "role=worker", "max_parallel": NODES},
        isolate=[{"command": {"do": f"echo {{{{ node.name }}}} >> {isolated_file}", "undo": "true"}}],
        maintain={"playbook": "change.yml", "vars": {"conf_dir": str(conf_dir)}},
    )


def preview_impact(
    made: DaemonEnvironment, spec: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> dict[str, Any]:
    """Return the impact that `plan preview --impact --json` prints."""
    tree = made.directory / "tree"
    tree.mkdir()
    (tree / "change.yml").write_text(PLAYBOOK)
    file = made.directory / "plan.yml"
    file.write_text(yaml.safe_dump(spec))
    capsys.readouterr()
    socket = ["--socket", str(made.directory / "s")]
    assert main([*socket, "plan", "preview", str(file), "--impact", "--json"]) == 0
    impact: dict[str, Any] = json.loads(capsys.readouterr().out)["impact"]
    return impact


def finished(status: dict[str, Any]) -> dict[str, Any] | None:
    assert status["state"] != "paused", status["reason"]
    return status if status["state"] == "done" else None
