"""Contexts: names for daemons of other machines, kept in a file of the user.

A context is an ssh destination and, where it is unusual, the socket there.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rolloutd.cli import exits
from rolloutd.cli.command_group import CommandGroup, Invocation
from rolloutd.cli.output import Columns, print_line, print_message, sanitize
from rolloutd.control.client import default_socket_path
from rolloutd.texts.formats import suggest_name

LOCAL: Final = "local"
"""The name of this machine's daemon, which needs no entry."""

MAX_FILE_BYTES = 1024 * 1024
"""Of the file of contexts: thousands of them."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class Destination:
    """A daemon: `host` None is this machine, `socket` None the usual one; `origin` says who chose it."""

    host: str | None = None
    socket: str | None = None
    origin: str = ""


def register(commands: CommandGroup) -> None:
    group = commands.add_group("context", "name the daemons of other machines, and choose one")
    group.add_command("list", list_contexts, "list the contexts", is_list=True)
    parser = group.add_command("add", add, "add or change a context", formats=(), asks_daemon=False)
    parser.argument("name", metavar="NAME", text="letters, digits, and . _ -", type=_name_argument)
    parser.argument("--socket", metavar="PATH", text="the daemon's socket there (as on this machine)")
    parser.argument("--host", metavar="HOST", text="ssh destination", required=True)
    for verb, handler, summary in (
        ("use", use, f"use a context from now on; {LOCAL} is this machine"),
        ("remove", remove, "remove a context"),
    ):
        parser = group.add_command(verb, handler, summary, formats=())
        parser.argument("name", metavar="CONTEXT", text="the context's name")


def destination(args: Namespace) -> Destination:
    """Return the daemon that a command is for: its options, else the environment, else the current context.

    Raises Exit for an unknown context.
    """
    host, socket = getattr(args, "host", None), getattr(args, "socket", None)
    name = getattr(args, "context", None)
    if name is not None:
        if host is not None or socket is not None:
            raise exits.Exit(exits.USAGE, "--context: it names host and socket; leave these out")
        return _named(_read(), name)
    if host is None and socket is None and os.environ.get("ROLLOUTD_HOST"):
        host = os.environ["ROLLOUTD_HOST"]
        return Destination(host, default_socket_path(), "$ROLLOUTD_HOST")
    if host is not None or socket is not None:
        return Destination(host, socket or default_socket_path(), "--host")
    if os.environ.get("ROLLOUTD_SOCKET"):
        return Destination()
    stored = _read()
    current = stored.get("current")
    return Destination() if current is None else _named(stored, str(current))


def context_names() -> list[str]:
    return [LOCAL, *sorted(_read()["contexts"])]


def list_contexts(call: Invocation) -> None:
    stored = _read()
    current = stored.get("current") or LOCAL
    contexts: Mapping[str, Any] = {LOCAL: {}, **stored["contexts"]}
    rows = [
        {"context": name, "current": name == current, "host": each.get("host"), "socket": each.get("socket")}
        for name, each in contexts.items()
    ]
    if not call.print_data({"contexts": rows}, contexts):
        call.print_items(_COLUMNS, rows)


_COLUMNS: Columns = {
    "CURRENT": lambda each: "*" if each["current"] else "",
    "CONTEXT": "context",
    "HOST": "host",
    "SOCKET": "socket",
}


def add(call: Invocation) -> None:
    args, stored = call.args, _read()
    if args.host.startswith("-"):  # ssh would take it for an option
        raise exits.Exit(exits.USAGE, f"rolloutctl context add: '{args.host}' is not a host; name one")
    entry = {"host": args.host, **({"socket": args.socket} if getattr(args, "socket", None) else {})}
    _write({**stored, "contexts": {**stored["contexts"], args.name: entry}})
    before = stored["contexts"].get(args.name)
    if before is not None:
        print_message(f"{args.name}: {before['host']} is replaced by {args.host}")
        return
    print_message(
        f"{args.name}: added; use it with rolloutctl context use {args.name}, or --context {args.name}"
    )


def use(call: Invocation) -> None:
    name, stored = call.args.name, _read()
    chosen = _named(stored, name)
    _write({**stored, "current": None if name == LOCAL else name})
    print_line(sanitize(f"{name}: {chosen.host or 'this machine'}"))


def remove(call: Invocation) -> None:
    """Remove a context; this machine's daemon is then the current one if it was."""
    name, stored = call.args.name, _read()
    if name == LOCAL:
        raise exits.Exit(exits.USAGE, f"rolloutctl context remove: {LOCAL} is this machine; it stays")
    _named(stored, name)
    kept = {key: value for key, value in stored["contexts"].items() if key != name}
    _write({"current": None if stored.get("current") == name else stored.get("current"), "contexts": kept})
    print_message(f"{name}: removed")


def _named(stored: Mapping[str, Any], name: str) -> Destination:
    if name == LOCAL:
        return Destination()
    entry = stored["contexts"].get(name)
    if entry is None:
        action = suggest_name(name, stored["contexts"], "see rolloutctl context list")
        raise exits.Exit(exits.USAGE, f"context {name}: unknown; {action}")
    return Destination(entry.get("host"), entry.get("socket"), f"context {name}")


def _path() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "rolloutd" / "contexts.json"


def _read() -> dict[str, Any]:
    """Return the file's content, empty without a file; raises Exit for one that is not as we write it."""
    path = _path()
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return {"current": None, "contexts": {}}
    problem = exits.Exit(exits.USAGE, f"{path}: it is not a file of contexts; correct it or remove it")
    if len(content) > MAX_FILE_BYTES:
        raise problem
    try:
        stored = json.loads(content)
    except (ValueError, RecursionError):
        raise problem from None
    contexts = stored.get("contexts") if isinstance(stored, dict) else None
    if not isinstance(contexts, dict) or not isinstance(stored.get("current"), str | None):
        raise problem
    for entry in contexts.values():
        host = entry.get("host") if isinstance(entry, dict) else None
        if (
            not isinstance(host, str)
            or host.startswith("-")
            or not isinstance(entry.get("socket"), str | None)
        ):
            raise problem
    return {"current": stored.get("current"), "contexts": contexts}


def _write(stored: Mapping[str, Any]) -> None:
    """Replace the file whole, so that a command that reads meanwhile sees the old or the new one."""
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        json.dump(stored, file, indent=2)
        file.write("\n")
    Path(file.name).replace(path)


def _name_argument(text: str) -> str:
    import argparse

    if not _NAME.fullmatch(text) or text == LOCAL:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a name for a context; use letters, digits and . _ -"
        )
    return text
