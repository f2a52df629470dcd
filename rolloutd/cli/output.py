"""What a command prints: data on stdout, narration on stderr, both plain text.

Tables are kubectl's: upper-case headings, columns as wide as they must be.
Colour appears on a terminal only, and never when NO_COLOR is set.  It knows no
rollout and no daemon, and no library of pictures: starting one takes longer
than the question.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

GAP = "   "
BAR_CELLS = 24
"""A bar that leaves room for its numbers on a terminal of 80 columns."""

_COLOURS = {"red": "31", "green": "32", "yellow": "33", "cyan": "36", "dim": "2", "bold": "1"}
_STATE_COLOURS = {
    "awaiting-approval": "yellow",
    "running": "cyan",
    "soaking": "cyan",
    "paused": "red",
    "done": "green",
    "cancelled": "dim",
    "failed": "red",
    "rejected": "red",
    "open": "green",
    "waiting": "yellow",
}


def say(text: str) -> None:
    """Tell the person something that is not data."""
    for line in text.splitlines():
        print(printable(line), file=sys.stderr)  # noqa: T201


def put(text: str = "") -> None:
    """Write one line of data."""
    print(text)  # noqa: T201


def put_json(value: Any) -> None:
    """Write a value as JSON: indented for a person, one line for a program."""
    put(json.dumps(value, indent=2 if sys.stdout.isatty() else None, ensure_ascii=False))


def put_json_line(value: Any) -> None:
    """Write a value as one line of JSON, at once: for streams."""
    print(json.dumps(value, ensure_ascii=False), flush=True)  # noqa: T201


def put_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Write rows under headings, each column as wide as its widest cell."""
    lines = [tuple(headings), *(tuple(printable(cell) or "-" for cell in row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    for number, line in enumerate(lines):
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        last = len(cells) - 1
        cells[last] = line[last]
        put(GAP.join(cells if number == 0 else [coloured(cell) for cell in cells]).rstrip())


def coloured(text: str, colour: str | None = None) -> str:
    """Return the text in a colour, or in the colour of the state that it names."""
    name = colour or _STATE_COLOURS.get(text.strip())
    if name is None or not has_colour(sys.stdout):
        return text
    return f"\x1b[{_COLOURS[name]}m{text}\x1b[0m"


def has_colour(stream: TextIO) -> bool:
    """Say whether colour is wanted there."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def printable(text: str) -> str:
    """Return the text without control characters: what a node said must not drive the terminal."""
    return "".join(c if c.isprintable() else " " if c in "\t\r\n" else "\ufffd" for c in text)


def bar(percent: float, cells: int = BAR_CELLS) -> str:
    """Return a bar for 0 to 100 percent; full only when everything is done."""
    full, empty = ("\u2588", "\u2591") if "utf" in (sys.stdout.encoding or "").lower() else ("#", ".")
    filled = min(cells, int(percent / 100 * cells))
    return full * filled + empty * (cells - filled)


def percentage(percent: float | None) -> str:
    """Return a percentage as people read it, rounded down; nothing when there is none."""
    return "" if percent is None else f"{int(percent)} %"
