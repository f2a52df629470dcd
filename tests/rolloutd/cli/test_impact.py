"""What check mode reports on the command line: impact, drift, and the matrix of changes."""

from __future__ import annotations

import json
import re

import pytest

from tests.rolloutd.canned_daemon import CannedDaemon
from tests.rolloutd.cli.samples import change_of, run

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
    change = change_of("limits", "0", "v1.4.2", n1="done", n2="never")
    daemon.answer("GET", "changes", {"changes": [change]})
    code, out, _ = run(capsys, "changes")
    assert (code, out.splitlines()[1].split()) == (
        0,
        ["limits", "v1.4.2", "50", "%", "1", "done,", "1", "never"],
    )
    wide = run(capsys, "changes", "-o", "wide")[1].splitlines()[1].split()
    assert wide[4:6] == ["0" * 12, "v1.4.2-whole"]
    code, out, _ = run(capsys, "changes", "limits")
    assert daemon.requests[-1][2] == {"plan": "limits"}
    assert "team/a" in out
    assert "v1.4.2 (pin v1.4.2-whole), change 000000000000, rollouts limits-0" in out
    assert out.splitlines()[-1].split() == ["n2", "never"]
    assert json.loads(run(capsys, "changes", "--json")[1]) == {"changes": [change]}


def test_matrix_has_versions_and_next_steps(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    changes = [
        change_of(
            "apps", "3", "v3", n1="failed", n2="done", n3="pending", n4="unknown", n5="never", n6="pending"
        ),
        change_of(
            "apps", "2", "v2", n1="done", n2="replaced", n3="failed", n4="done", n5="skipped", n6="done"
        ),
        change_of("apps", "1", "v1", n1="replaced", n2="replaced", n3="drifted", n4="replaced", n5="done"),
        change_of("cni", "1", "1.16", n1="done", n2="never", n3="done", n4="held", n5="drifted"),
    ]
    daemon.answer("GET", "changes", {"changes": changes})
    _, out, err = run(capsys, "changes", "--matrix")
    assert [re.split("  +", line) for line in out.splitlines()] == [
        ["NODE", "APPS v3", "CNI 1.16"],
        ["n1", "failed, from v2", "1.16"],
        ["n2", "v3", "-"],
        ["n3", "failed v2, from v1", "1.16"],
        ["n4", "unknown, from v2", "held"],
        ["n5", "skipped v2, has v1", "drifted"],
        ["n6", "pending, has v2", "-"],
    ]
    assert [line.partition(":")[0] for line in err.splitlines()] == [
        *("2 failed", "1 unknown", "1 drifted", "1 held", "1 pending", "1 skipped")
    ]
    assert daemon.requests[-1][2] == {}, "all nodes, not a page"
    assert run(capsys, "changes", "--matrix", "-o", "wide")[1].split()[:3] == ["NODE", "APPS", "v3-whole"]


def test_matrix_wider_than_terminal_is_several_tables(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"cluster-{number:02}" for number in range(60)]
    changes = [
        change_of(f"module-{number}", str(number), f"v1.{number}.0", **dict.fromkeys(names, "failed"))
        for number in range(8)
    ]
    daemon.answer("GET", "changes", {"changes": changes})
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    lines = run(capsys, "changes", "--matrix")[1].splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("cluster-07 ") for line in lines) == 3
    assert all(f"MODULE-{number} v1.{number}.0" in "".join(lines) for number in range(8))
