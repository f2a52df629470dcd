"""Commands that control rollouts and nodes, against daemon answers: what is sent, and what is said."""

from __future__ import annotations

import pytest

from tests.rolloutd.canned_daemon import CannedDaemon
from tests.rolloutd.cli.samples import REASON, run


def test_a_retry_says_what_the_node_waits_for_until_then(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer("POST", "rollouts/r/nodes/n1/retry", {"node": "n1", "phase": "pending", "reason": REASON})
    _, _, err = run(capsys, "retry", "r", "n1", "--reason", "x")
    told = "n1: will be retried; until then: n3 failed while maintaining (node-failed"
    assert err.startswith(told)
    assert "lifted by a proceed vote" in err


@pytest.mark.parametrize(("command", "order"), [("retry", ["n1", "n2"]), ("advance", ["n2", "n1"])])
def test_several_nodes_are_asked_in_order(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], command: str, order: list[str]
) -> None:
    for node in order:
        daemon.answer("POST", f"rollouts/r/nodes/{node}/{command}", {"node": node, "phase": "pending"})
    code, out, err = run(capsys, command, "r", "n1", "n2", "--reason", "x", "-o", "name")
    assert (code, out.split()) == (0, order)
    assert [line.split(":")[0] for line in err.splitlines()] == order


def test_refused_node_keeps_no_other_from_its_retry(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer("POST", "rollouts/r/nodes/n1/retry", {"error": "n1: done; not failed", "code": "x"}, 409)
    daemon.answer("POST", "rollouts/r/nodes/n2/retry", {"node": "n2", "phase": "pending"})
    code, _, err = run(capsys, "retry", "r", "n1", "n2", "--reason", "x")
    assert (code, err) == (1, "n1: done; not failed\nn2: will be retried\n")


def test_retry_of_failed_nodes_names_them_itself(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer("GET", "rollouts/r/nodes", {"nodes": [{"node": "n2"}, {"node": "n5"}]})
    for node in ("n2", "n5"):
        daemon.answer("POST", f"rollouts/r/nodes/{node}/retry", {"node": node, "phase": "pending"})
    code, _, err = run(capsys, "retry", "r", "--failed", "--reason", "x")
    assert (code, err) == (0, "n2: will be retried\nn5: will be retried\n")
    assert run(capsys, "retry", "r", "n2", "--failed", "--reason", "x")[0] == 2
    daemon.answer("GET", "rollouts/r/nodes", {"nodes": []})
    assert run(capsys, "retry", "r", "--failed", "--reason", "x")[::2] == (1, "r: no node has failed\n")


@pytest.mark.parametrize(("state", "is_paused"), [("paused", True), ("running", False)])
def test_resume_says_what_still_pauses(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], state: str, is_paused: bool
) -> None:
    daemon.answer("POST", "rollouts/r/resume", {"rollout": "r", "state": state, "reason": REASON})
    code, _, err = run(capsys, "resume", "r", "--reason", "x")
    assert code == 0
    assert err.startswith("r: resumed")
    assert ("still paused: n3 failed while maintaining (node-failed" in err) == is_paused


@pytest.mark.parametrize(
    ("failed", "told"), [(0, ""), (2, "; still held: the slots of 2 failed nodes; see rolloutctl why r-1")]
)
def test_cancel_says_what_it_leaves_out_of_service(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], failed: int, told: str
) -> None:
    daemon.answer("POST", "rollouts/r/cancel", {"rollout": "r-1", "failed": failed})
    err = run(capsys, "cancel", "r", "--yes", "--reason", "x")[2]
    assert err == f"r: cancelled; nodes in flight finish{told}\n"


def test_retry_without_node_is_for_the_build(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer("POST", "rollouts/r/retry", {"rollout": "r"})
    code, _, err = run(capsys, "retry", "r", "--reason", "x")
    assert (code, err) == (0, "r: its build will be retried\n")


@pytest.mark.parametrize(
    ("words", "put_back"), [([], None), (["--return"], "return"), (["--leave"], "leave")]
)
def test_skip_says_what_becomes_of_the_node(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], words: list[str], put_back: str | None
) -> None:
    daemon.answer("POST", "rollouts/r/nodes/n1/skip", {"phase": "failed" if put_back == "return" else "done"})
    code, _, err = run(capsys, "skip", "r", "n1", "--reason", "x", *words)
    assert code == 0
    assert ("will be returned to service, then skipped" in err) == (put_back == "return")
    assert daemon.requests[-1][3]["put_back"] == put_back


def test_rollback_sends_its_choice_and_needs_one(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer("POST", "rollouts/r/rollback", {"rollout": "r", "nodes": ["n1", "n2"]})
    code, _, err = run(capsys, "rollback", "r", "--wave", "canary", "--yes", "--reason", "x")
    assert (code, err.strip()) == (0, "r: 2 nodes to be rolled back, newest first")
    sent = {"reason": "x", "nodes": [], "wave": "canary", "all": False, "withdraw": False}
    assert daemon.requests[-1][3] == sent
    code, _, err = run(capsys, "rollback", "r", "n1", "n2", "--withdraw", "--reason", "x")
    assert (code, err.strip()) == (0, "r: 2 nodes no longer rolled back")
    code, _, err = run(capsys, "rollback", "r", "--reason", "x")
    assert (code, "name nodes, --wave or --all" in err) == (2, True)
