"""A plan that rolls back by itself, over real sshd nodes: the changed nodes of one wave, and no others."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon_environment import DaemonEnvironment, daemon_environment, fleet_labels, plan

pytestmark = [pytest.mark.servers, pytest.mark.long]

NODES, TEAMS = 24, 4
FAILS = "n9"

CHANGE = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: change
      ansible.builtin.raw: |
        set -e
        cd {{ files }}
        test -e {{ inventory_hostname }}.isolated
        cp -p {{ inventory_hostname }}.conf {{ inventory_hostname }}.old
        echo new > {{ inventory_hostname }}.conf
        test {{ inventory_hostname }} != {{ fails }}
"""

UNDO = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: undo
      ansible.builtin.raw: |
        set -e
        cd {{ files }}
        test -e {{ inventory_hostname }}.isolated
        echo "begin {{ inventory_hostname }} $(date +%s.%N)" >> {{ log_file }}
        if test -e {{ inventory_hostname }}.old; then
          mv {{ inventory_hostname }}.old {{ inventory_hostname }}.conf
        fi
        echo "end {{ inventory_hostname }} $(date +%s.%N)" >> {{ log_file }}
"""


def test_failure_rolls_changed_nodes_of_its_wave_back(tmp_path: Path) -> None:
    labels = fleet_labels(NODES, TEAMS, 1)
    files = tmp_path / "files"
    files.mkdir()
    for number, node in enumerate(labels):
        (files / f"{node}.conf").write_text(f"old value of {node}\n")
        (files / f"{node}.conf").chmod(0o600 + number % 2 * 0o44)
    before = {node: state_of(files / f"{node}.conf") for node in labels}
    with daemon_environment(tmp_path, labels) as made:
        rollout = made.submit(plan_of(made, files), {"change.yml": CHANGE, "undo.yml": UNDO})
        made.vote(rollout, "start")
        made.wait_for_gate(rollout, "continue")
        made.vote(rollout, "continue")

        def is_settled() -> bool:
            status = made.status(rollout)
            return bool(status["failed"] == 0 and not status["in_flight"] and status["skipped"] >= 5) and (
                status["reason"]["code"] == "node-failed"
            )

        made.wait_until(is_settled, "the wave is rolled back, and people are asked")
        nodes, status = made.nodes(rollout), made.status(rollout)
        rolled_back = {name for name, node in nodes.items() if node["outcome"] == "rolled-back"}
        moves = transitions(made, rollout)
    touched = {node for node, trigger, _ in moves if trigger in ("maintained", "failed")}
    canaries = {node for node, own in labels.items() if own["canary"] == "true"}
    assert rolled_back == touched - canaries
    assert len(rolled_back) == status["rolled_back"] == sum(each["rolled_back"] for each in status["pools"])
    assert {"n5", "n6", "n7", "n8", FAILS} <= rolled_back
    assert {node: state_of(files / f"{node}.conf") for node in labels if node not in canaries} == {
        node: state for node, state in before.items() if node not in canaries
    }
    assert all((files / f"{node}.conf").read_text() == "new\n" for node in canaries)
    assert not list(files.glob("*.isolated")), "all are in service"
    assert_newest_first(moves, labels, canaries)
    for one, other in combinations(made.spans(), 2):
        overlaps = one.begin < (other.end or 0.0) and other.begin < (one.end or 0.0)
        assert not overlaps or labels[one.node]["team"] != labels[other.node]["team"]


def plan_of(made: DaemonEnvironment, files: Path) -> dict[str, Any]:
    names = {"files": str(files), "fails": FAILS, "log_file": str(made.log_file)}
    flag = f"{files}/{{{{ node.name }}}}.isolated"
    return plan(
        "config",
        canary={"select": "canary=true"},
        max_parallel=2,
        isolate=[{"command": {"do": f"touch {flag}", "undo": f"rm -f {flag}"}}],
        maintain={"playbook": "change.yml", "vars": names},
        rollback={"playbook": "undo.yml"},
        on_failure="rollback-wave",
    )


def state_of(path: Path) -> tuple[bytes, int]:
    return path.read_bytes(), path.stat().st_mode


def transitions(made: DaemonEnvironment, rollout: str) -> list[tuple[str, str, float]]:
    """Return the nodes' transitions by the audit: node, trigger, when."""
    found, after = [], 0
    while page := made.client.get("/v1/audit", {"rollout": rollout, "after": after})["entries"]:
        for each in page:
            entry, after = each["entry"], each["entry"]["seq"]
            if entry["event"] == "PhaseMoved":
                found.append((entry["node"], entry["fields"]["trigger"], entry["fields"]["at"]))
    return found


def assert_newest_first(
    moves: list[tuple[str, str, float]], labels: dict[str, dict[str, str]], canaries: set[str]
) -> None:
    """Assert that no rollback began while one of a newer node, whose team had room, had not."""
    changed: dict[str, float] = {}
    working: set[str] = set()
    begun = set(canaries)
    for node, trigger, at in moves:
        if trigger == "rollback-ordered":
            busy = {labels[each]["team"] for each in working}
            mine = changed.pop(node)
            begun.add(node)
            newer = [n for n, when in changed.items() if when > mine and labels[n]["team"] not in busy]
            assert not newer, f"{node} before {newer}"
        if trigger in ("admitted", "rollback-ordered"):
            working.add(node)
        if trigger in ("verified", "failed"):
            working.discard(node)
        if trigger in ("verified", "failed") and node not in begun:
            changed[node] = at
