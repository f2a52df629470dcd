"""Output of commands: data on stdout, messages on stderr.

Tables look like kubectl's.  Colour appears only on a terminal, unless NO_COLOR,
CLICOLOR or CLICOLOR_FORCE say otherwise.  It imports no terminal library: loading one takes longer than
most commands.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from machines.model.timefmt import format_duration
from rolloutd.texts.formats import format_percent, short_hash, shorten_name

FORMATS = ("json", "yaml", "name", "wide")
"""Values of `-o`; `wide` is a table with further columns, where there are some."""

UNNAMED_FORMATS = ("json", "yaml", "wide")
"""Values of `-o` where nothing that is listed has a name."""

LIST_FORMATS = (*FORMATS, "csv")
"""Values of `-o` of a command that prints one list."""

COLUMN_GAP = "   "

MIN_LAST_COLUMN_CHARS = 24
"""The last column, which has the reasons, is wrapped to no less: narrower lines are not read as sentences."""

MAX_SORTED_CHARS = 1_000
"""Characters of a cell that sorting reads: int() refuses thousands of digits."""

UNIT_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
UNIT = r"(\d{1,9})(ms|[smhd])"
DURATION = rf"(?:{UNIT})+"
"""Ages and times of cells, such as `1m8s`."""

MIN_CUT_COLUMN_CHARS = 8
"""No column is cut to less: the beginning of a name says which one it is."""

AGE_UNITS = 2
"""Units of an age: `3d4h` is enough to see how old something is."""

BAR_CELLS = 24
"""Width of a bar that leaves room for its numbers in 80 columns."""

_COLORS = {"red": "31", "green": "32", "yellow": "33", "cyan": "36", "dim": "2", "bold": "1"}
_STATE_COLORS = {
    "awaiting-approval": "yellow",
    "running": "cyan",
    "soaking": "cyan",
    "paused": "red",
    "done": "green",
    "cancelled": "dim",
    "failed": "red",
    "rejected": "red",
    "in-doubt": "red",
    "open": "green",
    "waiting": "yellow",
}


@dataclass(frozen=True, slots=True)
class OutputStyle:
    """How the present command prints: `color` None is colour on a terminal."""

    color: bool | None = None
    has_headings: bool = True


_style = OutputStyle()


def set_style(style: OutputStyle) -> None:
    """Print like this from now on; rolloutctl runs one command."""
    global _style  # each function that prints would else carry it
    _style = style


def print_message(text: str) -> None:
    """Print a message, which is not data, on stderr."""
    for line in text.splitlines():
        print(sanitize(line), file=sys.stderr)  # noqa: T201


def print_line(text: str = "") -> None:
    print(text)  # noqa: T201


def to_json(value: Any, *, is_indented: bool = False) -> str:
    return json.dumps(value, indent=2 if is_indented else None, ensure_ascii=False)


def to_yaml(value: Any) -> str:
    import yaml  # rolloutctl's start-up counts

    # Without the mark of the end of a document that YAML puts after a plain scalar, such as null.
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    return text.removesuffix("...\n").rstrip()


def print_now(text: str) -> None:
    """Print a line of a stream without buffering."""
    print(text, flush=True)  # noqa: T201


Columns = Mapping[str, str | Callable[[Any], Any]]
"""The columns of a list: under each heading the key of an item's value, or a function of the item."""


def print_list(columns: Columns, items: Iterable[Any]) -> None:
    """Print a row for each item; null is an empty cell, a list its items with commas."""
    print_table(tuple(columns), ([_cell(item, source) for source in columns.values()] for item in items))


def _cell(item: Any, source: str | Callable[[Any], Any]) -> str:
    value = item[source] if isinstance(source, str) else source(item)
    return "" if value is None else ",".join(value) if isinstance(value, list) else str(value)


def with_columns(columns: Columns, wide: Columns) -> Columns:
    """Return the columns with further ones before the last, which may be long."""
    *first, last = columns.items()
    return dict((*first, *wide.items(), last))


def age_of(key: str) -> Callable[[Any], str]:
    """Return a cell with the time since an instant of the item."""
    return lambda item: format_age(item[key])


def percent_of(key: str) -> Callable[[Any], str]:
    return lambda item: format_percent(item[key])


