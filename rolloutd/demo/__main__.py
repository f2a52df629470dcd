"""`rolloutctl demo`: arguments, directory, signals and result of the demo.

The exit code is 0 if every node is done, or a user has quit the console.  The sequence of the demo is in
scenario.py, its fleet and daemon are in environment.py.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from rolloutd.cli import exits
from rolloutd.cli.output import print_message, print_now, to_json
from rolloutd.control.client import ApiError, DaemonUnreachable
from rolloutd.control.rollouts.wire import Rollout
from rolloutd.demo.environment import DemoEnvironment, demo_environment
from rolloutd.demo.fleet import MAX_NODES
from rolloutd.demo.scenario import FAULTS, DemoUi, run
from rolloutd.demo.ui import LogUi, TerminalUi, run_console
from rolloutd.errors import RolloutdError
from rolloutd.texts.formats import pluralize

DEFAULT_NODES = 12


def main(argv: list[str] | None = None) -> int:
    args = _parse_arguments(argv)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    signal.signal(signal.SIGHUP, _exit_on_signal)
    try:
        return _run_demo(args)
    except exits.Exit as stop:
        print_message(stop.text)
        return stop.code
    except KeyboardInterrupt:
        print_message("interrupted; all processes of the demo have ended")
        return exits.INTERRUPTED
    except (ApiError, DaemonUnreachable, RolloutdError, OSError) as wrong:
        print_message(f"the demo: stopped by an error: {wrong}")
        return exits.REFUSED


def _run_demo(args: argparse.Namespace) -> int:
    keep = args.dir is not None
    directory = _create_directory(args.dir) if keep else Path(tempfile.mkdtemp(prefix="rolloutd-demo-"))
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    print_message(f"starting {pluralize(args.nodes, 'node')} and the daemon in {directory}")
    with demo_environment(directory.resolve(), nodes=args.nodes, keep=keep) as demo:
        if keep:
            _print_hints(demo)
        opens_console = is_terminal and not (args.headless or args.plain or args.json)
        if opens_console:
            rollout = run_console(demo, args.fault)
            # Quitting the console in the middle is not a failure, and `make` would print it as one.
            is_ok = True
        else:
            rollout = run(demo, _create_ui(args, is_terminal=is_terminal), args.fault)
            is_ok = rollout["state"] == "done"
        _print_result(rollout, args)
        if keep and is_terminal and not args.headless and not opens_console:
            print_message("the daemon still runs; press Enter to end it")
            sys.stdin.readline()
    return exits.OK if is_ok else exits.REFUSED


def _create_ui(args: argparse.Namespace, *, is_terminal: bool) -> DemoUi:
    interactive = is_terminal and not args.headless
    if interactive or (sys.stdout.isatty() and not args.json):
        return TerminalUi(interactive=interactive)
    return LogUi()


def _print_hints(demo: DemoEnvironment) -> None:
    installed = Path(sys.executable).with_name("rolloutctl")
    fallback = str(installed) if installed.exists() else f"{sys.executable} -m rolloutd.cli"
    command = "rolloutctl" if shutil.which("rolloutctl") else fallback
    print_message("commands for another terminal:")
    print_message(f"  export ROLLOUTD_SOCKET={shlex.quote(str(demo.socket))}")
    # n1 is in each demo, of whatever size.
    for words in ("status", "watch", "locks", "nodes somaxconn", "why somaxconn n1", "audit", "tui"):
        print_message(f"  {command} {words}")


def _print_result(rollout: Rollout, args: argparse.Namespace) -> None:
    if args.dir is not None:
        print_message(f"files of the demo: {args.dir}")
    if args.json:
        print_now(to_json(rollout))
    else:
        print(f"{rollout['state']}: {rollout['done']} of {rollout['total']} nodes done")  # noqa: T201


def _create_directory(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if any(directory.iterdir()):
        raise exits.Exit(exits.USAGE, f"{directory}: not empty; name a new directory")
    return directory


def _exit_on_signal(number: int, _frame: object) -> NoReturn:
    # One signal is enough: another must not interrupt the cleanup.
    for other in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="rolloutctl demo", description="Show a rollout on a small fleet of its own.", allow_abbrev=False
    )
    parser.add_argument(
        "--nodes", metavar="N", type=int, default=DEFAULT_NODES, help=f"number of nodes ({DEFAULT_NODES})"
    )
    parser.add_argument(
        "--fault",
        metavar="NODE:PHASE",
        action="append",
        default=[],
        help="break a node while isolating, maintaining or verifying (repeatable)",
    )
    parser.add_argument("--headless", action="store_true", help="answer every question with yes")
    parser.add_argument("--plain", action="store_true", help="show bars and questions instead of the console")
    parser.add_argument(
        "--dir", metavar="DIR", type=Path, help="keep all files there, to inspect from another terminal"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the final status as JSON on the last line of stdout"
    )
    chosen = parser.parse_args(argv)
    if not 1 <= chosen.nodes <= MAX_NODES:
        parser.error(f"--nodes: out of range; use 1 to {MAX_NODES}")
    chosen.fault = dict(_parse_fault(parser, text, chosen.nodes) for text in chosen.fault)
    return chosen


def _parse_fault(parser: argparse.ArgumentParser, text: str, nodes: int) -> tuple[str, str]:
    node, _, phase = text.partition(":")
    if phase not in FAULTS:
        parser.error(f"--fault {text}: unknown phase; use {', '.join(FAULTS)}, as in n3:maintaining")
    if node not in {f"n{number}" for number in range(1, nodes + 1)}:
        parser.error(f"--fault {text}: no such node; use n1 to n{nodes}")
    return node, phase


if __name__ == "__main__":
    sys.exit(main())
