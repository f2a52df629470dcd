"""What commands ask before they act, and what their exit codes say when nothing was to do."""

from __future__ import annotations

import io

import pytest

from tests.rolloutd.canned_daemon import CannedDaemon
from tests.rolloutd.cli.command_lines import leaf_parsers
from tests.rolloutd.cli.samples import run

IRREVERSIBLE = {
    "cancel": ["cancel r --reason x", "cancel r --now --reason x"],
    "rollback": ["rollback r --all --reason x", "rollback r --wave w --reason x"],
    "clean": ["clean n1 --reason x"],
    "rollouts delete": ["rollouts delete r"],
    "audit settle": ["audit settle all --keep database --reason x"],
}
"""Commands that lose something for ever or act on many nodes, in each form that does."""

ACTS_AS_THE_USER = {"shell": ["shell n1 --reason x"]}
"""Commands that run a program as the user, which must be seen before."""

ASKS_AT_TERMINALS = {"approve", "train approve", "train add"}
"""Commands that show at a terminal what they start; a script has read it before."""

ASKS_ITSELF = {"init", "hosts scan"}
"""Programs that ask more than one question; their own tests answer them."""

NEVER_ASKS = {
    # They read.
    *("rollouts", "verdicts", "audit", "audit verify", "audit head", "audit export"),
    *("context list", "explain", "wait", "forecast"),
    *("status", "nodes", "why", "watch", "logs", "handover", "compare", "changes", "config", "diff"),
    *(
        "drift",
        "gates",
        "review",
        "locks",
        "inventory",
        "inventory conflicts",
        "team show",
        "prepare",
        "checkpoints",
        "names",
    ),
    *(
        "artifacts verify",
        "artifacts report",
        "plan validate",
        "plan preview",
        "plan schema",
        "plan new",
        "report",
    ),
    *("doctor", "backup", "tui", "web", "demo", "completion", "help", "artifacts manifest"),
    # Another command takes it back, or the daemon keeps what was before.
    *("inventory accept", "inventory pin", "verdicts clear"),
    *("plan submit", "reject", "withdraw", "token sign", "token use", "pause", "resume"),
    *("retry", "advance", "skip", "return", "hold", "release", "freeze", "unfreeze", "team windows"),
    *("context add", "context use", "context remove"),
    *("train show", "train remove", "leader step-down"),
    *("team canaries", "team freeze", "team unfreeze", "restore", "store prepare", "store move"),
}


def test_each_command_is_known_to_ask_or_not() -> None:
    known = {*IRREVERSIBLE, *ACTS_AS_THE_USER, *ASKS_AT_TERMINALS, *ASKS_ITSELF, *NEVER_ASKS}
    assert set(leaf_parsers()) == known
    asking = {words for words, parser in leaf_parsers().items() if "--yes" in parser._option_string_actions}
    assert asking == {*IRREVERSIBLE, *ACTS_AS_THE_USER, *ASKS_AT_TERMINALS, *ASKS_ITSELF}


@pytest.mark.parametrize(
    "line", [line for lines in (IRREVERSIBLE | ACTS_AS_THE_USER).values() for line in lines]
)
def test_without_terminal_nothing_irreversible_is_sent(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    code, _, err = run(capsys, *line.split())
    assert (code, daemon.requests) == (2, [])
    assert err == f"rolloutctl {line.split()[0]}: no terminal to ask at; confirm it with --yes\n"


@pytest.mark.parametrize(
    ("line", "path", "expected"),
    [
        ("release n1", "holds", "n1: no hold of yours; list all holds with rolloutctl locks\n"),
        ("release n1 --as job", "holds", "n1: no hold job; list all holds with rolloutctl locks\n"),
        ("unfreeze", "freezes", "all: no freeze; list all freezes with rolloutctl locks\n"),
        (
            "unfreeze --scope rack/r1",
            "freezes",
            "rack/r1: no freeze; list all freezes with rolloutctl locks\n",
        ),
        ("team unfreeze infra", "freezes", "team/infra: no freeze; list all freezes with rolloutctl locks\n"),
    ],
)
def test_release_of_nothing_exits_1(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], line: str, path: str, expected: str
) -> None:
    daemon.answer("DELETE", path, {"lifted": 0})
    assert run(capsys, *line.split()) == (1, "", expected)
    daemon.answer("DELETE", path, {"lifted": 1})
    code, _, err = run(capsys, *line.split())
    assert (code, "released" in err or "1 freeze lifted" in err) == (0, True)


