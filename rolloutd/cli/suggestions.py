"""What a mistyped command line probably meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping

from rolloutd.texts.formats import nearest_name

OF_OTHER_TOOLS = {
    "abort": "cancel",
    "cordon": "hold",
    "describe": "why, or inventory NODE",
    "drain": "hold",
    "events": "audit",
    "get": "rollouts, nodes, gates or inventory",
    "list": "rollouts, nodes, gates or inventory",
    "ls": "rollouts, nodes, gates or inventory",
    "show": "status, or why",
    "stop": "pause, or cancel",
    "top": "status -w, or tui",
    "uncordon": "release",
    "version": "--version",
}
"""Commands of kubectl, systemctl and others, and what does the same here."""

MAX_LISTED_CHOICES = 12
"""An error with more words hides its problem; only rolloutctl itself has more commands."""


def suggest_jq(message: str) -> str:
    """Return what takes the place of kubectl's templates."""
    template = re.match(r"argument -o: invalid choice: ['\"](jsonpath|go-template|custom-columns)\b", message)
    if template is None:
        return ""
    return f"-o {template[1]} is unknown; use --jq PROGRAM, such as --jq '.[].node'"


def suggest_command(message: str) -> str:
    mistyped = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
    if mistyped is None:
        return ""
    known = [word.strip(" '\"") for word in mistyped[2].split(",")]
    if "rollouts" in known and mistyped[1] in OF_OTHER_TOOLS:
        return f"'{mistyped[1]}' is unknown; use {OF_OTHER_TOOLS[mistyped[1]]}"
    near = nearest_name(mistyped[1], known)
    if near is None and len(known) > MAX_LISTED_CHOICES:
        return f"'{mistyped[1]}' is unknown; list the commands with rolloutctl help"
    return f"'{mistyped[1]}' is unknown; did you mean '{near}'?" if near else ""


def suggest_option(
    parser: argparse.ArgumentParser, verbs: Mapping[str, argparse.ArgumentParser], message: str
) -> str:
    unknown = re.fullmatch(r"unrecognized arguments: (--[^ =]+).*", message)
    if unknown is None:
        return ""
    if unknown[1] == "--output" and "-o" in known_options(parser):
        return "--output is unknown; use -o"  # kubectl has both; here audit export writes to --output
    if verb := next(
        (name for name, each in verbs.items() if unknown[1] in each._option_string_actions), None
    ):
        return f"{unknown[1]} is of a verb; use {parser.prog} {verb}"
    # Without the dashes, which make short options alike.
    known = sorted(option.lstrip("-") for option in known_options(parser))
    near = nearest_name(unknown[1].lstrip("-"), known)
    return f"{unknown[1]} is unknown; did you mean --{near}?" if near else ""


def known_options(parser: argparse.ArgumentParser) -> set[str]:
    found = {option for action in parser._actions for option in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {option for below in action.choices.values() for option in known_options(below)}
    return found
