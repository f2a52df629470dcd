"""Commands that run other programs: demo, admin commands, console; and shell completion.

Those programs need libraries that rolloutctl does not load, because its start-up counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from functools import partial
from typing import NoReturn

from rolloutd.cli import exits
from rolloutd.cli.command_group import SHELLS, CommandGroup, Invocation, int_argument
from rolloutd.cli.output import print_line, sanitize
from rolloutd.cli.programs import environment, module_command
from rolloutd.control.client import api_path

NAME_KINDS = ("rollouts", "nodes", "teams", "pools")

_PREAMBLES = {
    "bash": '_rolloutctl_{kind}() {{ compgen -W "$(rolloutctl names {kind} 2>/dev/null)" -- "$1"; }}\n',
    "zsh": (
        "_rolloutctl_{kind}() {{ local -a names;"
        ' names=(${{(f)"$(rolloutctl names {kind} 2>/dev/null)"}}); compadd -a names }}\n'
    ),
    "fish": "function _rolloutctl_{kind}; rolloutctl names {kind} 2>/dev/null; end\n",
}
"""A function for each kind of name, in each shell: shells ask the daemon when they complete."""


def register(commands: CommandGroup) -> None:
    parser = commands.add_command("demo", demo, "show a rollout on an embedded fleet")
    parser.add_argument("--nodes", metavar="N", type=int, help="number of nodes (12)")
    parser.add_argument(
        "--fault",
        metavar="NODE:PHASE",
        action="append",
        help="break a node while isolating, maintaining or verifying (repeatable)",
    )
    parser.add_argument("--headless", action="store_true", help="answer every question with yes")
    parser.add_argument("--plain", action="store_true", help="show bars and questions instead of the console")
    parser.add_argument("--dir", metavar="DIR", help="keep all files there, to inspect from another terminal")
    for name, summary, file_help in (
        ("doctor", "check dependencies and suggest fixes", ""),
        ("backup", "copy the daemon's database; it may be running", "file to write; replaced if it exists"),
        ("restore", "restore a backup; the daemon must be stopped", "a file that `rolloutctl backup` wrote"),
    ):
        parser = commands.add_command(name, run_admin_command, summary)
        parser.add_argument("--config", metavar="FILE", help="the daemon's settings (its default)")
        if file_help:
            parser.add_argument("file", metavar="FILE", help=file_help)
    parser = commands.add_command("names", names, "print the names that completion offers", json=False)
    parser.add_argument("kind", metavar="KIND", choices=NAME_KINDS, help=", ".join(NAME_KINDS))
    complete = partial(completion, commands.root_parser)
    parser = commands.add_command("completion", complete, "print shell completion", json=False)
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help="bash, zsh or fish")
    _register_console(commands)
    parser = commands.add_command(
        "serve-status", serve_status, "serve the rollouts' pages, read-only, on a loopback port", json=False
    )
    parser.add_argument("--port", metavar="N", type=int_argument(0), default=0, help="port (any free one)")


def _register_console(commands: CommandGroup) -> None:
    tui_parser = commands.add_command("tui", tui, "open the console, to watch and to decide", json=False)
    tui_parser.set_defaults(opens_own_tunnel=True)
    web_parser = commands.add_command("web", web, "serve the console to a browser", json=False)
    for parser in (tui_parser, web_parser):
        parser.add_argument("--theme", choices=("dark", "light"), help="colour theme (as the terminal)")
        parser.add_argument("--ascii", action="store_true", help="use only ASCII characters")
        parser.add_argument("--still", action="store_true", help="disable animations")
    tui_parser.add_argument("--no-mouse", action="store_true", help="leave the mouse to the terminal")
    web_parser.add_argument(
        "--port", metavar="N", type=int, default=0, help="port of 127.0.0.1 (any free one)"
    )


def demo(call: Invocation) -> NoReturn:
    args = call.args
    arguments = ["--nodes", str(args.nodes)] if args.nodes is not None else []
    for fault in args.fault or ():
        arguments += ["--fault", fault]
    arguments += ["--dir", args.dir] if args.dir is not None else []
    arguments += [f"--{name}" for name in ("headless", "json", "plain") if getattr(args, name)]
    _exec_module("rolloutd.demo", arguments)


def run_admin_command(call: Invocation) -> NoReturn:
    """Run doctor, backup or restore."""
    args = call.args
    arguments = [args.command, *(["--config", args.config] if args.config is not None else [])]
    arguments += ["--json"] if args.json else []
    arguments += [f"--file={args.file}"] if hasattr(args, "file") else []
    _exec_module("rolloutd.admin", arguments)


def tui(call: Invocation) -> int:
    """Open the console; with --host, at the other end of a tunnel."""
    args = call.args
    arguments = [*_display_options(args), *(["--no-mouse"] if args.no_mouse else [])]
    host: str | None = getattr(args, "host", None)
    if host is None:
        _exec_module("tui", ["--socket", call.client.path, *arguments])
    from rolloutd.cli.tunnel import open_tunnel

    with open_tunnel(host, call.client.path) as socket:
        console = [*module_command("tui"), "--socket", str(socket), "--reach", host, *arguments]
        return subprocess.call(console, env=environment())


def web(call: Invocation) -> NoReturn:
    """Serve the console to a browser."""
    options = ["--web", "--port", str(call.args.port), *_display_options(call.args)]
    _exec_module("tui", ["--socket", call.client.path, *options])


def serve_status(call: Invocation) -> int:
    """Serve the pages of rollouts until interrupted."""
    from rolloutd.cli.status_server import serve

    serve(call.client, call.args.port)
    return exits.OK


def completion(root_parser: argparse.ArgumentParser, call: Invocation) -> int:
    """Print a completion script of the whole command line."""
    import shtab

    shell = call.args.shell
    preamble = "".join(_PREAMBLES[shell].format(kind=kind) for kind in NAME_KINDS)
    print_line(shtab.complete(root_parser, shell, preamble=preamble))
    return exits.OK


def names(call: Invocation) -> int:
    """Print the names of one kind, one per line."""
    match call.args.kind:
        case "rollouts":
            lines = call.get(api_path("rollouts"))["rollouts"]
            found = [name for each in lines for name in (each["rollout"], each["plan"])]
        case "pools":
            found = [lock["pool"] for lock in call.get(api_path("locks"))["pools"]]
        case kind:
            key = "node" if kind == "nodes" else "team"
            found = [node[key] or "" for node in call.get(api_path("inventory"))["nodes"]]
    for name in dict.fromkeys(filter(None, found)):
        print_line(sanitize(name))
    return exits.OK


def _display_options(args: argparse.Namespace) -> list[str]:
    theme = ["--theme", args.theme] if args.theme is not None else []
    return [*theme, *(f"--{name}" for name in ("ascii", "still") if getattr(args, name))]


def _exec_module(module: str, arguments: list[str]) -> NoReturn:
    """Become another program of rolloutd, in the same process, so that signals reach it."""
    sys.stdout.flush()
    os.execve(sys.executable, [*module_command(module), *arguments], environment())  # noqa: S606
