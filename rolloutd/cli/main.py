"""The entry of rolloutctl: parses, calls, and turns what happens into an exit code.

The only place of the command line that catches errors; a person sees a sentence
and never a traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolloutd import __version__
from rolloutd.cli import (
    console,
    exits,
    holds,
    local,
    plans,
    reading,
    steering,
    teams,
    tokens,
    trail,
    voting,
    watch,
)
from rolloutd.cli.command import Call, Family, Handler, Parser, shared_options
from rolloutd.cli.output import say
from rolloutd.control.client import Answer, Client, NoDaemon, default_socket
from rolloutd.errors import RolloutdError

_EPILOG = """\
exit codes: 0 done; 1 the answer is no; 2 wrong usage; 3 no daemon; 4 not allowed
stdout is data, stderr is narration; every reading command takes --json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    _stand_in_for_closed()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = _run(parser().parse_args(argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return exits.INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes once more when it ends; that must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return exits.BROKEN_PIPE
    return code


def _stand_in_for_closed() -> None:
    """Let what was closed (`>&-`) be /dev/null: what is ordered is done all the same."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  # for as long as we live
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # for as long as we live


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = Parser(
        prog="rolloutctl",
        description="Ask rolloutd what it does and why, and tell it what people decided.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[shared := shared_options()],
    )
    top.add_argument("--version", action="version", version=f"rolloutctl {__version__}")
    family = Family(top.add_subparsers(metavar="COMMAND", required=True, dest="command"), shared, top)
    for module in (plans, reading, watch, voting, steering, holds, teams, tokens, trail, local, console):
        module.register(family)
    return top


def _run(args: argparse.Namespace) -> int:
    try:
        code = _called(args)
    except exits.Stop as stop:
        if stop.text:
            say(stop.text)
        return stop.code
    except NoDaemon as none:
        return _explain_silence(none)
    except Answer as answer:
        return _explain(answer)
    except RolloutdError as wrong:
        say(str(wrong))
        return exits.NO
    except OSError as wrong:
        if isinstance(wrong, BrokenPipeError):
            raise
        say(f"{wrong.filename or args.command}: {wrong.strerror or wrong}")
        return exits.NO
    return code


def _called(args: argparse.Namespace) -> int:
    handler: Handler = args.handler
    path, host = getattr(args, "socket", None), getattr(args, "host", None)
    if host is None or getattr(args, "reaches_by_itself", False):
        return handler(Call(args, Client(path)))
    from rolloutd.cli.tunnel import tunnel

    with tunnel(host, path or default_socket()) as here:
        return handler(Call(args, Client(here)))


def _explain_silence(none: NoDaemon) -> int:
    if isinstance(none.__cause__, PermissionError):
        say(f"{none}\nyou may not open that socket; its group may")
        return exits.NOT_ALLOWED
    say(f"{none}\nis rolloutd running (systemctl status rolloutd)? --socket names another socket")
    return exits.NO_DAEMON


def _explain(answer: Answer) -> int:
    body: Any = answer.body
    say(str(body.get("error") or f"the daemon answered {answer.status}"))
    return exits.of_status(answer.status)
