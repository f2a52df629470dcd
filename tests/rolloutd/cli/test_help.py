"""Help of each argument: it stands alone, has its default, and says when it is needed."""

from __future__ import annotations

import argparse
import shlex

import pytest

from rolloutd.cli.examples import EXAMPLES
from rolloutd.cli.main import main, parser
from tests.rolloutd.cli.command_lines import leaf_parsers

WITHOUT_REASON = {"return", "unfreeze", "team unfreeze"}
"""Commands that need no reason in any form."""


def test_help_stands_alone_with_its_default() -> None:
    wrong = []
    for words, command in leaf_parsers().items():
        for action in command._actions:
            text = str(action.help)
            if text == argparse.SUPPRESS or isinstance(action, argparse._HelpAction):
                continue
            has_default = bool(action.default) and action.default != argparse.SUPPRESS
            if not action.help or text.endswith(".") or (has_default and "(" not in text):
                wrong.append(f"{words} {action.dest}: {text}")
    assert wrong == []


@pytest.mark.parametrize(
    ("command", "line"), [(command, line) for command, lines in EXAMPLES.items() for line in lines]
)
def test_example_is_one_of_its_command(capsys: pytest.CaptureFixture[str], command: str, line: str) -> None:
    assert parser().parse_args(shlex.split(line)).command == command
    with pytest.raises(SystemExit):
        main(["help", command])
    assert f"\n  rolloutctl {line}\n" in capsys.readouterr().out


def test_optional_reason_says_when_it_is_needed() -> None:
    wrong = [
        f"{words}: {action.help}"
        for words, command in leaf_parsers().items()
        for action in command._actions
        if action.dest == "reason" and not action.required and words not in WITHOUT_REASON
        if not str(action.help).startswith(("for ", "without ", "with "))
    ]
    assert wrong == []


def test_end_without_time_is_named() -> None:
    wrong = [
        f"{words}: {action.help}"
        for words, command in leaf_parsers().items()
        for action in command._actions
        if action.dest == "until" and "(" not in str(action.help)
    ]
    assert wrong == []
