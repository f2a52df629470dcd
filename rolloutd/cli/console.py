"""Commands that become the console: in this terminal, on another machine's daemon, or in a browser.

The console is a program of its own, with libraries that this one must not load.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rolloutd
from rolloutd.cli import exits
from rolloutd.cli.command import Call, Family
from rolloutd.cli.tunnel import tunnel


def register(family: Family) -> None:
    """Add the commands of this family."""
    parser = family.command("tui", tui, "open the console: see everything, and decide there", json=False)
    parser.set_defaults(reaches_by_itself=True)
    _add_looks(parser)
    parser.add_argument("--no-mouse", action="store_true", help="leave the mouse to the terminal")
    parser = family.command("web", web, "serve the console to a browser on this machine", json=False)
    parser.add_argument(
        "--port", metavar="N", type=int, default=0, help="of 127.0.0.1 (default: any that is free)"
    )
    _add_looks(parser)


def tui(call: Call) -> int:
    """Become the console; with --host, run it on the other end of a tunnel."""
    args = call.args
    words = [*_looks(args), *(["--no-mouse"] if args.no_mouse else [])]
    host: str | None = getattr(args, "host", None)
    if host is None:
        _become(["--socket", call.client.path, *words])
        return exits.DONE
    with tunnel(host, call.client.path) as socket:
        command = [*_command(), "--socket", str(socket), "--reach", host, *words]
        return subprocess.call(command, env=_environment())


def web(call: Call) -> int:
    """Become the server of the console."""
    _become(["--socket", call.client.path, "--web", "--port", str(call.args.port), *_looks(call.args)])
    return exits.DONE


def _add_looks(parser: Any) -> None:
    parser.add_argument("--theme", choices=("dark", "light"), help="default: as the terminal's background")
    parser.add_argument("--ascii", action="store_true", help="no glyphs beyond ASCII")
    parser.add_argument("--still", action="store_true", help="nothing on the screen glides or fades")


def _looks(args: Any) -> list[str]:
    theme = ["--theme", args.theme] if args.theme is not None else []
    return [*theme, *(f"--{name}" for name in ("ascii", "still") if getattr(args, name))]


def _become(words: list[str]) -> None:
    sys.stdout.flush()
    os.execve(sys.executable, [*_command(), *words], _environment())  # noqa: S606


def _command() -> list[str]:
    return [sys.executable, "-P", "-m", "tui"]


def _environment() -> Mapping[str, str]:
    """Return an environment in which modules are searched where we were found, and not where we are."""
    places = [str(Path(rolloutd.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
