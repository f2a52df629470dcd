"""Every command of every document: run here, parsed by its own parser, or in one list with the reason.

rolloutctl's commands are parsed, and those that only read run against a daemon with data of every kind.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from rolloutd.__main__ import parser as daemon_parser
from rolloutd.cli.main import parser
from tests.docs.documented_commands import ROOT, DocumentedCommand, documented_commands, documents
from tests.rolloutd.cli.command_lines import leaf_parsers
from tests.rolloutd.cli.populated_daemon import READING, PopulatedDaemon, populated_daemon

TUTORIAL = "the tutorial, which tests/acceptance/test_packages.py runs word by word"

NOT_RUN = {
    "git clone": "needs the repository's address, which the reader has",
    "cd rolloutd": "belongs to git clone",
    "apt install ./rolloutd_": "tests/acceptance/test_packages.py installs the package with apt-get",
    "usermod -aG rolloutctl": "a user of the reader's machine; test_packages.py lets the role do it",
    "python3 -m venv /opt/rolloutd": "tests/acceptance/test_service.py installs so, below its own directory",
    "/opt/rolloutd/bin/pip install": "needs the network; `make demo` installs from the same lock",
    "ln -s /opt/rolloutd": "changes this machine",
    "install ": "changes this machine; test_service.py puts the same files below its own root",
    "systemd-sysusers": "changes this machine; the package runs it in test_packages.py",
    "systemd-tmpfiles --create": "changes this machine; the package runs it in test_packages.py",
    "journalctl": "systemd's journal; tests/acceptance/test_service.py reads these fields there",
    "export ROLLOUTD_VOTES": "a variable of kubectl rolloutd, which tests/acceptance/test_operator.py sets",
    "createuser": "PostgreSQL's; the tests of the store make such roles in a server of their own",
    "createdb": "PostgreSQL's; the tests of the store make databases in a server of their own",
    "kubectl": "needs a cluster; test_votes.py runs those of its document, tests/contracts reads manifests",
    "./make-kubeconfig.sh": "needs a cluster",
    "deploy/kubernetes/make-kubeconfig.sh": "needs a cluster",
    "skopeo copy": "needs a registry",
    "ansible-playbook -i ops.yml": "tests/acceptance/test_packages.py runs the role over ssh",
    "ssh-keygen": "OpenSSH's; tests/acceptance/test_ssh_certificates.py signs so with a real authority",
    "openssl rand": "makes a key; tests/acceptance/test_ticket_example.py makes its keys the same way",
    "chmod 600": "belongs to openssl rand",
    "python3 receiver.py": "tests/acceptance/test_ticket_example.py runs it",
    "curl -sS -H fleet-lock": "tests/rolloutd/fleetlock/test_fleetlock.py sends this request",
    "curl -H Authorization": "tests/acceptance/test_ticket_example.py sends this request to the receiver",
    "apt-get install -y -q ./rolloutd_": TUTORIAL,
    "ssh 10.77.0.": TUTORIAL,
    "cat": TUTORIAL,
    "mkdir somaxconn": TUTORIAL,
    "cd somaxconn": TUTORIAL,
    "sed -i -e": TUTORIAL,
    "/opt/rolloutd/bin/ansible-playbook": TUTORIAL,
}
"""Commands of other programs, by how they begin: why no test of this file runs them."""

# Parsers are made once: making them costs more than parsing.
whole_parser, leaves = cache(parser), cache(leaf_parsers)

COMMANDS = [command for path in documents() for command in documented_commands(path)]

READ_ONLY = {leaf for leaf in leaves() if any(f"{line} ".startswith(f"{leaf} ") for line in READING)} - {
    "watch",
    "wait",
    "logs",
    "clean",
    "shell",
}
"""Commands that are run here; the others of READING wait for something, or read with one option only."""

OTHER_MACHINE = ("--host", "--context", "-f", "--database", "--anchor", "--refresh")
"""Options with which a command needs more than the daemon of the test, or does not end."""

CHANGING_ACTIONS = {"settle", "clear", "pin", "accept", "delete"}
"""Actions of commands that otherwise read."""

ANSWERS_NO = {"drift", "config", "compare", "diff", "artifacts report"}
"""Commands whose exit code 1 is an answer."""

STAND_INS = (
    (r"somaxconn(-2026-11|-kj2fc)?|apps|ROLLOUT|OLD", "{live}"),
    (r"app", "{prepared}"),
    (r"n\d+|web-\d+|worker-\d+|pay-\d+|ams-\d|fra-\d|NODE", "p1"),
    (r"plan\.ya?ml|FILE", "{dir}/plan.yml"),
    (r"(playbooks/)?files/|DIR", "{dir}/files"),
    (r"PLAN", "sysctl"),
    (r"fleetlock/GROUP", "fleetlock/workers"),
)
"""Names of the documents, and what has that part in the daemon of the test."""


def named(programs: str) -> list[object]:
    """Return the commands of one program as parameters, each once."""
    commands = {command.text: command for command in COMMANDS if command.words[0] == programs}
    return [pytest.param(each, id=f"{each.document}: {text}") for text, each in commands.items()]


def leaf_of(words: tuple[str, ...]) -> str:
    """Return which command of rolloutctl this is; "" for options of rolloutctl itself."""
    known = leaves()
    plain = [word for word in words[1:] if not word.startswith("-")]
    return next((" ".join(plain[:n]) for n in (2, 1) if " ".join(plain[:n]) in known), "")


def parse(used: argparse.ArgumentParser, words: tuple[str, ...]) -> str:
    """Return what the parser says against the words; "" if it takes them."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            used.parse_args(words[1:])
    except SystemExit as ended:
        return said.getvalue() if ended.code else ""
    return ""


