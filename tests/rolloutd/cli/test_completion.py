"""Completion in shells: commands, verbs, choices, and names that the daemon has."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from rolloutd.cli.command_group import Parser
from rolloutd.cli.completion import completes
from tests.rolloutd.canned_daemon import CannedDaemon
from tests.rolloutd.cli.command_lines import leaf_parsers
from tests.rolloutd.cli.samples import run

FREE_TEXT = {
    *(
        "TEXT",
        "TIME",
        "N",
        "K",
        "SEQ",
        "SHA256",
        "HASH",
        "HOST",
        "ID",
        "WINDOW",
        "NAME",
        "PERSON",
        "DURATION",
    ),
    *("NODE:PHASE", "STAGE", "COMMAND", "PROGRAM", "SELECTOR", "COLUMN", "DURATION"),
    *("NAME=ADDRESS", "VARIABLE", "KEY=NUMBER", "NAME=MEMBERS", "URL", "USER", "PATH=VALUE"),
    *("OWNER_DSN", "SUBJECT | all"),
}
"""Values that only the user knows, or that no list has."""


def complete_by_bash_words(line: str, words: Sequence[str]) -> list[str]:
    """Return what bash offers at the end of a line that it has split into words."""
    script = f"""
        PATH={Path(sys.executable).parent}:$PATH
        eval "$(rolloutctl completion bash)"
        COMP_LINE='{line}' COMP_POINT={len(line)} COMP_WORDS=({" ".join(map(repr, words))})
        COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
        found=$(complete -p rolloutctl) found=${{found##*-F }}
        "${{found%% *}}"
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert not done.stderr
    return done.stdout.split()


def test_bash_completes_after_its_word_breaks(daemon: CannedDaemon) -> None:
    daemon.answer("GET", "inventory", {"nodes": [{"node": "n1"}], "sources": [], "next": None})
    line = "rolloutctl wait r --for gate=s"
    assert complete_by_bash_words(line, [*line.split()[:-1], "gate", "=", "s"]) == ["start"]
    line = "rolloutctl wait r --for node/n1="
    assert complete_by_bash_words(line, [*line.split()[:-1], "node/n1", "="]) == ["done"]


def complete_in_bash(lines: Sequence[str], directory: Path) -> dict[str, list[str]]:
    """Return what bash offers for the last word of each line; a space at the end begins a word."""
    script = f"""
        PATH={Path(sys.executable).parent}:$PATH
        eval "$(rolloutctl completion bash)"
        while IFS= read -r line; do
            read -ra COMP_WORDS <<< "rolloutctl $line"
            [[ $line == *' ' ]] && COMP_WORDS+=('')
            COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )) COMPREPLY=()
            _shtab_rolloutctl
            echo "${{COMPREPLY[@]}}"
        done
    """
    done = subprocess.run(
        ["bash", "-c", script], input="\n".join([*lines, ""]), capture_output=True, text=True, cwd=directory
    )
    assert not done.stderr
    return dict(zip(lines, map(str.split, done.stdout.splitlines()), strict=True))


def test_each_argument_is_completed_or_free_text() -> None:
    for words, parser in leaf_parsers().items():
        for action in parser._actions:
            takes_value = action.nargs != 0 and action.help != argparse.SUPPRESS
            if takes_value and not action.choices and not completes(str(action.metavar)):
                assert action.metavar in FREE_TEXT, f"{words}: {action.dest}"


def test_each_verb_is_completed(daemon: CannedDaemon, tmp_path: Path) -> None:
    parsers = {words: each for words, each in leaf_parsers().items() if isinstance(each, Parser)}
    verbs = {f"{words} ": [*each.verbs.choices] for words, each in parsers.items() if each.verbs is not None}
    assert {"audit ", "inventory ", "rollouts ", "verdicts "} == set(verbs)
    offered = complete_in_bash(list(verbs), tmp_path)
    missing = {line: [each for each in verbs[line] if each not in offered[line]] for line in verbs}
    assert not any(missing.values()), missing


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_asks_for_names(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "completion", shell)
    assert (code, "inventory" in out, "rolloutctl names rollouts" in out) == (0, True, True)


def test_bash_completes_values_with_names_of_the_daemon(
    daemon: CannedDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = [{"gate": "continue", "wave": "canary"}, {"gate": "start", "wave": None}]
    nodes = [
        {"node": "n1", "team": "infra", "labels": {"rack": "r1"}},
        {"node": "$(touch evil)", "team": None, "labels": {}},
    ]
    daemon.answer("GET", "rollouts", {"rollouts": [{"rollout": "kernel-abcde", "plan": "kernel"}]})
    daemon.answer("GET", "status", {"rollouts": [{"gates": gates}]})
    daemon.answer("GET", "inventory", {"nodes": nodes, "sources": [{"source": "ansible:hosts.yml"}]})
    daemon.answer("GET", "locks", {"pools": [{"pool": "rack/r1"}]})
    (tmp_path / "plan.yml").touch()
    (tmp_path / "rolloutd").mkdir()
    contexts = {"current": None, "contexts": {"prod": {"host": "ops1"}}}
    (tmp_path / "rolloutd" / "contexts.json").write_text(json.dumps(contexts))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    expected = {
        "nodes ker": ["kernel-abcde", "kernel"],
        "audit --rollout ker": ["kernel-abcde", "kernel"],
        "changes ker": ["kernel"],
        "why kernel ": ["n1"],
        "clean ": ["n1", "kernel-abcde", "kernel"],
        "approve kernel continue --node ": ["n1"],
        "approve kernel continue --team in": ["infra"],
        "approve kernel continue --wave ca": ["canary"],
        "approve kernel con": ["continue"],
        "freeze --scope ": ["all", "team/infra", "rack/r1", "node/n1"],
        "plan submit pl": ["plan.yml"],
        "audit ": ["verify", "head", "settle", "export", "kernel-abcde", "kernel"],
        "audit export ": ["kernel-abcde", "kernel"],
        "audit verify --da": ["--database"],
        "audit --kind HoldT": ["HoldTaken"],
        "inventory ": ["conflicts", "accept", "pin", "n1"],
        "inventory accept ansible": ["ansible:hosts.yml"],
        "inventory pin n": ["n1"],
        "rollouts ": ["delete"],
        "rollouts delete ker": ["kernel-abcde", "kernel"],
        "verdicts ": ["clear"],
        "artifacts report kernel --by ra": ["rack"],
        "nodes kernel --pool ra": ["rack/r1"],
        "explain plan.spec.gates.start.own": ["plan.spec.gates.start.owner"],
        "wait kernel --for gate=c": ["gate=continue"],
        "wait kernel --for node/": ["node/n1=done"],
        "context use ": ["local", "prod"],
    }
    assert complete_in_bash(list(expected), tmp_path) == expected
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("shell", "words"),
    [("zsh", ":SCOPE:_rolloutctl_scopes"), ("fish", '-l scope -xka "(_rolloutctl_scopes)"')],
)
def test_option_values_are_completed_in_other_shells(
    shell: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in run(capsys, "completion", shell)[1]
