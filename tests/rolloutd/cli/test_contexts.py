"""Contexts: which daemon a command is for."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from rolloutd.cli import exits
from rolloutd.cli.contexts import Destination, destination
from rolloutd.control.client import DEFAULT_SOCKET
from tests.rolloutd.cli.samples import run


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for name in ("ROLLOUTD_SOCKET", "ROLLOUTD_HOST"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "rolloutd"


def chosen(**options: str) -> Destination:
    return destination(argparse.Namespace(**options))


def test_contexts_are_added_used_and_removed(capsys: pytest.CaptureFixture[str], directory: Path) -> None:
    assert chosen() == Destination()
    assert run(capsys, "context", "add", "prod", "--host", "ops1")[0] == 0
    assert run(capsys, "context", "add", "lab", "--host", "ops2", "--socket", "/tmp/s")[0] == 0
    assert chosen() == Destination()
    assert run(capsys, "context", "use", "prod")[1] == "prod: ops1\n"
    assert (chosen().host, chosen(context="lab"), chosen(context="local").host) == (
        "ops1",
        Destination("ops2", "/tmp/s", "context lab"),
        None,
    )
    out = run(capsys, "context", "list")[1]
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["-", "local", "-", "-"],
        ["*", "prod", "ops1", "-"],
        ["-", "lab", "ops2", "/tmp/s"],
    ]
    assert run(capsys, "context", "remove", "prod")[0] == 0
    assert chosen() == Destination()
    assert run(capsys, "context", "list", "-o", "name")[1] == "local\nlab\n"
    assert [path.name for path in directory.iterdir()] == ["contexts.json"]


def test_replaced_context_names_the_host_before(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "context", "add", "prod", "--host", "ops1")
    assert run(capsys, "context", "add", "prod", "--host", "ops2")[2] == "prod: ops1 is replaced by ops2\n"
    assert chosen(context="prod").host == "ops2"


def test_options_come_before_environment_and_context(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(capsys, "context", "add", "prod", "--host", "ops1")
    run(capsys, "context", "use", "prod")
    monkeypatch.setenv("ROLLOUTD_SOCKET", "/tmp/here")
    assert chosen() == Destination()  # the variable names this machine's daemon
    monkeypatch.setenv("ROLLOUTD_HOST", "ops3")
    assert chosen() == Destination("ops3", "/tmp/here", "$ROLLOUTD_HOST")
    assert chosen(host="ops4").host == "ops4"
    assert chosen(context="prod").host == "ops1"
    assert chosen(socket="/tmp/s") == Destination(None, "/tmp/s", "--host")
    monkeypatch.delenv("ROLLOUTD_SOCKET")
    assert chosen(host="ops4").socket == DEFAULT_SOCKET
    with pytest.raises(exits.Exit, match="leave these out"):
        chosen(context="prod", host="ops4")


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "{", '{"contexts": []}', '{"contexts": {"a": 1}}', "[" * 9999, "x" * 2_000_000),
        *('{"contexts": {"a": {"host": "-oX"}}}', '{"current": 1, "contexts": {}}'),
    ],
)
def test_broken_file_is_an_error_and_stays(
    capsys: pytest.CaptureFixture[str], directory: Path, content: str
) -> None:
    directory.mkdir()
    file = directory / "contexts.json"
    file.write_text(content)
    code, _, err = run(capsys, "context", "add", "prod", "--host", "ops1")
    assert (code, err) == (2, f"{file}: it is not a file of contexts; correct it or remove it\n")
    assert file.read_text() == content


def test_local_command_says_that_it_is_not_for_the_context(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    run(capsys, "context", "add", "prod", "--host", "ops1")
    run(capsys, "context", "use", "prod")
    monkeypatch.setattr("os.execve", lambda *_: None)
    err = run(capsys, "backup", "file")[2]
    assert err == "rolloutctl backup: for this machine, not for ops1 of context prod\n"
    code, _, err = run(capsys, "backup", "file", "--context", "prod")
    assert code == 2


def test_command_without_daemon_opens_no_connection(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLOUTD_HOST", "nosuch.invalid")
    monkeypatch.setenv("PATH", "")  # ssh would not be found
    for words in (["plan", "schema"], ["explain", "plan.spec"], ["completion", "bash"], ["context", "list"]):
        assert run(capsys, *words)[0] == 0
