"""Commands that run other programs (demo, admin commands, the console), or make pages of rollouts.

They need libraries that rolloutctl does not load, because its start-up counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import rolloutd
from rolloutd.cli import exits
from rolloutd.cli.command_group import CommandGroup, Invocation, int_argument
from rolloutd.cli.contexts import destination
from rolloutd.cli.output import print_line
from rolloutd.control.client import DEFAULT_SOCKET


def register(commands: CommandGroup) -> None:
    summary = "run a rollout on a small fleet that this command starts on this machine"
    parser = commands.add_command("demo", demo, summary, formats=("json",), is_local=True)
    parser.argument("--nodes", metavar="N", text="number of nodes (12)", type=int_argument(1))
    fault = "break a node while isolating, maintaining or verifying (repeatable)"
    parser.argument("--fault", metavar="NODE:PHASE", text=fault, action="append")
    parser.flag("--headless", text="run without a terminal, and answer every question with yes")
    parser.flag("--plain", text="show bars and questions instead of the console")
    parser.argument("--dir", metavar="DIR", text="keep all files there (a temporary directory)")
    for name, summary, file_help in (
        ("doctor", "check dependencies and suggest fixes", ""),
        ("backup", "copy the daemon's database; it may be running", "file to write; replaced if it exists"),
        ("restore", "restore a backup; the daemon must be stopped", "a file that `rolloutctl backup` wrote"),
    ):
        parser = commands.add_command(name, run_admin_command, summary, formats=("json",), is_local=True)
        config = "the daemon's settings file (/etc/rolloutd/config.yaml)"
        parser.argument("--config", metavar="FILE", text=config)
        if file_help:
            parser.argument("file", metavar="FILE", text=file_help)
    _register_console(commands)
    commands.add_command("report", report, "print a rollout as one HTML page", formats=()).rollout()


def _register_console(commands: CommandGroup) -> None:
    summary = "open the console in this terminal: watch rollouts, vote and act"
    tui_parser = commands.add_command("tui", run_console, summary, formats=())
    summary = "serve the console to a browser on this machine"
    web_parser = commands.add_command("web", run_console, summary, formats=())
    for parser in (tui_parser, web_parser):
        parser.set_defaults(opens_own_tunnel=True)
        parser.add_argument("--theme", choices=("dark", "light"), help="colour theme (as the terminal)")
        parser.flag("--ascii", text="use only ASCII characters").flag("--still", text="disable animations")
    tui_parser.flag("--no-mouse", text="leave the mouse to the terminal")
    port = "port of 127.0.0.1 (any free one)"
    web_parser.argument("--port", metavar="N", text=port, type=int_argument(0, 65535), default=0)


def demo(call: Invocation) -> NoReturn:
    args = call.args
    arguments = ["--nodes", str(args.nodes)] if args.nodes is not None else []
    for fault in args.fault or ():
        arguments += ["--fault", fault]
    arguments += ["--dir", args.dir] if args.dir is not None else []
    arguments += [f"--{name}" for name in ("headless", "json", "plain") if getattr(args, name)]
    exec_module("rolloutd.demo", arguments)


def run_admin_command(call: Invocation) -> NoReturn:
    args = call.args
    arguments = [args.command, *(["--config", args.config] if args.config is not None else [])]
    arguments += ["--json"] if args.json else []
    arguments += [f"--file={args.file}"] if hasattr(args, "file") else []
    exec_module("rolloutd.admin", arguments)


def run_console(call: Invocation) -> int:
    """Become the console or its web server; with --host, run it at a tunnel's end, which ends with it."""
    args = call.args
    if args.command == "web":
        options = ["--web", "--port", str(args.port)]
    else:
        options = ["--no-mouse"] if args.no_mouse else []
    theme = ["--theme", args.theme] if args.theme is not None else []
    arguments = [*theme, *(f"--{name}" for name in ("ascii", "still") if getattr(args, name)), *options]
    chosen = destination(args)
    if chosen.host is None:
        exec_module("tui", ["--socket", call.client.path, *arguments])
    from rolloutd.cli.tunnel import open_tunnel

    with open_tunnel(chosen.host, chosen.socket or DEFAULT_SOCKET) as socket:
        console = [*module_command("tui"), "--socket", str(socket), "--reach", chosen.host, *arguments]
        return subprocess.call(console, env=environment())


def report(call: Invocation) -> None:
    from rolloutd.cli.report import render_rollout

    print_line(render_rollout(call.client, call.args.rollout))


def exec_module(module: str, arguments: list[str]) -> NoReturn:
    """Become another program of rolloutd, in the same process, so that signals reach it."""
    sys.stdout.flush()
    os.execve(sys.executable, [*module_command(module), *arguments], environment())  # noqa: S606


def run_admin_query(arguments: list[str]) -> dict[str, Any]:
    """Return the JSON that an admin command prints; raises Exit with its exit code if it prints none."""
    command = [*module_command("rolloutd.admin"), *arguments]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if not result.stdout:
        raise exits.Exit(result.returncode, result.stderr.strip())
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def module_command(module: str) -> list[str]:
    # -P: a file of the current directory must not replace a module.
    return [sys.executable, "-P", "-m", module]


def environment() -> Mapping[str, str]:
    """Return an environment that imports this installation's modules, not the current directory's."""
    search_path = [str(Path(rolloutd.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(search_path), "PYTHONDONTWRITEBYTECODE": "1"}
