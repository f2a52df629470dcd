"""Registration of commands: parsers, shared arguments, and the invocation.

A command is a function from an Invocation to an exit code, registered together
with its arguments.  It does not know the commands.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn, TypeVar

from rolloutd.cli import exits
from rolloutd.cli.examples import format_examples
from rolloutd.cli.output import (
    FORMATS,
    LIST_FORMATS,
    Columns,
    print_csv,
    print_list,
    print_message,
    print_now,
    sort_items,
    to_json,
    to_yaml,
    with_columns,
)
from rolloutd.cli.suggestions import known_options, suggest_command, suggest_jq, suggest_option
from rolloutd.control import user_time
from rolloutd.control.client import DEFAULT_SOCKET, Client
from rolloutd.texts.formats import nearest_name, suggest_name

_FORMATS_HELP = "json, yaml, name (one name a line, as other commands take it), or wide (more columns)"

_HELP_OF_FORMATS = {
    FORMATS: _FORMATS_HELP,
    LIST_FORMATS: f"{_FORMATS_HELP.replace(', or wide', ', wide')}, or csv",
}

COLOR_CHOICES: Mapping[str, bool | None] = {"auto": None, "always": True, "never": False}

T = TypeVar("T")


class Invocation:
    """The arguments of one command, and the client of its daemon, which is connected at its first use."""

    def __init__(self, args: argparse.Namespace, connect: Callable[[], Client]) -> None:
        self.args = args
        self._connect = connect

    @cached_property
    def client(self) -> Client:
        return self._connect()

    def get(self, path: str, **query: Any) -> Any:
        """Return an answer; raises ApiError and DaemonUnreachable, which become exit codes."""
        return self.client.get(path, query)

    def report(self, answer: Any, text: str, *names: str) -> int:
        """Print the answer of a command that changed something, if asked for, and a sentence."""
        self.print_data(answer, names)
        print_message(text)
        return exits.OK

    def report_no_change(self, answer: Any, text: str) -> int:
        """Print the answer of a command that found nothing to change, and what to do."""
        self.report(answer, text)
        return exits.REFUSED

    def print_data(self, value: Any, names: Iterable[str], *, is_streamed: bool = False) -> bool:
        """Print a value, or the names in it, as `--json` or `-o` asked for; return whether one did.

        An item of an endless list is a line of JSON, or a document of YAML.
        """
        match self.args.json:
            case "jq":
                self._print_filtered(value)
            case False:
                return False
            case "yaml":
                print_now(("---\n" if is_streamed else "") + to_yaml(value))
            case "name":
                for name in dict.fromkeys(names):
                    print_now(name)
            case _:
                print_now(to_json(value, is_indented=sys.stdout.isatty() and not is_streamed))
        return True

    def print_items(self, columns: Columns, items: Iterable[Any], wide: Columns | None = None) -> None:
        """Print the list that a command is for, in the order and form that its options ask for."""
        args, every = self.args, with_columns(columns, wide or {})
        if args.sort_by is not None:
            try:
                items = sort_items(every, items, args.sort_by)
            except KeyError:
                near = suggest_name(args.sort_by.upper(), every, f"use {', '.join(every)}")
                problem = f"no column '{args.sort_by}'; {near}"
                raise exits.Exit(exits.USAGE, f"rolloutctl {args.command} --sort-by: {problem}") from None
        rows = list(items)
        if args.is_csv:
            print_csv(every, rows)
        elif rows:
            print_list(every if args.wide else columns, rows)
        else:
            print_message(f"rolloutctl {args.command}: nothing to list")

    def _print_filtered(self, value: Any) -> None:
        """Print each result of --jq: a text as it is, anything else as a line of JSON."""
        try:
            results = self.args.jq.input_value(value).all()
        except ValueError as wrong:
            raise exits.Exit(exits.USAGE, f"--jq: {wrong}; look at the output of --json") from None
        for result in results:
            print_now(result if isinstance(result, str) else to_json(result))


Handler = Callable[[Invocation], int | None]
"""A command; None is success."""


class Parser(argparse.ArgumentParser):
    """An argument parser that suggests the nearest known word for a mistyped one.

    The methods that add arguments return the parser.
    """

    def __init__(self, **settings: Any) -> None:
        # A script's abbreviation would fail as ambiguous once an option with the same beginning is added.
        settings.setdefault("allow_abbrev", False)
        super().__init__(**settings)
        self.verbs: argparse._SubParsersAction[Parser] | None = None

    def argument(self, *names: str, metavar: str, text: str, **settings: Any) -> Parser:
        """Add an argument with a value; `text` is its help."""
        if not names[0].startswith("-"):
            settings.setdefault("type", _non_empty)
        self.add_argument(*names, metavar=metavar, help=text, **settings)
        return self

    def flag(self, *names: str, text: str) -> Parser:
        self.add_argument(*names, action="store_true", help=text)
        return self

    def rollout(self, *, optional: bool = False) -> Parser:
        text = "rollout id, its prefix, or its plan's name"
        return self.argument("rollout", metavar="ROLLOUT", text=text, nargs="?" if optional else None)

    def node(self, *, optional: bool = False) -> Parser:
        return self.argument("node", metavar="NODE", text="the node's name", nargs="?" if optional else None)

    def nodes(self, *, optional: bool = False) -> Parser:
        # With a default: argparse would name it among the missing arguments.
        nargs = {"nargs": "*", "default": ()} if optional else {"nargs": "+"}
        return self.argument("nodes", metavar="NODE", text="the nodes' names", **nargs)

    def watch(self) -> Parser:
        return self.flag("-w", "--watch", text="print again after each change, until interrupted")

    def reason(self, *, required: bool = True, when: str = "") -> Parser:
        """Add --reason; `when` names the forms of a command that need it."""
        text = f"{when}: reason, kept in the audit" if when else "reason, kept in the audit"
        return self.argument("--reason", metavar="TEXT", text=text, type=_non_blank, required=required)

    def until(self, meaning: str) -> Parser:
        """Add --until; `meaning` is a noun phrase."""
        text = f"{meaning}: RFC 3339, or a duration from now, such as 2h (no end)"
        return self.argument("--until", metavar="TIME", text=text, type=time_argument)

    def yes(self) -> Parser:
        return self.flag("--yes", text="do not ask for confirmation; needed where no terminal can ask")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Let the verb's parser read the arguments if they name one.

        Unknown arguments are reported with the command's own usage; argparse would print rolloutctl's.
        """
        words = list(sys.argv[1:] if args is None else args)
        verbs = self._verb_parsers
        if self._subparsers is not None and self.verbs is None and (option := self._early_option(words)):
            self.error(f"{option} stands before the command; write {self.prog} COMMAND {option}")
        position = self._first_argument(words)
        first = "" if position is None else words[position]
        if position is not None and first in verbs:
            return verbs[first].parse_known_args(words[:position] + words[position + 1 :], namespace)
        if self.verbs is not None:
            self.verbs.nargs = argparse.SUPPRESS  # it takes no argument: none of them is a verb
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown and (self._subparsers is None or verbs):
            near = nearest_name(first, verbs)
            self.error(
                f"'{first}' is unknown; did you mean '{near}'?"
                if near
                else f"unrecognized arguments: {' '.join(unknown)}"
            )
        return parsed, unknown

    @property
    def _verb_parsers(self) -> Mapping[str, Parser]:
        return {} if self.verbs is None else self.verbs.choices

    def _early_option(self, words: Sequence[str]) -> str | None:
        """Return the option before the command's name that only commands have."""
        rest = iter(words)
        for word in rest:
            option, _, value = word.partition("=")
            action = self._option_string_actions.get(option)
            if action is None:
                return option if option in known_options(self) else None
            if action.nargs != 0 and not value:
                next(rest, "")
        return None

    def _first_argument(self, words: Sequence[str]) -> int | None:
        """Return the place of the first word that is no option, nor the value of one, before a `--`."""
        parsers = (self,) if self.verbs is None else (*self.verbs.choices.values(), self)
        options = dict(pair for parser in parsers for pair in parser._option_string_actions.items())
        is_value = False
        for place, word in enumerate(words):
            if not is_value and word == "--":
                return None
            if not is_value and not word.startswith("-"):
                return place
            action = None if is_value else options.get(word)
            is_value = action is not None and action.nargs != 0
        return None

    def format_help(self) -> str:
        """Return the help; of a command with verbs, the usage of both."""
        if self.verbs is not None:
            self.verbs.nargs = argparse.PARSER
            values = [action.metavar for action in self._get_positional_actions() if action is not self.verbs]
            own = " ".join(f"[{value}]" for value in ("OPTION ...", *values))
            self.usage = f"{self.prog} {own}\n       {self.prog} {{{','.join(self.verbs.choices)}}} ..."
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        text = (
            suggest_jq(message)
            or suggest_command(message)
            or suggest_option(self, self._verb_parsers, message)
            or message
        )
        self.exit(exits.USAGE, f"{self.prog}: {text}\nsee {self.prog} --help\n")


