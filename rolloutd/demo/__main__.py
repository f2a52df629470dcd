"""`rolloutctl demo`: the arguments, the directory, the signals and the last words of the demo.

Exit status 0 only when every node is done.  How the story goes is in story.py;
what it is played on, in stage.py.
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
from rolloutd.cli.output import put_json_line, say
from rolloutd.control.client import Answer, NoDaemon
from rolloutd.control.wire import Rollout
from rolloutd.demo.audience import Log, Person
from rolloutd.demo.fleet import MAX_NODES
from rolloutd.demo.stage import Stage, staged
from rolloutd.demo.story import FAULTS, Audience, play
from rolloutd.demo.theatre import perform
from rolloutd.errors import RolloutdError

NODES = 12


def main(argv: list[str] | None = None) -> int:
    """Play the demo and return its exit code."""
    chosen = _arguments(argv)
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end)
    try:
        return _play(chosen)
    except exits.Stop as stop:
        say(stop.text)
        return stop.code
    except KeyboardInterrupt:
        say("interrupted; everything that was started has ended")
        return exits.INTERRUPTED
    except (Answer, NoDaemon, RolloutdError, OSError) as wrong:
        say(f"the demo could not go on: {wrong}")
        return exits.NO


def _play(chosen: argparse.Namespace) -> int:
    keep = chosen.dir is not None
    directory = _kept(chosen.dir) if keep else Path(tempfile.mkdtemp(prefix="rolloutd-demo-"))
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with staged(directory.resolve(), nodes=chosen.nodes, keep=keep) as stage:
        if keep:
            _invite(stage)
        opens_console = is_terminal and not (chosen.headless or chosen.plain or chosen.json)
        if opens_console:
            rollout = perform(stage, chosen.fault)
        else:
            rollout = play(stage, _audience(chosen, is_terminal=is_terminal), chosen.fault)
        _conclude(rollout, chosen)
        if keep and is_terminal and not chosen.headless and not opens_console:
            say("the daemon still answers; press Enter to end it")
            sys.stdin.readline()
    return exits.DONE if rollout["state"] == "done" else exits.NO


def _audience(chosen: argparse.Namespace, *, is_terminal: bool) -> Audience:
    asks = is_terminal and not chosen.headless
    if asks or (sys.stdout.isatty() and not chosen.json):
        return Person(asks=asks)
    return Log()


def _invite(stage: Stage) -> None:
    beside = Path(sys.executable).with_name("rolloutctl")
    mine = str(beside) if beside.exists() else f"{sys.executable} -m rolloutd.cli"
    command = "rolloutctl" if shutil.which("rolloutctl") else mine
    say("in another terminal you may ask")
    say(f"  export ROLLOUTD_SOCKET={shlex.quote(str(stage.socket))}")
    for words in ("status", "watch", "locks", "nodes somaxconn", "why somaxconn n5", "audit", "tui"):
        say(f"  {command} {words}")


def _conclude(rollout: Rollout, chosen: argparse.Namespace) -> None:
    if chosen.dir is not None:
        say(f"everything is kept in {chosen.dir}")
    if chosen.json:
        put_json_line(rollout)
    else:
        print(f"{rollout['state']}: {rollout['done']} of {rollout['total']} nodes done")  # noqa: T201


def _kept(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if any(directory.iterdir()):
        raise exits.Stop(exits.USAGE, f"{directory} is not empty; name a directory that is new")
    return directory


def _end(number: int, _frame: object) -> NoReturn:
    # Once is enough: what follows is the way out, which nothing may cut short.
    for other in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="rolloutctl demo", description="Show a rollout on a small fleet of its own.", allow_abbrev=False
    )
    parser.add_argument("--nodes", metavar="N", type=int, default=NODES, help=f"so many nodes ({NODES})")
    parser.add_argument(
        "--fault", metavar="NODE:PHASE", action="append", default=[], help="break a node in a phase"
    )
    parser.add_argument("--headless", action="store_true", help="ask nobody")
    parser.add_argument("--plain", action="store_true", help="bars and questions instead of the console")
    parser.add_argument("--dir", metavar="DIR", type=Path, help="keep everything there")
    parser.add_argument("--json", action="store_true", help="the last line of stdout is the status as JSON")
    chosen = parser.parse_args(argv)
    if not 1 <= chosen.nodes <= MAX_NODES:
        parser.error(f"--nodes: a fleet has 1 to {MAX_NODES} nodes")
    chosen.fault = dict(_fault(parser, text, chosen.nodes) for text in chosen.fault)
    return chosen


def _fault(parser: argparse.ArgumentParser, text: str, nodes: int) -> tuple[str, str]:
    node, _, phase = text.partition(":")
    if phase not in FAULTS:
        parser.error(f"--fault {text}: the phase is one of {', '.join(FAULTS)}, as in n3:maintaining")
    if node not in {f"n{number}" for number in range(1, nodes + 1)}:
        parser.error(f"--fault {text}: the nodes are n1 to n{nodes}")
    return node, phase


if __name__ == "__main__":
    sys.exit(main())
