"""Entry point of the console: `python -m tui`, run by `rolloutctl tui` and `rolloutctl web`."""

from __future__ import annotations

import argparse
import gc
import locale
import os
import sys

from rolloutd.control.client import Client, default_socket_path

GC_THRESHOLDS = (5_000, 5, 1_000)
"""Fewer partial collections than by default, and no full one: the console runs these between keys."""

THREAD_SWITCH_INTERVAL_S = 0.001
"""How long a parsing thread may delay the drawing thread; the default is five times as long."""


def main(argv: list[str] | None = None) -> int:
    """Run the console until the user quits, and return its exit code."""
    args = parse_arguments(argv)
    if args.web:
        try:
            from tui.connection.web import serve
        except ModuleNotFoundError as missing:
            print(f"{missing}: run pip install 'rolloutd[web]'", file=sys.stderr)  # noqa: T201
            return 2
        return serve(args.socket, args.port, _options_of_tabs(args))
    has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not has_terminal and "TEXTUAL_DRIVER" not in os.environ:
        print("tui: no terminal; use rolloutctl status or rolloutctl watch", file=sys.stderr)  # noqa: T201
        return 2
    if has_terminal:
        # The terminal knows its size; variables that a shell exported would hide each later resize.
        for name in ("COLUMNS", "LINES"):
            os.environ.pop(name, None)
    from tui.app import Console

    tune_interpreter()
    # A browser has more than ASCII, whatever the server's locale.
    has_glyphs = bool(os.environ.get("TEXTUAL_DRIVER")) or "utf" in locale.getencoding().lower()
    console = Console(
        Client(args.socket),
        theme_name=args.theme,
        ascii_only=args.ascii or not has_glyphs,
        still=args.still,
        reach=args.reach,
        hint=args.hint,
    )
    console.run(mouse=not args.no_mouse)
    return int(console.return_code or 0)


def tune_interpreter() -> None:
    """Let neither the garbage collector nor a parsing thread stop the drawing for long."""
    # A full collection stops drawing for as long as it takes to visit ten thousand nodes.  Imported modules
    # stay until the end, so the collector may skip them.
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(THREAD_SWITCH_INTERVAL_S)


def _options_of_tabs(args: argparse.Namespace) -> list[str]:
    """Return the options of each tab's console: all that concern what it shows."""
    values = {name: getattr(args, name) for name in ("theme", "reach", "hint")}
    options = [word for name, value in values.items() if value for word in (f"--{name}", value)]
    return options + [f"--{name}" for name in ("ascii", "still") if getattr(args, name)]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rolloutctl tui", allow_abbrev=False)
    parser.add_argument("--socket", metavar="PATH", default=default_socket_path())
    parser.add_argument("--theme", choices=("dark", "light"))
    parser.add_argument("--ascii", action="store_true")
    parser.add_argument("--still", action="store_true")
    parser.add_argument("--no-mouse", action="store_true")
    parser.add_argument("--reach", default="", help=argparse.SUPPRESS)
    parser.add_argument("--hint", default="", help=argparse.SUPPRESS)
    parser.add_argument("--web", action="store_true")
    parser.add_argument("--port", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