class _OutputFormat(argparse.Action):
    """`-o wide` is still a table, `-o csv` its columns; the other formats replace it, as `--json` does."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        match values:
            case "wide":
                namespace.wide = True
            case "csv":
                namespace.is_csv = True
            case _:
                namespace.json = values


class _JqFilter(argparse.Action):
    """`--jq` takes the place of `--json`, whose output it reads."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        import jq  # rolloutctl's start-up counts

        try:
            namespace.jq = jq.compile(values)
        except ValueError as wrong:
            lines = str(wrong).splitlines() or ["it is not a jq program"]
            parser.error(f"argument --jq: {lines[0].removeprefix('jq: error: ')}")


def settle_format(args: argparse.Namespace) -> None:
    """Let --jq read the JSON wherever it stands on the command line; raises Exit with another format."""
    if getattr(args, "jq", None) is None:
        return
    form = "wide" if args.wide else "csv" if args.is_csv else args.json
    if isinstance(form, str) and form != "json":
        problem = f"--jq reads the JSON; leave out -o {form}, or --jq"
        raise exits.Exit(exits.USAGE, f"rolloutctl {args.command}: {problem}")
    args.json = "jq"


class _CommandHelpFormatter(argparse.HelpFormatter):
    """Help with a wrapped description, and examples as they are typed."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class GroupedHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help with headings among the commands; `headings` has the first command under each."""

    def __init__(self, headings: Mapping[str, str], prog: str) -> None:
        super().__init__(prog)
        self._headings = headings

    def _format_action(self, action: argparse.Action) -> str:
        text = super()._format_action(action)
        heading = self._headings.get(action.dest)
        return text if heading is None else f"\n  {heading}:\n{text}"


