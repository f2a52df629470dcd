"""What every command shares: its parser's pieces, and the call it is run with.

A command is a function from a Call to an exit code; its family registers it
beside its arguments.  It knows argparse and the client, and no command.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from rolloutd.cli import exits, moments
from rolloutd.control.client import DEFAULT_SOCKET, Client

SUGGESTION_CUTOFF = 0.7
"""How alike a mistyped word and a known one must be, as difflib counts: `lgos` is near `logs`."""


@dataclass(frozen=True, slots=True)
class Call:
    """One invocation: what was asked, and the daemon it is asked of."""

    args: argparse.Namespace
    client: Client

    def get(self, path: str, **query: Any) -> Any:
        """Ask; raises Answer and NoDaemon, which become exit codes."""
        return self.client.get(path, query)


Handler = Callable[[Call], int]


class Parser(argparse.ArgumentParser):
    """argparse, with the nearest known word where one was mistyped."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("allow_abbrev", False)
        super().__init__(**settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what a command does not know in that command's own name; argparse leaves it to the whole."""
        parsed, strange = super().parse_known_args(args, namespace)
        if strange and self._subparsers is None:
            self.error(f"unrecognized arguments: {' '.join(strange)}")
        return parsed, strange

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the command line and exit 2."""
        told = _suggestion(message) or _near_option(self, message) or message
        self.exit(exits.USAGE, f"{self.prog}: {told}\n{self.prog} --help shows what there is\n")


class Family:
    """Where a family of commands registers itself."""

    def __init__(
        self, subparsers: Any, shared: argparse.ArgumentParser, whole: argparse.ArgumentParser
    ) -> None:
        self._subparsers = subparsers
        self._shared = shared
        self.whole = whole
        """The parser of the whole command line."""

    def command(
        self, name: str, handler: Handler, summary: str, *, json: bool = True
    ) -> argparse.ArgumentParser:
        """Add a command and return its parser."""
        parser: argparse.ArgumentParser = self._subparsers.add_parser(
            name, help=summary, description=_sentence(summary), parents=[self._shared]
        )
        if json:
            parser.add_argument("--json", action="store_true", help="print JSON, a stable contract")
        parser.set_defaults(handler=handler)
        return parser

    def group(self, name: str, summary: str) -> Family:
        """Add a command that has commands of its own."""
        parser = self._subparsers.add_parser(name, help=summary, description=_sentence(summary))
        commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="subcommand")
        return Family(commands, self._shared, self.whole)


def shared_options() -> argparse.ArgumentParser:
    """Return the options that may stand before and after a command's name."""
    shared = Parser(add_help=False)
    shared.add_argument(
        "--socket",
        metavar="PATH",
        default=argparse.SUPPRESS,
        help=f"the daemon's socket (default: $ROLLOUTD_SOCKET, else {DEFAULT_SOCKET})",
    )
    shared.add_argument(
        "--host",
        metavar="HOST",
        default=argparse.SUPPRESS,
        help="reach the daemon there over ssh, as the account that you log in to; as ssh takes it",
    )
    return shared


def add_rollout(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the ROLLOUT argument."""
    parser.add_argument(
        "rollout",
        metavar="ROLLOUT",
        nargs="?" if optional else None,
        help="its id, the beginning of its id, or its plan's name",
    )


def add_node(parser: argparse.ArgumentParser) -> None:
    """Add the NODE argument."""
    parser.add_argument("node", metavar="NODE", help="the node's name")


def add_reason(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add --reason, which the audit keeps."""
    parser.add_argument(
        "--reason", metavar="TEXT", type=_words, required=required, help="why; kept in the audit"
    )


def add_until(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --until."""
    parser.add_argument(
        "--until", metavar="TIME", type=instant, help=f"{what}: RFC 3339, or a duration from now such as 2h"
    )


def instant(text: str) -> str:
    """Return an instant of the command line, for argparse."""
    try:
        return moments.read(text)
    except ValueError as wrong:
        raise argparse.ArgumentTypeError(str(wrong)) from None


def number(least: int) -> Callable[[str], int]:
    """Return how a whole number that is not less is read, for argparse."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number, {least} or more")
        return int(text)

    return read


def body_of(**fields: Any) -> dict[str, Any]:
    """Return a request's body without what was not said."""
    return {name: value for name, value in fields.items() if value is not None}


def on_terminal() -> bool:
    """Say whether a person watches stdout."""
    return sys.stdout.isatty()


def _words(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty, and whoever reads the audit will want to know why")
    return text


def _sentence(summary: str) -> str:
    return summary[0].upper() + summary[1:] + "."


def _suggestion(message: str) -> str:
    mistyped = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
    if mistyped is None:
        return ""
    import difflib

    known = [word.strip(" '\"") for word in mistyped[2].split(",")]
    near = difflib.get_close_matches(mistyped[1], known, n=1, cutoff=SUGGESTION_CUTOFF)
    return f"there is no '{mistyped[1]}' here; did you mean '{near[0]}'?" if near else ""


def _near_option(parser: argparse.ArgumentParser, message: str) -> str:
    """Return the nearest option that may stand there."""
    strange = re.fullmatch(r"unrecognized arguments: (--[^ =]+).*", message)
    if strange is None:
        return ""
    import difflib

    near = difflib.get_close_matches(strange[1], sorted(_options(parser)), n=1, cutoff=SUGGESTION_CUTOFF)
    return f"there is no {strange[1]} here; did you mean {near[0]}?" if near else ""


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """Return the options of a parser and of the commands below it."""
    found = {option for action in parser._actions for option in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {option for below in action.choices.values() for option in _options(below)}
    return found