def test_withdrawal_of_no_rollback_exits_1(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer("POST", "rollouts/r/rollback", {"rollout": "r", "nodes": []})
    code, _, err = run(capsys, "rollback", "r", "--withdraw", "--reason", "x")
    assert (code, err) == (1, "r: no rollback waits here; list the nodes with rolloutctl nodes r\n")


def test_repeated_rollback_says_that_it_is_ordered(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer("POST", "rollouts/r/rollback", {"rollout": "r", "nodes": []})
    code, _, err = run(capsys, "rollback", "r", "p1", "--reason", "x")
    expected = "r: the rollback of p1 is ordered already; --withdraw ends one that waits\n"
    assert (code, err) == (0, expected)


SHELL = {"node": "n1", "command": ["sh", "-c", "exit 7", "n1 host"]}


def test_shell_runs_the_recorded_command_with_its_exit_code(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.answer("POST", "nodes/n1/shell", SHELL)
    code, _, err = run(capsys, "shell", "n1", "--reason", "disk", "--yes")
    assert (code, err) == (7, "sh -c 'exit 7' 'n1 host'\n")
    assert [each[-1] for each in daemon.requests] == [{"reason": "disk"}]


def test_shell_show_records_nothing(daemon: CannedDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.answer("GET", "nodes/n1/shell", SHELL)
    assert run(capsys, "shell", "n1", "--show") == (0, "sh -c 'exit 7' 'n1 host'\n", "")
    code, _, err = run(capsys, "shell", "n1")
    assert (code, err) == (2, "rolloutctl shell: no --reason; give one, or --show\n")


def test_shell_whose_command_changed_is_not_run(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.answer("GET", "nodes/n1/shell", SHELL)
    daemon.answer("POST", "nodes/n1/shell", {**SHELL, "command": ["sh", "-c", "exit 8"]})
    monkeypatch.setattr("rolloutd.cli.command_group.is_terminal", lambda: True)
    monkeypatch.setattr("sys.stdin", Answering("y\n"))
    code, _, err = run(capsys, "shell", "n1", "--reason", "disk")
    assert (code, err.splitlines()[-1]) == (1, "n1: its command has changed; run this again")


TRAIN = {
    "name": "week",
    "rollouts": ["kernel-1", "driver-2"],
    "wait_s": 5400.0,
    "missing": ["driver-2"],
    "state": "waiting",
}


def test_approval_of_train_is_for_what_was_shown(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.answer("GET", "trains/week", TRAIN)
    daemon.answer("POST", "trains/week/approve", {**TRAIN, "missing": [], "state": "active"})
    monkeypatch.setattr("rolloutd.cli.command_group.is_terminal", lambda: True)
    monkeypatch.setattr("sys.stdin", Answering("n\ny\n"))
    line = ["train", "approve", "week", "--reason", "x"]
    code, _, err = run(capsys, *line)
    assert (code, err.splitlines()[0]) == (
        1,
        "covers kernel-1, driver-2 in this order, with a wait of 1h30m",
    )
    assert [each[0] for each in daemon.requests] == ["GET"]
    assert run(capsys, *line)[0] == 0
    body = {"reason": "x", "rollouts": ["kernel-1", "driver-2"], "wait_s": 5400.0}
    assert daemon.requests[-1][-1] == body


def test_train_grows_by_what_was_shown(
    daemon: CannedDaemon, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.answer("GET", "trains/week", TRAIN)
    daemon.answer("PUT", "trains/week", TRAIN)
    monkeypatch.setattr("rolloutd.cli.command_group.is_terminal", lambda: True)
    monkeypatch.setattr("sys.stdin", Answering("n\ny\n"))
    line = ["train", "add", "week", "certs", "--reason", "x"]
    code, _, err = run(capsys, *line)
    assert (code, err.splitlines()[0]) == (
        1,
        "covers kernel-1, driver-2 in this order, with a wait of 1h30m",
    )
    assert run(capsys, *line)[0] == 0
    shown = {"rollouts": ["kernel-1", "driver-2"], "wait_s": 5400.0}
    assert daemon.requests[-1][-1] == {"rollouts": ["certs"], "reason": "x", "shown": shown}


class Answering(io.StringIO):
    """A terminal at which a user has typed."""

    def isatty(self) -> bool:
        return True
