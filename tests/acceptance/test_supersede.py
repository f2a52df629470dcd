"""Another plan takes over in the middle, and people stop what runs: real runs, and nothing is doubled."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon_environment import (
    CHANGE_PLAYBOOK,
    DaemonEnvironment,
    daemon_environment,
    fleet_labels,
    plan,
)

pytestmark = pytest.mark.servers


def test_a_new_policy_takes_over_and_touches_nothing_twice(tmp_path: Path) -> None:
    """Nodes in flight finish under the old digest; those with the very same change stay done."""
    with daemon_environment(tmp_path, fleet_labels(6, 2, 3)) as made:
        old, new = supersede(made, soak="2s")
        assert_one_change_each(made, old, new)


def test_superseding_change_waits_at_gates_without_overlap(tmp_path: Path) -> None:
    with daemon_environment(tmp_path, fleet_labels(4, 2, 2)) as made:
        _, new = supersede(made, why="second")
        started = time.time()
        assert made.nodes(new)["n1"]["outcome"] is None
        walk(made, new)
        spans = made.spans()
        per_node: dict[str, list[tuple[float, float]]] = {}
        for span in spans:
            assert span.end is not None
            per_node.setdefault(span.node, []).append((span.begin, span.end))
        for node, ran in per_node.items():
            assert all(one[1] <= other[0] for one, other in pairwise(ran)), node
            assert ran[-1][0] > started, "the new change was made on every node"
        assert set(per_node) == set(made.labels)


@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.long), True])
def test_pause_stop_ends_run_and_keeps_node_isolated(tmp_path: Path, killed: bool) -> None:
    """Also when the daemon is killed right after it was told."""
    with daemon_environment(tmp_path, fleet_labels(1, 1, 1)) as made:
        rollout = made.submit(spec(made, "stopped", work_s=600), {"change.yml": CHANGE_PLAYBOOK})
        made.vote(rollout, "start")
        made.wait_until(lambda: made.spans(), "the playbook works on the node")
        path = f"/v1/rollouts/{rollout}/pause"
        made.client.post(path, {"reason": "that is the wrong kernel", "now": True})
        if killed:
            made.kill_daemon()
            made.start_daemon()
        made.wait_until(lambda: made.nodes(rollout)["n1"]["phase"] == "failed", "the node is stopped")
        made.wait_until(lambda: made.run_processes() == [], "its run is gone")
        detail = made.client.get(f"/v1/rollouts/{rollout}/nodes/n1")
        assert detail["failure"]["step"] == "run.configure"
        assert "stopped while maintaining by order of" in detail["failure"]["message"]
        status = made.status(rollout)
        assert (status["state"], status["failed"]) == ("paused", 1)
        made.client.post(f"/v1/rollouts/{rollout}/resume", {"reason": "it was the right one"})
        made.client.post(f"/v1/rollouts/{rollout}/nodes/n1/skip", {"reason": "later"})
        made.wait_until(lambda: made.status(rollout)["state"] in ("done", "paused"), "people have decided")
        assert len(made.spans()) == 1
        kinds = [entry["entry"]["event"] for entry in made.client.get("/v1/audit", {"node": "n1"})["entries"]]
        assert kinds.count("NodeOrdered") >= 2, "the order and its end are audited"


def supersede(made: DaemonEnvironment, **changed: Any) -> tuple[str, str]:
    """Let a rollout be superseded while nodes of it are in flight; return both."""
    old = made.submit(spec(made, "moving"), {"change.yml": CHANGE_PLAYBOOK})
    made.vote(old, "start")
    made.wait_for_gate(old, "continue")
    made.pause_playbooks()
    made.vote(old, "continue")
    made.wait_until(lambda: made.status(old)["in_flight"], "nodes of the fleet are in flight")
    flying = {node["node"] for node in made.status(old)["in_flight"]}
    done = {name for name, node in made.nodes(old).items() if node["phase"] == "done"}
    new = made.submit(spec(made, "moving", **changed), {"change.yml": CHANGE_PLAYBOOK}, supersede=True)
    assert new != old
    status = made.status(new)
    assert status["state"] == "awaiting-approval"
    assert f"votes for {old} do not count here" in status["reason"]["text"]
    made.resume_playbooks()
    made.wait_until(lambda: not made.status(old)["in_flight"], "what was in flight has finished")
    finished = {name for name, node in made.nodes(old).items() if node["outcome"] == "changed"}
    assert flying | done <= finished
    assert made.status(old)["state"] == "cancelled"
    return old, new


def assert_one_change_each(made: DaemonEnvironment, old: str, new: str) -> None:
    """What the old one finished is done in the new one, and the rest is changed once."""
    finished = {name for name, node in made.nodes(old).items() if node["outcome"] == "changed"}
    kept = {name for name, node in made.nodes(new).items() if node["outcome"] == "already-current"}
    assert kept == finished
    walk(made, new)
    assert Counter(span.node for span in made.spans()) == dict.fromkeys(made.labels, 1)


def walk(made: DaemonEnvironment, rollout: str) -> None:
    """Vote wherever it waits, until it is done."""

    def voted() -> bool:
        status = made.status(rollout)
        for gate in () if status["state"] == "done" else status["gates"]:
            if gate["state"] == "waiting":
                made.vote(rollout, gate["gate"])
        return bool(status["state"] == "done")

    made.wait_until(voted, "the new rollout ends")


def spec(
    made: DaemonEnvironment, name: str, *, work_s: float = 0, soak: str = "1s", why: str = "first"
) -> dict[str, Any]:
    """Return the plan."""
    variables = {"log_file": str(made.log_file), "work_s": work_s, "why": why}
    return plan(
        name,
        canary={"select": "canary=true"},
        soak=soak,
        maintain={"playbook": "change.yml", "vars": variables},
    )
