"""A pilot over real nodes: its evidence waits at the start gate, and the votes are for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rolloutd.control.client import ApiError, api_path
from tests.support.daemon_environment import (
    CHANGE_PLAYBOOK,
    DaemonEnvironment,
    daemon_environment,
    fleet_labels,
    plan,
)

pytestmark = pytest.mark.servers

WRITE_TASK = """\
    - name: write the setting
      ansible.builtin.copy: {content: "somaxconn 65535\\n", dest: "{{ log_file }}.setting"}
      diff: true
"""


def pilot_plan(made: DaemonEnvironment, **spec: Any) -> dict[str, Any]:
    stage = {"playbook": "change.yml", "vars": {"log_file": str(made.log_file)}}
    gates = {"start": {"owner": 1}, "continue": {"owner": 1}, "proceed": {"owner": 1}}
    return plan("piloted", pilot={"node": "n2"}, maintain=stage, gates=gates, **spec)


def gate(made: DaemonEnvironment, rollout: str, name: str) -> dict[str, Any]:
    return next(each for each in made.status(rollout)["gates"] if each["gate"] == name)


def vote(made: DaemonEnvironment, rollout: str, name: str, digest: str) -> None:
    body = {"gate": name, "yes": True, "reason": "read", "digest": digest}
    made.client.post(api_path("rollouts", rollout, "votes"), body)


def test_evidence_of_pilot_bound_to_start_votes_and_void_after_change(tmp_path: Path) -> None:
    playbooks = {"change.yml": CHANGE_PLAYBOOK + WRITE_TASK}
    with daemon_environment(tmp_path, fleet_labels(3, 3, 1)) as made:
        Path(f"{made.log_file}.setting").write_text("somaxconn 4096\n")
        rollout = made.submit(pilot_plan(made), playbooks)
        assert gate(made, rollout, "start")["state"] == "not-asked"
        made.vote(rollout, "pilot")
        made.wait_for_gate(rollout, "start")
        assert [span.node for span in made.spans()] == ["n2"], "the other nodes wait"

        start = gate(made, rollout, "start")
        evidence = start["evidence"]
        assert (evidence["node"], evidence["outcome"]) == ("n2", "changed")
        checked = next(step for step in evidence["steps"] if step["step"] == "verify.0.reachable")
        assert checked["state"] == "ok"
        run = next(step for step in evidence["steps"] if step["step"] == "run.configure")
        assert run["seconds"] > 0
        written = next(each for each in evidence["changes"] if each["task"] == "write the setting")
        assert "-somaxconn 4096" in written["diff"]
        assert "+somaxconn 65535" in written["diff"]
        assert evidence["logs"][0]["lines"] > 3
        shown = subprocess.run(
            [sys.executable, "-m", "rolloutd.cli", "--socket", str(tmp_path / "s"), "status", rollout],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "    pilot n2 of t2: changed, 1 attempt" in shown.splitlines()
        assert "+somaxconn 65535" in shown

        with pytest.raises(ApiError, match="is for digest"):
            vote(made, rollout, "start", made.status(rollout)["digest"])
        vote(made, rollout, "start", start["digest"])
        made.wait_until(lambda: made.status(rollout)["state"] == "done", "the rollout is done")
        assert sorted(span.node for span in made.spans()) == ["n1", "n2", "n3"]

        changed = made.submit(pilot_plan(made, max_parallel=1), playbooks, supersede=True)
        assert gate(made, changed, "start")["evidence"] is None
        assert gate(made, changed, "start")["state"] == "not-asked"
        with pytest.raises(ApiError, match="is for digest"):
            vote(made, changed, "start", start["digest"])
        with pytest.raises(ApiError, match="not asked yet; vote when the pilot n2 is done"):
            vote(made, changed, "start", made.status(changed)["digest"])
        made.vote(changed, "pilot")
        made.wait_for_gate(changed, "start")
        assert gate(made, changed, "start")["digest"] != start["digest"]
        assert [span.node for span in made.spans()][3:] == ["n2"], "the pilot runs again"