class CommandGroup:
    """A group of commands; `root_parser` is the parser of the whole command line."""

    def __init__(
        self, subparsers: Any, shared: argparse.ArgumentParser, root_parser: argparse.ArgumentParser
    ) -> None:
        self._subparsers = subparsers
        self._shared = shared
        self.root_parser = root_parser

    def add_command(
        self,
        name: str,
        handler: Handler,
        summary: str,
        *,
        formats: tuple[str, ...] = FORMATS,
        is_local: bool = False,
        is_list: bool = False,
        asks_daemon: bool = True,
    ) -> Parser:
        """Add a command and return its parser; a local one works on this machine, not over the socket.

        A list is printed by Invocation.print_items(), and has options for its table.  A command that asks no
        daemon has none of the options that choose one.
        """
        if is_list:
            formats = LIST_FORMATS
        parser: Parser = self._subparsers.add_parser(
            name,
            help=summary,
            description=_as_sentence(summary),
            epilog=format_examples(name) if self._subparsers.dest == "command" else None,
            formatter_class=_CommandHelpFormatter,
            parents=[self._shared] if asks_daemon and not is_local else [],
        )
        if is_local:
            # Known, so that the error can say what to do; a backup of the wrong machine is no backup.
            parser.add_argument("--host", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        if formats:
            parser.flag("--json", text="print JSON, whose keys are stable")
            parser.add_argument(
                "-o",
                action=_OutputFormat,
                metavar="FORMAT",
                choices=formats,
                help=_HELP_OF_FORMATS.get(formats, ", ".join(formats)),
            )
        if formats and not is_local:
            jq = "print what a jq program makes of the JSON: texts as they are, other results as JSON"
            parser.add_argument("--jq", action=_JqFilter, metavar="PROGRAM", help=jq)
        if is_list:
            parser.argument(
                "--sort-by", metavar="COLUMN", text="order of the rows: a heading, also of -o wide"
            )
            parser.flag("--no-headers", text="print no headings")
        parser.set_defaults(
            handler=handler, wide=False, watch=False, is_local=is_local, is_csv=False, no_headers=False
        )
        return parser

    def add_verbs(self, parser: Parser) -> CommandGroup:
        """Return the group of a command's verbs; add them after the command's own arguments."""
        text = "in place of the arguments above; VERB --help shows its own"
        parser.verbs = parser.add_subparsers(title="verbs", metavar="VERB", prog=parser.prog, help=text)
        return CommandGroup(parser.verbs, self._shared, self.root_parser)

    def add_group(self, name: str, summary: str) -> CommandGroup:
        parser = self._subparsers.add_parser(name, help=summary, description=_as_sentence(summary))
        commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="subcommand")
        return CommandGroup(commands, self._shared, self.root_parser)


