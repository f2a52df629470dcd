"""Commands that ask no daemon: the demo, upkeep, and completion for shells.

The demo and upkeep (doctor, backup, restore) are programs of their own: they
need the daemon's libraries, which this one must not load.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

import rolloutd
from rolloutd.cli import exits
from rolloutd.cli.command import Call, Family
from rolloutd.cli.output import put

SHELLS = ("bash", "zsh")


def register(family: Family) -> None:
    """Add the commands of this family."""
    parser = family.command("demo", demo, "show a rollout on a small fleet of its own")
    parser.add_argument("--nodes", metavar="N", type=int, help="so many nodes (12)")
    parser.add_argument(
        "--fault",
        metavar="NODE:PHASE",
        action="append",
        help="break it while isolating, maintaining or verifying",
    )
    parser.add_argument(
        "--headless", action="store_true", help="ask nobody: the demo votes itself, and says so"
    )
    parser.add_argument(
        "--plain", action="store_true", help="on a terminal, bars and questions instead of the console"
    )
    parser.add_argument("--dir", metavar="DIR", help="keep everything there, for another terminal to look at")
    parser = family.command("doctor", doctor, "examine all that the daemon stands on, and say what to do")
    _add_config(parser)
    parser = family.command("backup", backup, "copy the daemon's database, also while it runs")
    parser.add_argument("file", metavar="FILE", help="the copy; replaced when it is there")
    _add_config(parser)
    parser = family.command("restore", restore, "put a copy back; the daemon must be stopped")
    parser.add_argument("file", metavar="FILE", help="a copy that `rolloutctl backup` made")
    _add_config(parser)
    complete = partial(completion, family.whole)
    parser = family.command("completion", complete, "print completion for your shell", json=False)
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash or zsh")


def demo(call: Call) -> NoReturn:
    """Become the demo."""
    args = call.args
    words = ["--nodes", str(args.nodes)] if args.nodes is not None else []
    for fault in args.fault or ():
        words += ["--fault", fault]
    words += ["--dir", args.dir] if args.dir is not None else []
    words += [f"--{name}" for name in ("headless", "json", "plain") if getattr(args, name)]
    _become("rolloutd.demo", words)


def doctor(call: Call) -> NoReturn:
    """Become the doctor."""
    _become("rolloutd.upkeep", ["doctor", *_shared_words(call)])


def backup(call: Call) -> NoReturn:
    """Become the backup."""
    _become("rolloutd.upkeep", ["backup", *_shared_words(call), f"--file={call.args.file}"])


def restore(call: Call) -> NoReturn:
    """Become the restore."""
    _become("rolloutd.upkeep", ["restore", *_shared_words(call), f"--file={call.args.file}"])


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="the daemon's settings (its own default)")


def _shared_words(call: Call) -> list[str]:
    config = ["--config", call.args.config] if call.args.config is not None else []
    return [*config, *(["--json"] if call.args.json else [])]


def _become(module: str, words: list[str]) -> NoReturn:
    """Go on as another program of ours, in the same process, so that a signal meant for it reaches it."""
    sys.stdout.flush()
    # Not the current directory but where we were found is searched for modules.
    places = [str(Path(rolloutd.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "PYTHONDONTWRITEBYTECODE": "1"}
    os.execve(sys.executable, [sys.executable, "-P", "-m", module, *words], environment)  # noqa: S606


def completion(whole: argparse.ArgumentParser, call: Call) -> int:
    """Print a completion script of the whole command line."""
    import shtab

    put(shtab.complete(whole, call.args.shell))
    return exits.DONE
