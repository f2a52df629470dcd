"""`wait`, the parts of a log that `logs` shows, and the runners of `status`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.rolloutd.canned_daemon import CannedDaemon
from tests.rolloutd.cli.samples import GATE, ROLLOUT, run

LINES = [
    {"offset": 10 * number, "at": f"2026-11-20T08:00:0{number}Z", "kind": "output", "text": f"line {number}"}
    for number in range(1, 6)
]


class WholeStreams(list[Any]):
    """Connections that all end well; the canned daemon breaks off each one after which a list is true."""

    def __bool__(self) -> bool:
        return False


def answer_rollout(daemon: CannedDaemon, **fields: Any) -> None:
    rollout = {**ROLLOUT, **fields}
    daemon.answer("GET", "rollouts/r", rollout)
    daemon.answer("GET", f"rollouts/{rollout['rollout']}", rollout)


@pytest.mark.parametrize(
    ("state", "gate", "condition", "expected"),
    [
        ("done", "open", "done", 0),
        ("running", "open", "done", 1),
        ("cancelled", "open", "done", 1),
        ("cancelled", "open", "cancelled", 0),
        ("paused", "waiting", "gate=proceed", 0),
        ("paused", "open", "gate=proceed", 0),
        ("running", "not-asked", "gate=proceed", 1),
        ("paused", "waiting", "gate=proceed:open", 1),
        ("paused", "open", "gate=proceed:open", 0),
        ("paused", "open", "gate=start", 2),
    ],
)
def test_wait_ends_by_its_condition(
    daemon: CannedDaemon,
    capsys: pytest.CaptureFixture[str],
    state: str,
    gate: str,
    condition: str,
    expected: int,
) -> None:
    answer_rollout(daemon, state=state, gates=[{**GATE, "state": gate}])
    code, out, _ = run(capsys, "wait", "r", "--for", condition, "--timeout", "0s", "--json")
    assert code == expected
    if expected != 2:
        assert json.loads(out) == {"rollout": ROLLOUT["rollout"], "for": condition, "met": expected == 0}


def test_wait_looks_again_after_an_event(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    answer_rollout(daemon, state="running", gates=[])
    daemon.answer("GET", f"rollouts/{ROLLOUT['rollout']}/nodes/n7", {"phase": "verifying", "outcome": None})

    class Events(list[Any]):
        """The stream's connections; the node is done when the first one is asked for."""

        def pop(self, index: Any = -1) -> Any:
            daemon.answer(
                "GET", f"rollouts/{ROLLOUT['rollout']}/nodes/n7", {"phase": "done", "outcome": "changed"}
            )
            return super().pop(index)

    daemon.streams["/v1/events"] = Events([[{"seq": 7, "entry": None}], []])
    code, _, err = run(capsys, "wait", "r", "--for", "node/n7=done")
    assert (code, err.count("is running")) == (0, 1)


def test_wait_for_rollback_outlasts_the_end(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    answer_rollout(daemon, state="done", gates=[])
    path = f"rollouts/{ROLLOUT['rollout']}/nodes/n7"
    daemon.answer("GET", path, {"phase": "done", "outcome": "changed"})

    class Events(list[Any]):
        """The stream's connections; the node is rolled back when the first one is asked for."""

        def pop(self, index: Any = -1) -> Any:
            daemon.answer("GET", path, {"phase": "done", "outcome": "rolled-back"})
            return super().pop(index)

    daemon.streams["/v1/events"] = Events([[{"seq": 7, "entry": None}], []])
    code, _, err = run(capsys, "wait", "r", "--for", "node/n7=rolled-back", "--timeout", "1h")
    assert (code, err.count("is done")) == (0, 1)
    assert run(capsys, "wait", "r", "--for", "node/n7=skipped")[0] == 1


def test_log_has_the_lines_that_options_ask_for(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    path = "/v1/rollouts/r/nodes/n1/log"

    def lines(*options: str) -> list[str]:
        daemon.streams[path] = [LINES] if "-f" not in options else [LINES, []]
        out = run(capsys, "logs", "r", "n1", "--json", *options)[1]
        return [json.loads(line)["text"].removeprefix("line ") for line in out.splitlines()]

    assert lines() == ["1", "2", "3", "4", "5"]
    assert lines("--tail", "2") == ["4", "5"]
    assert lines("--tail", "0") == []
    assert lines("--since", "2026-11-20T08:00:03Z") == ["3", "4", "5"]
    assert lines("--since", "2026-11-20T08:00:03Z", "--tail", "9") == ["3", "4", "5"]


def test_followed_tail_goes_on_where_it_ended(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer("GET", "rollouts/r/nodes/n1/why", {"node": "n1", "phase": "maintaining", "reason": None})
    later = {**LINES[0], "offset": 60, "text": "line 6"}
    daemon.streams["/v1/rollouts/r/nodes/n1/log"] = WholeStreams([LINES, [later]])
    code, out, _ = run(capsys, "logs", "r", "n1", "-f", "--tail", "0", "--json")
    offsets = [request[2].get("offset") for request in daemon.requests if request[1].endswith("/log")]
    assert (code, offsets[-1]) == (0, "50")
    assert [json.loads(line)["text"] for line in out.splitlines()] == ["line 6"]


def test_tail_of_minus_one_is_all(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.streams["/v1/rollouts/r/nodes/n1/log"] = [LINES]
    assert run(capsys, "logs", "r", "n1", "--tail", "-1")[1].count("line") == len(LINES)
    assert run(capsys, "logs", "r", "n1", "--tail", "-2")[0] == 2


def test_logs_of_failed_nodes_are_shown(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer("GET", "rollouts/r/nodes", {"nodes": [{"node": "n1"}, {"node": "n2"}]})
    for name in ("n1", "n2"):
        daemon.streams[f"/v1/rollouts/r/nodes/{name}/log"] = [LINES[:1]]
    code, out, err = run(capsys, "logs", "r", "--failed")
    assert (code, out.count("line 1"), [name in err for name in ("==> n1 <==", "==> n2 <==")]) == (
        0,
        2,
        [True, True],
    )
    assert daemon.requests[0][2] == {"phase": "failed"}


def test_status_names_runners_where_there_are_several(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer("GET", "status", {"rollouts": [ROLLOUT], "trouble": None})
    runners = [
        {"name": "fra", "text": "site=fra: 3 of at most 20 runs active", "problem": "it is down"},
        {"name": "local", "text": "all other nodes: idle", "problem": None},
    ]
    daemon.answer("GET", "health", {"runs": {"runners": runners}})
    assert "runner fra: site=fra: 3 of at most 20 runs active\n" in run(capsys, "status")[1]
    daemon.answer("GET", "health", {"runs": {"runners": runners[1:]}})
    assert "runner" not in run(capsys, "status")[1]


@pytest.mark.parametrize(("phase", "lines"), [("pending", 2), ("isolating", 1), ("done", 1)])
def test_why_of_relabelled_node_names_skip(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], phase: str, lines: int
) -> None:
    answer = {"node": "n1", "phase": phase, "reason": None, "is_selected": False}
    daemon.answer("GET", "rollouts/r/nodes/n1/why", answer)
    printed = run(capsys, "why", "r", "n1")[1].splitlines()
    assert len(printed) == lines
    assert ("rolloutctl skip r n1 --reason ..." in printed[-1]) == (phase == "pending")
