"""The console's own entry: `python -m tui --socket PATH`; `rolloutctl tui` and `rolloutctl web` become it."""

from __future__ import annotations

import argparse
import gc
import locale
import os
import sys

from rolloutd.control.client import Client, default_socket

FULL_COLLECTION = 60
"""Lesser collections before a full one, six times the usual; more would let memory grow by tens of MiB."""

TURN_S = 0.001
"""How long a thread that reads a long answer keeps the one that draws waiting; five times that is usual."""


def main(argv: list[str] | None = None) -> int:
    """Run the console until the person leaves."""
    chosen = arguments(argv)
    if (
        not chosen.web
        and not (sys.stdin.isatty() and sys.stdout.isatty())
        and "TEXTUAL_DRIVER" not in os.environ
    ):
        print("rolloutctl tui needs a terminal; rolloutctl status and watch do not", file=sys.stderr)  # noqa: T201
        return 2
    if chosen.web:
        try:
            from tui.web import serve
        except ModuleNotFoundError as missing:
            print(f"{missing}: pip install 'rolloutd[web]'", file=sys.stderr)  # noqa: T201
            return 2
        looks = ["--theme", chosen.theme] if chosen.theme else []
        looks += [f"--{name}" for name in ("ascii", "still") if getattr(chosen, name)]
        return serve(chosen.socket, chosen.port, looks)
    from tui.app import Console

    # A full collection stops the picture for as long as it takes to go through ten thousand nodes. What is
    # imported lives as long as we do and need not be gone through; the rest less often than usual.
    gc.freeze()
    gc.set_threshold(700, 10, FULL_COLLECTION)
    sys.setswitchinterval(TURN_S)
    ascii_only = chosen.ascii or "utf" not in locale.getencoding().lower()
    console = Console(
        Client(chosen.socket),
        theme_name=chosen.theme,
        ascii_only=ascii_only,
        still=chosen.still,
        reach=chosen.reach,
        hint=chosen.hint,
    )
    console.run(mouse=not chosen.no_mouse)
    return int(console.return_code or 0)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(prog="rolloutctl tui", allow_abbrev=False)
    parser.add_argument("--socket", metavar="PATH", default=default_socket())
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
