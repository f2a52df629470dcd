"""What check mode reports on the command line: impact, drift, and the matrix of changes."""

from __future__ import annotations

import json

import pytest

from tests.rolloutd.canned_daemon import CannedDaemon
from tests.rolloutd.cli.samples import run

SINCE = "2026-11-22T10:00:00Z"
DRIFTED = {"code": "drifted", "text": "n2 has drifted", "since": SINCE}
CHANGE = {"task": "set the limit", "diff": "+limit 9"}
LINES = [
    {"kind": "node", "node": "n2", "compliance": "would-change", "changes": [CHANGE], "problem": None},
    {"kind": "heartbeat"},
    {"kind": "node", "node": "n3", "compliance": "unknown", "changes": [], "problem": "n3 is unreachable"},
    {"kind": "node", "node": "n1", "compliance": "compliant", "changes": [], "problem": None},
]


@pytest.fixture
def drifted(daemon: CannedDaemon) -> CannedDaemon:
    nodes = [{"node": f"n{number}", "reason": DRIFTED if number == 2 else None} for number in (1, 2, 3)]
    daemon.answer("GET", "rollouts/r/nodes", {"nodes": nodes})
    daemon.streams["/v1/rollouts/r/drift"] = [LINES]
    return daemon


def test_drift_lists_tasks_and_since(drifted: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "drift", "r")
    assert code == 1
    assert "would change" in out.splitlines()[1]
    assert out.splitlines()[1].split()[-3:] == ["set", "the", "limit"]
    assert "n3 is unreachable" in out
    assert out.splitlines()[-1] == "1 node would change, 1 unknown, 1 compliant"
    assert "3 checked: n1 compliant" in err


def test_drift_as_json_has_diffs(drifted: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "drift", "r", "--json")
    assert (code, json.loads(out)) == (
        1,
        {
            "drifted": [{"node": "n2", "changes": [CHANGE], "problem": None, "since": SINCE}],
            "unknown": [{"node": "n3", "problem": "n3 is unreachable"}],
            "compliant": ["n1"],
        },
    )


def test_changes_of_a_plan_list_groups_and_nodes(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    change = {
        "plan": "limits",
        "change": "0123456789abcdef",
        "rollouts": ["limits-abcde"],
        "percent": 50.0,
        "counts": {"done": 1, "never": 1},
        "nodes": [{"node": "n1", "state": "done"}, {"node": "n2", "state": "never"}],
        "groups": [{"group": "team/a", "total": 2, "done": 1, "percent": 50.0}],
        "never": ["n2"],
    }
    daemon.answer("GET", "changes", {"changes": [change]})
    code, out, _ = run(capsys, "changes")
    assert (code, out.splitlines()[1].split()) == (
        0,
        ["limits", "0123456789ab", "50", "%", "1", *"-----", "1"],
    )
    code, out, _ = run(capsys, "changes", "limits")
    assert daemon.requests[-1][2] == {"plan": "limits"}
    assert "team/a" in out
    assert out.splitlines()[-1].split() == ["n2", "never"]
    assert json.loads(run(capsys, "changes", "--json")[1]) == {"changes": [change]}
    newer = {
        **change,
        "change": "fedcba9876543210",
        "nodes": [{"node": "n1", "state": "failed"}, {"node": "n2", "state": "done"}],
    }
    other = {**change, "plan": "kernel"}
    daemon.answer("GET", "changes", {"changes": [newer, change, other]})
    lines = [line.split() for line in run(capsys, "changes", "--matrix")[1].splitlines()]
    assert lines == [
        ["NODE", "LIMITS", "KERNEL"],
        ["n1", "fedcba987654", "failed", "from", "0123456789ab", "0123456789ab"],
        ["n2", "fedcba987654", "-"],
    ]
    assert daemon.requests[-1][2] == {}, "all nodes, not a page"