def short_of(key: str) -> Callable[[Any], str]:
    """Return a cell with the beginning of a hash of the item."""
    return lambda item: short_hash(item[key])


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under headings, each column as wide as its widest cell.

    On a terminal a table fits its width: the last column is wrapped, the widest of the others are cut.
    """
    body = [tuple(sanitize(cell) or "-" for cell in row) for row in rows]
    lines = [tuple(headings), *body] if _style.has_headings else body
    if not lines:
        return
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    if sys.stdout.isatty():
        widths = _fit_widths(widths, shutil.get_terminal_size().columns)
    for number, line in enumerate(lines):
        is_heading = _style.has_headings and number == 0
        *first, last = line
        cells = [_cut(cell, width).ljust(width) for cell, width in zip(first, widths, strict=False)]
        wrapped = textwrap.wrap(last, widths[-1]) if len(last) > widths[-1] else [last]
        indent = sum(widths[:-1]) + len(COLUMN_GAP) * len(first)
        for part, text in enumerate(wrapped):
            shown = [*cells, text] if part == 0 else [" " * (indent - len(COLUMN_GAP)), text]
            if not is_heading:
                shown = [colorize(cell) for cell in shown]
            print_line(COLUMN_GAP.join(shown).rstrip())


def print_in_blocks(columns: Columns, items: Sequence[Any]) -> None:
    """Print a list whose columns may be too many for the terminal as several, each with the first column."""
    first, *others = ({heading: source} for heading, source in columns.items())
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    blocks: list[Columns] = []
    left = 0
    for column in others:
        width = _column_width(column, items) + len(COLUMN_GAP)
        if not blocks or width > left:
            blocks.append(first)
            left = room - _column_width(first, items)
        blocks[-1] = {**blocks[-1], **column}
        left -= width
    for number, block in enumerate(blocks):
        if number:
            print_line()
        print_list(block, items)


def _column_width(column: Columns, items: Iterable[Any]) -> int:
    ((heading, source),) = column.items()
    return max(len(heading), *(len(sanitize(_cell(item, source))) for item in items))


def _fit_widths(widths: Sequence[int], total: int) -> list[int]:
    """Return the widths of columns that fit into `total` characters, as far as their limits allow."""
    *first, last = widths
    gaps = len(COLUMN_GAP) * len(first)
    while first and sum(first) + gaps + min(last, MIN_LAST_COLUMN_CHARS) > total:
        widest = max(first)
        if widest <= MIN_CUT_COLUMN_CHARS:
            break
        first[first.index(widest)] = widest - 1
    rest = total - sum(first) - gaps
    return [*first, min(last, max(rest, MIN_LAST_COLUMN_CHARS))]


def _cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    # A list of names keeps its beginning, one name its ends.
    is_name = not set(text) & {" ", ",", "="}
    return shorten_name(text, width) if is_name else f"{text[: width - 1]}\N{HORIZONTAL ELLIPSIS}"


def print_csv(columns: Columns, items: Iterable[Any]) -> None:
    """Print a list as CSV (RFC 4180); a cell that a spreadsheet would compute is text."""
    import csv  # rolloutctl's start-up counts

    writer = csv.writer(sys.stdout, lineterminator="\n")
    if _style.has_headings:
        writer.writerow(columns)
    for item in items:
        cells = [sanitize(_cell(item, source)) for source in columns.values()]
        # Names and reasons come from outside: `=cmd()` in a cell is a formula in a spreadsheet.
        writer.writerow(f"'{cell}" if cell.startswith(("=", "+", "-", "@")) else cell for cell in cells)


def sort_items(columns: Columns, items: Iterable[Any], heading: str) -> list[Any]:
    """Return the items in the order of a column, numbers in names by value; empty cells are last.

    Raises KeyError for an unknown heading.
    """
    from machines.model.node import natural_sort_key  # rolloutctl's start-up counts

    source = {name.casefold(): value for name, value in columns.items()}[heading.casefold()]

    def order(item: Any) -> tuple[bool, float, tuple[str | int, ...]]:
        value = item[source] if isinstance(source, str) else source(item)
        if isinstance(value, int | float):
            return (False, float(value), ())
        text = _cell(item, source)
        if text == "-":  # an age of nothing
            return (True, 0.0, ())
        if re.fullmatch(DURATION, text):
            return (False, sum(int(number) * UNIT_S[unit] for number, unit in re.findall(UNIT, text)), ())
        return (not text, 0.0, natural_sort_key(text[:MAX_SORTED_CHARS]))

    return sorted(items, key=order)


def colorize(text: str, colour: str | None = None) -> str:
    """Return the text in a colour, by default that of the state it names."""
    name = colour or _STATE_COLORS.get(text.strip())
    return f"\x1b[{_COLORS[name]}m{text}\x1b[0m" if name is not None and _wants_color() else text


def _wants_color() -> bool:
    if _style.color is not None:
        return _style.color
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("CLICOLOR_FORCE", "0") != "0":
        return True
    is_plain = os.environ.get("CLICOLOR") == "0" or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not is_plain


def sanitize(text: str) -> str:
    """Return the text without control characters, so that a node's output cannot control the terminal."""
    return "".join(c if c.isprintable() else " " if c in "\t\r\n" else "\ufffd" for c in text)


def progress_bar(percent: float, cells: int = BAR_CELLS) -> str:
    """Return a bar for 0 to 100 percent; full only at 100."""
    full, empty = ("\u2588", "\u2591") if "utf" in (sys.stdout.encoding or "").lower() else ("#", ".")
    filled = min(cells, int(percent / 100 * cells))
    return full * filled + empty * (cells - filled)


def parse_rfc3339(text: str) -> datetime:
    return datetime.fromisoformat(text)


def format_age(text: str | None, now: datetime | None = None) -> str:
    """Return the time since an instant, as `3m`; `-` for None."""
    if text is None:
        return "-"
    return format_duration(((now or datetime.now(UTC)) - parse_rfc3339(text)).total_seconds(), AGE_UNITS)


def format_range(low_s: float, high_s: float) -> str:
    """Return a time between two limits, as `4m to 6m`; one value if both read alike."""
    low, high = format_duration(low_s, AGE_UNITS), format_duration(high_s, AGE_UNITS)
    return low if low == high else f"{low} to {high}"


def format_local(text: str) -> str:
    """Return an instant in local time, with its date unless it is today."""
    instant = parse_rfc3339(text).astimezone()
    is_today = instant.date() == datetime.now(UTC).astimezone().date()
    return instant.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S")
