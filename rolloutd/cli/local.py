"""Commands that ask no daemon: the demo, and completion for shells.

The demo is a program of its own: it needs the daemon's and the fleet's
libraries, which this one must not load.
"""

from __future__ import annotations

import os
import sys
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
    parser.add_argument("--dir", metavar="DIR", help="keep everything there, for another terminal to look at")
    parser = family.command("completion", completion, "print completion for your shell", json=False)
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash or zsh")


def demo(call: Call) -> NoReturn:
    """Become the demo."""
    args = call.args
    words = ["--nodes", str(args.nodes)] if args.nodes is not None else []
    for fault in args.fault or ():
        words += ["--fault", fault]
    words += ["--dir", args.dir] if args.dir is not None else []
    words += [f"--{name}" for name in ("headless", "json") if getattr(args, name)]
    sys.stdout.flush()
    # Not the current directory but where we were found is searched for modules.
    places = [str(Path(rolloutd.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "PYTHONDONTWRITEBYTECODE": "1"}
    # The same process goes on as the demo, so that a signal meant for it reaches it.
    os.execve(sys.executable, [sys.executable, "-P", "-m", "rolloutd.demo", *words], environment)  # noqa: S606


def completion(call: Call) -> int:
    """Print a completion script."""
    import shtab

    from rolloutd.cli.main import parser

    put(shtab.complete(parser(), call.args.shell))
    return exits.DONE