def shared_options() -> Parser:
    """Return the options that are allowed before and after a command's name."""
    shared, absent = Parser(add_help=False), argparse.SUPPRESS
    # Absent by default: the default of a subcommand would replace what was given before its name.
    socket = f"the daemon's socket (default: $ROLLOUTD_SOCKET, else {DEFAULT_SOCKET})"
    shared.argument("--socket", metavar="PATH", text=socket, default=absent)
    host = "ssh destination: use that machine's daemon, as your account there (default: $ROLLOUTD_HOST)"
    shared.argument("--host", metavar="HOST", text=host, default=absent)
    context = "the daemon of this context; rolloutctl context list shows them (the one in use)"
    shared.argument("--context", metavar="CONTEXT", text=context, default=absent)
    color = "colour the output (auto: on a terminal; $NO_COLOR, $CLICOLOR and $CLICOLOR_FORCE count)"
    shared.add_argument("--color", choices=tuple(COLOR_CHOICES), help=color, default=absent)
    return shared


def argument_type(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return a parser for argparse, which shows the text of no other ValueError."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as wrong:
            raise argparse.ArgumentTypeError(str(wrong)) from None

    return read


time_argument, past_time_argument = argument_type(user_time.parse_future), argument_type(user_time.parse_past)
duration_argument = argument_type(user_time.parse_duration)


def int_argument(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers from `minimum` to `maximum`, for argparse."""
    limits = f"{minimum} or more" if maximum is None else f"{minimum} to {maximum}"

    def read(text: str) -> int:
        is_number = text.isascii() and text.isdecimal()
        if not is_number or int(text) < minimum or (maximum is not None and int(text) > maximum):
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number, {limits}")
        return int(text)

    return read


def without_none(**fields: Any) -> dict[str, Any]:
    """Return a request body without the missing options."""
    return {name: value for name, value in fields.items() if value is not None}


def is_terminal() -> bool:
    return sys.stdout.isatty()


def is_asked(call: Invocation) -> bool:
    """Return whether a user at a terminal confirms the command."""
    return not call.args.yes and is_terminal() and sys.stdin.isatty()


def confirm(call: Invocation, read_text: Callable[[], str], question: str, *, must_ask: bool = False) -> None:
    """Ask a user at a terminal to confirm what the text says; raises Exit if they decline.

    Without a terminal a script has decided, except for what cannot be undone: `must_ask` then demands --yes.
    """
    if not is_asked(call):
        if must_ask and not call.args.yes:
            raise exits.Exit(
                exits.USAGE, f"rolloutctl {call.args.command}: no terminal to ask at; confirm it with --yes"
            )
        return
    print_message(read_text())
    try:
        answer = input(f"{question} [y/N] ")
    except EOFError:  # Ctrl-D at the prompt
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        raise exits.Exit(exits.REFUSED, "nothing was done")


def _non_blank(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; the audit needs a reason")
    return text


def _non_empty(text: str) -> str:
    """Refuse an empty name, as a script's unset variable gives: in an API path it would be another path."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; name one")
    return text


def _as_sentence(summary: str) -> str:
    return summary[0].upper() + summary[1:] + "."
