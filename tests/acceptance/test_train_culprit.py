"""A change that fails between two others of its train, on real sshd nodes.

Each change adds a line of its own to a file of the node, and its undo removes that line.  The test keeps its
own account of the lines; the isolator writes a log.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rolloutd.control.client import api_path
from tests.support.daemon_environment import DaemonEnvironment, daemon_environment, fleet_labels, plan

pytestmark = [pytest.mark.servers, pytest.mark.long]

CHANGE = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: change
      ansible.builtin.raw: echo "{{ change }}" >> {{ files }}/{{ inventory_hostname }}
"""

UNDO = """\
- hosts: all
  gather_facts: false
  tasks:
    - name: undo
      ansible.builtin.raw: sed -i "/^{{ change }}$/d" {{ files }}/{{ inventory_hostname }}
"""

BROKEN = "n1"


class Train:
    """Three rollouts in one train; the second fails on one node, its canary."""

    def __init__(self, daemon: DaemonEnvironment) -> None:
        self.daemon = daemon
        self.files = daemon.directory / "files"
        self.files.mkdir()
        self.lines = {node: ["# of the site"] for node in daemon.labels}
        for node in self.lines:
            (self.files / node).write_text(self.expected(node))
        daemon.client.post("/v1/freezes", {"scope": "all", "reason": "week"})
        changes = ("kernel", "driver", "certificates")
        playbooks = {"change.yml": CHANGE, "undo.yml": UNDO}
        self.rollouts = {each: daemon.submit(self._plan(each), playbooks) for each in changes}
        daemon.client.put("/v1/trains/week", {"rollouts": list(self.rollouts.values()), "reason": "week"})
        for rollout in self.rollouts.values():
            daemon.vote(rollout, "start")
        daemon.client.delete("/v1/freezes", {"scope": "all", "reason": "begin"})

    def _plan(self, change: str) -> dict[str, Any]:
        # Only the second has its broken node go first.
        select = "canary=true" if change == "driver" else "role=worker"
        name, directory = "{{ node.name }}", self.daemon.directory
        flag, log = f"{directory}/isolated-{name}", f"{directory}/isolated"
        command = {
            "look": f"test -e {flag}",
            "do": f"touch {flag}; echo do {name} >> {log}",
            "undo": f"rm {flag}; echo undo {name} >> {log}",
        }
        breaks = f" && test {name} != {BROKEN}" if change == "driver" else ""
        check = f"grep -qx {change} {self.files}/{name}{breaks}"
        return plan(
            change,
            isolate=[{"command": command}],
            canary={"select": select, "max_parallel": 9},
            maintain={"playbook": "change.yml", "vars": {"change": change, "files": str(self.files)}},
            rollback={"playbook": "undo.yml"},
            verify=[{"ssh": {"run": check, "within": "1s"}}],
        )

    def expected(self, node: str) -> str:
        """Return the bytes of a node's file by the test's own account."""
        return "".join(f"{line}\n" for line in self.lines[node])

    def require_files(self) -> None:
        """Compare all nodes' files with the account."""
        assert {node: (self.files / node).read_text() for node in self.lines} == {
            node: self.expected(node) for node in self.lines
        }

    def node(self, change: str, node: str) -> dict[str, Any]:
        """Return a node of a rollout."""
        return self.daemon.nodes(self.rollouts[change])[node]

    def until(self, change: str, node: str, **expected: str) -> None:
        """Wait until a node of a rollout has these values."""
        self.daemon.wait_until(
            lambda: expected.items() <= self.node(change, node).items(), f"{change} of {node}: {expected}"
        )

    def records(self, node: str) -> tuple[str | None, str | None]:
        """Return the changes whose configuration the node has, and that failed on it last."""
        found = self.daemon.client.get(api_path("nodes", node, "configuration"))
        names = {rollout: change for change, rollout in self.rollouts.items()}
        current, invalid = (found[key] and names[found[key]["rollout"]] for key in ("current", "invalid"))
        return current, invalid

    def isolations(self) -> Counter[str]:
        """Return how often each node was isolated and returned."""
        return Counter((self.daemon.directory / "isolated").read_text().splitlines())

    def roll_back(self, change: str, node: str) -> None:
        """Undo one change of a node, and keep the account."""
        path = api_path("rollouts", self.rollouts[change], "nodes", node, "rollback")
        self.daemon.client.post(path, {"reason": "as it was"})
        self.until(change, node, outcome="rolled-back")
        self.lines[node].remove(change)


def test_culprit_between_two_changes_pauses_alone(tmp_path: Path) -> None:
    labels = fleet_labels(3, 3, 1)
    for node in labels:
        labels[node]["canary"] = str(node == BROKEN).lower()
    with daemon_environment(tmp_path, labels) as daemon:
        train = Train(daemon)
        train.until("driver", BROKEN, phase="failed")
        train.until("kernel", BROKEN, phase="done")
        for node in ("n2", "n3"):
            train.until("certificates", node, phase="done")
        states = {change: daemon.status(rollout)["state"] for change, rollout in train.rollouts.items()}
        assert states["driver"] == "paused"
        assert "paused" not in (states["kernel"], states["certificates"])
        (failure,) = daemon.client.get(api_path("rollouts", train.rollouts["driver"], "failures"))["failures"]
        assert (failure["node"], failure["step"]) == (BROKEN, "verify.0.ssh")
        assert train.node("certificates", BROKEN)["phase"] == "pending"
        assert train.node("kernel", BROKEN)["outcome"] == "changed"
        train.lines["n1"] += ["kernel", "driver"]
        for node in ("n2", "n3"):
            train.lines[node] += ["kernel", "certificates"]
        train.require_files()
        assert train.isolations() == Counter(
            {"do n1": 1, **{f"{what} {node}": 1 for what in ("do", "undo") for node in ("n2", "n3")}}
        )
        assert train.records(BROKEN) == ("kernel", "driver")
        assert train.records("n2") == ("certificates", None)

        # The last change may join the outage in which the culprit is undone.
        train.roll_back("driver", BROKEN)
        train.until("certificates", BROKEN, phase="done")
        train.lines[BROKEN].append("certificates")
        train.require_files()
        assert train.records(BROKEN)[0] == "certificates"
        driver = train.rollouts["driver"]
        daemon.vote(driver, "proceed")
        daemon.finish(driver)
        for node in ("n2", "n3"):
            train.lines[node].append("driver")
        train.require_files()

        for node, order in (
            ("n2", ("kernel", "driver", "certificates")),
            ("n3", ("driver", "certificates", "kernel")),
            (BROKEN, ("kernel", "certificates")),
        ):
            for change in order:
                train.roll_back(change, node)
                train.require_files()
        assert all(lines == ["# of the site"] for lines in train.lines.values())
        assert {node: train.records(node)[0] for node in labels} == dict.fromkeys(labels)
        counts = train.isolations()
        assert [counts[f"do {node}"] for node in labels] == [counts[f"undo {node}"] for node in labels]
