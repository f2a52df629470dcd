"""The entry point of rolloutctl: parse, run, and return an exit code.

Only this module catches errors, so that users see a sentence and no traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

from rolloutd import __version__
from rolloutd.cli import (
    artifacts,
    audit,
    completion,
    configuration,
    contexts,
    exits,
    field_help,
    forecast,
    handover,
    holds,
    inventory,
    leadership,
    local,
    plans,
    rollout_actions,
    setup,
    status,
    trains,
    voting,
    watch,
    why,
)
from rolloutd.cli.command_group import (
    COLOR_CHOICES,
    CommandGroup,
    GroupedHelpFormatter,
    Handler,
    Invocation,
    Parser,
    settle_format,
    shared_options,
)
from rolloutd.cli.output import OutputStyle, print_message, set_style
from rolloutd.cli.watch import repeat_on_change
from rolloutd.control.client import DEFAULT_SOCKET, ApiError, Client, DaemonUnreachable
from rolloutd.errors import RolloutdError

_COMMANDS = {
    "plans and preparation": (plans, artifacts, field_help),
    "progress": (status, why, watch, forecast, handover, configuration),
    "votes": (voting,),
    "rollouts and nodes": (rollout_actions, trains),
    "fleet": (inventory, holds, leadership),
    "audit": (audit,),
    "this machine": (setup, local, contexts, completion),
}
"""The modules with commands, under the headings and in the order of the help."""

_DESCRIPTION = """\
Show what rolloutd does and why, and control it.

A plan describes one change.  Submitting it opens a rollout, which changes the
plan's nodes in waves, the canaries first.  At a gate the rollout waits for
people's votes.  A pool limits how many of its nodes may be out of service at
once: each of these takes a slot.  A hold takes a node's slots for other work;
a freeze prevents nodes from starting.
"""

_EPILOG = """\
exit codes: 0 done; 1 refused; 2 wrong usage; 3 no daemon; 4 not allowed
stdout is data, stderr is messages; every reading command takes --json
"""


def main(argv: Sequence[str] | None = None) -> int:
    _reopen_closed_streams()
    # A name that the terminal's encoding lacks must not end a command with a traceback.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = _run(parser().parse_args(argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes stdout again at exit, which must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.BROKEN_PIPE
    return code


def _reopen_closed_streams() -> None:
    """Open /dev/null for closed streams (`>&-`), so that the command still runs."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # open until exit
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # open until exit


@cache
def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line, which takes 40 ms to make."""
    headings: dict[str, str] = {}
    top = Parser(
        prog="rolloutctl",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=partial(GroupedHelpFormatter, headings),
        parents=[shared := shared_options()],
    )
    top.add_argument("--version", action="version", version=f"rolloutctl {__version__}")
    subparsers = top.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="command")
    commands = CommandGroup(subparsers, shared, top)
    for heading, modules in _COMMANDS.items():
        registered = len(subparsers.choices)
        for module in modules:
            module.register(commands)
        headings[list(subparsers.choices)[registered]] = heading
    help_parser = commands.add_command("help", partial(_help, top), "show help for a command", formats=())
    help_parser.add_argument("words", metavar="COMMAND", nargs="*", help="the command, such as plan submit")
    return top


def _help(top: Parser, call: Invocation) -> int:
    """Print the help of a command as --help does."""
    top.parse_args([*call.args.words, "--help"])
    return exits.OK


def _run(args: argparse.Namespace) -> int:
    try:
        return _dispatch(args)
    except exits.Exit as stop:
        if stop.text:
            print_message(stop.text)
        return stop.code
    except DaemonUnreachable as unreachable:
        return _report_unreachable(unreachable)
    except ApiError as error:
        print_message(str(error))
        return exits.from_status(error.status)
    except RolloutdError as wrong:
        print_message(str(wrong))
        return exits.REFUSED
    except OSError as wrong:
        if isinstance(wrong, BrokenPipeError):
            raise
        problem = (wrong.strerror or str(wrong)).lower()
        print_message(f"{wrong.filename or args.command}: {problem}; check the path and its permissions")
        return exits.REFUSED


def _dispatch(args: argparse.Namespace) -> int:
    handler: Handler = args.handler
    settle_format(args)
    color = COLOR_CHOICES[getattr(args, "color", "auto")]
    set_style(OutputStyle(color, has_headings=not args.no_headers))
    if args.is_local:
        _require_this_machine(args)
    if getattr(args, "watch", False):
        handler = partial(repeat_on_change, handler)
    with ExitStack() as stack:
        return handler(Invocation(args, partial(_connect, args, stack))) or exits.OK


def _require_this_machine(args: argparse.Namespace) -> None:
    """Refuse a command of this machine that names another; a context or a variable is only not used."""
    command = f"rolloutctl {args.command}"
    for option in ("host", "context"):
        if (other := getattr(args, option, None)) is not None:
            problem = f"it works on this machine, not on {other}; log in there and run it"
            raise exits.Exit(exits.USAGE, f"{command}: {problem}")
    unused = contexts.destination(args)
    if unused.host is not None:
        print_message(f"{command}: for this machine, not for {unused.host} of {unused.origin}")


def _connect(args: argparse.Namespace, stack: ExitStack) -> Client:
    """Return the client of the daemon that the command is for; a tunnel to it ends with the stack."""
    chosen = contexts.destination(args)
    if chosen.host is None or getattr(args, "opens_own_tunnel", False):
        return Client(chosen.socket, on_silence=print_message)
    from rolloutd.cli.tunnel import open_tunnel

    tunnel = stack.enter_context(open_tunnel(chosen.host, chosen.socket or DEFAULT_SOCKET))
    return Client(tunnel, on_silence=print_message)


def _report_unreachable(error: DaemonUnreachable) -> int:
    if isinstance(error.__cause__, PermissionError):
        print_message(f"{error}\nonly the socket's group may open it; ask to join that group")
        return exits.NOT_ALLOWED
    print_message(f"{error}\ncheck systemctl status rolloutd, or name another socket with --socket")
    return exits.NO_DAEMON