@pytest.mark.parametrize("command", named("rolloutctl"))
def test_command_of_rolloutctl_parses(command: DocumentedCommand) -> None:
    if command.is_whole:
        assert parse(whole_parser(), command.words) == ""
        return
    assert list(unknown_words(command.words)) == []


def unknown_words(words: tuple[str, ...]) -> Iterator[str]:
    """Yield the words of a mention, which may lack arguments, that the command does not have."""
    below: argparse.ArgumentParser = whole_parser()
    for word in words[1:]:
        groups = [each for each in below._actions if isinstance(each, argparse._SubParsersAction)]
        if word.startswith("-"):
            if word.partition("=")[0] not in below._option_string_actions:
                yield word
        elif groups and word != "COMMAND":
            if word in groups[0].choices:
                below = groups[0].choices[word]
                continue
            if getattr(below, "verbs", None) is None:
                yield word
            return


@pytest.mark.parametrize("command", named("rolloutd"))
def test_command_of_rolloutd_parses(command: DocumentedCommand) -> None:
    assert parse(daemon_parser(), command.words) == ""


@pytest.mark.parametrize("command", named("make"))
def test_make_target_and_variables_exist(command: DocumentedCommand) -> None:
    text = (ROOT / "Makefile").read_text()
    targets = {word for word in command.words[1:] if "=" not in word}
    assert targets <= set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    for name, value in (word.split("=", 1) for word in command.words[1:] if "=" in word):
        assert re.search(rf"\$[({{]{name}\b|^{name} \?=", text, re.MULTILINE), f"{name} is not a variable"
        match name:
            case "DEMO":
                assert parse(whole_parser(), ("rolloutctl", "demo", *shlex.split(value))) == ""
            case "TESTS":
                assert (ROOT / value).exists()
            case "SUITE":
                module, *options = shlex.split(value)
                assert set(options) <= options_of(f"bench.{module}")
            case _:
                assert value.isdecimal() or name == "PACKAGES"


@pytest.mark.parametrize("command", named("python"))
def test_module_has_the_options(command: DocumentedCommand) -> None:
    assert command.words[1] == "-m"
    given = {word.partition("=")[0] for word in command.words[3:] if word.startswith("-")}
    assert given <= options_of(command.words[2])


def options_of(module: str) -> set[str]:
    """Return the options that a module's help names."""
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(re.findall(r"--[\w-]+", done.stdout))


@pytest.mark.parametrize("command", named("systemctl"))
def test_unit_exists(command: DocumentedCommand) -> None:
    units = [word for word in command.words[2:] if not word.startswith("-")]
    files = {path.name for path in (ROOT / "deploy/systemd").iterdir()}
    assert {unit if "." in unit else f"{unit}.service" for unit in units} <= files


def test_other_commands_are_in_the_list() -> None:
    own = {"rolloutctl", "rolloutd", "make", "python", "systemctl"}
    others = {command.text: command for command in COMMANDS if command.words[0] not in own}
    unlisted = [
        (each.document, text)
        for text, each in others.items()
        if not text.replace("'", "").startswith(tuple(NOT_RUN)) and not is_request(each)
    ]
    assert unlisted == []
    used = {begin for begin in NOT_RUN for text in others if text.replace("'", "").startswith(begin)}
    assert set(NOT_RUN) - used == set(), "no document has these any more"


def is_request(command: DocumentedCommand) -> bool:
    """Return whether it reads a route of the daemon: the walk below sends these."""
    return command.words[:2] == ("curl", "--unix-socket")


async def test_reading_commands_succeed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # audit export writes its archive there
    failed = []
    async with populated_daemon(tmp_path) as daemon:
        for words in sorted({fill(daemon, each) for each in COMMANDS if is_run(each)}):
            code = await daemon.run(*words)
            said = capsys.readouterr().err
            if code and not (code == 1 and leaf_of(("rolloutctl", *words)) in ANSWERS_NO):
                failed.append(f"{shlex.join(words)}: {code} {said}")
        for command in filter(is_request, COMMANDS):
            path = command.words[-1].removeprefix("http://localhost")
            await daemon.inside.request("olga", "get", path)
    assert "\n".join(failed) == ""


def is_run(command: DocumentedCommand) -> bool:
    if command.words[0] != "rolloutctl" or set(command.words) & {*OTHER_MACHINE, *CHANGING_ACTIONS}:
        return False
    return leaf_of(command.words) in READ_ONLY and (
        command.is_whole or parse(whole_parser(), command.words) == ""
    )


def fill(daemon: PopulatedDaemon, command: DocumentedCommand) -> tuple[str, ...]:
    """Return the words after rolloutctl with names of the daemon of the test."""
    words = []
    for word in command.words[1:]:
        stand_in = next((text for pattern, text in STAND_INS if re.fullmatch(pattern, word)), None)
        words += daemon.fill(stand_in) if stand_in else [word.replace("2026-", "2027-")]
    if words[0] == "forecast" and "--score" not in words:
        words = ["p2" if word == "p1" else word for word in words]  # p1 is done
        words += ["--draws", "3"]
    return tuple(words)


def test_planted_mistakes_are_seen() -> None:
    wrong = DocumentedCommand("planted", ("rolloutctl", "nodes", "somaxconn", "--fase", "failed"), True)
    assert "--fase" in parse(whole_parser(), wrong.words)
    assert list(unknown_words(("rolloutctl", "plan", "preview", "--impakt"))) == ["--impakt"]
    assert list(unknown_words(("rolloutctl", "lokcs"))) == ["lokcs"]
