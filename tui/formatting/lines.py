"""Lines of text as spans, each with a role instead of a colour.

A role says what a span means (`ok`, `bad`, `dim`); the theme knows its colour.  So
everything that makes lines is tested as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size

from rolloutd.texts.formats import shorten_name

Span = tuple[str, str]

Line = list[Span]

UNCUT_WIDTH = 4_000
"""Cells of a row that is drawn in full: no line exceeds them."""

MIN_COLUMN_WIDTH, MAX_COLUMN_WIDTH, MAX_WORD_WIDTH = 12, 48, 24
"""Cells of a column of names, at least and at most, and of a name in a text that does not fit."""

_LONG_WORD = re.compile(rf"[^\s,;:()\"]{{{MAX_WORD_WIDTH + 1},}}")

_CONTROL = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\xad\\u0600-\\u0605\\u061c\\u06dd\\u070f\\u180e\\u200b-\\u200f\\u2028-\\u202e"
    "\\u2060-\\u206f\\ud800-\\udfff\\ufeff\\ufff9-\\ufffb\\U000e0000-\\U000e007f]"
)
"""Characters that move the cursor, change the writing direction, or are invisible."""


def sanitize(text: str) -> str:
    """Return text that cannot control a terminal: control characters become blanks."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROL.sub(" ", text)


def column_width(
    names: Iterable[str], min_width: int = MIN_COLUMN_WIDTH, max_width: int = MAX_COLUMN_WIDTH
) -> int:
    return min(max_width, max(min_width, max(map(cell_len, names), default=0)))


def line_width(line: Line) -> int:
    return sum(cell_len(text) for text, _ in line)


def line_text(line: Line) -> str:
    return "".join(text for text, _ in line)


def fit(text: str, width: int, *, align_right: bool = False) -> str:
    """Return exactly `width` cells: padded, or cut with an ellipsis."""
    length = cell_len(text)
    if length <= width:
        pad = " " * (width - length)
        return pad + text if align_right else text + pad
    if width <= 1:
        return set_cell_size(text, max(width, 0))
    return set_cell_size(text, width - 1) + "…"


def fit_name(name: str, width: int, *, pad: bool = True) -> str:
    """Return a name in `width` cells: a long one loses its domain, then its middle."""
    # A letter may have two cells, so a name of wide letters has fewer of them.
    names = (shorten_name(name, characters) for characters in range(width, 0, -1))
    shown = next((each for each in names if cell_len(each) <= width), "")
    return fit(shown, width) if pad else shown


def column(text: str, width: int, row_width: int) -> str:
    """Return a name and a blank in `width` cells, at most a third of the row; never cut in UNCUT_WIDTH."""
    text = sanitize(text)
    if row_width >= UNCUT_WIDTH:
        return f"{text:<{width - 1}} "
    return fit_name(text, min(width, max(MIN_COLUMN_WIDTH, row_width // 3)) - 1) + " "


def shorten(text: str, width: int) -> str:
    """Return a text whose long names have lost their middle if it does not fit otherwise."""
    if cell_len(text) <= width:
        return text
    return _LONG_WORD.sub(lambda found: fit_name(found[0], MAX_WORD_WIDTH, pad=False), text)


def fit_line(line: Line, width: int) -> Line:
    """Return the line cut with an ellipsis, or padded, to exactly `width` cells."""
    fitted: Line = []
    left = width
    for number, (text, role) in enumerate(line):
        length = cell_len(text)
        is_last = number == len(line) - 1
        if length > left or (length == left and not is_last and any(rest for rest, _ in line[number + 1 :])):
            fitted.append((fit(text + " " if length == left else text, left), role))
            return fitted
        fitted.append((text, role))
        left -= length
    if left:
        fitted.append((" " * left, ""))
    return fitted


def justify(left: Line, right: Line, width: int) -> Line:
    """Return one line with `right` at its right edge and a blank before it; `left` is cut to fit."""
    room = width - line_width(right)
    if room < 1:
        return fit_line(right, width)
    # A cut text must not run into what stands at the right edge: `exit sta…0:31` reads as one word.
    gap = 1 if right and not right[0][0].startswith(" ") else 0
    return [*fit_line(left, room - gap), (" " * gap, ""), *right]


def wrap_text(text: str, width: int, max_lines: int) -> list[str]:
    """Return a text in at most `max_lines` lines of `width` cells, broken at blanks."""
    lines: list[str] = []
    current = ""
    words = sanitize(text).split()
    for index, word in enumerate(words):
        longer = f"{current} {word}" if current else word
        if cell_len(longer) <= width or not current:
            current = longer
            continue
        if len(lines) == max_lines - 1:
            return [*lines, fit(" ".join([current, *words[index:]]), width).rstrip()]
        lines.append(current)
        current = word
    return [fit(line, width).rstrip() for line in [*lines, current]]


def merge_spans(cells: Iterable[Span]) -> Line:
    """Join neighbouring spans of one role: a strip of a thousand cells becomes a few spans."""
    joined: Line = []
    for text, role in cells:
        if joined and joined[-1][1] == role:
            joined[-1] = (joined[-1][0] + text, role)
        else:
            joined.append((text, role))
    return joined


BAR_GLYPHS = {"bad": "✗", "run": "╍"}
"""The cells of a bar by role: without colour, work in flight must differ from work that is done."""


def progress_bar(fractions: Sequence[tuple[float, str]], width: int) -> Line:
    """Return a bar of exactly `width` cells: parts with their roles, then the rest.

    Each part above 0 has at least one cell: one failed node of ten thousand is visible.
    """
    line: Line = []
    left = width
    for fraction, role in fractions:
        cells = min(left, max(1 if fraction > 0 else 0, int(fraction * width)))
        if cells:
            line.append((BAR_GLYPHS.get(role, "━") * cells, role))
            left -= cells
    if left > 0:
        line.append(("─" * left, "faint"))
    return line


def mark_matches(line: Line, wanted: str) -> Line:
    """Return the line with each match of a text in the role `match`, case ignored."""
    if not wanted or wanted.lower() not in line_text(line).lower():
        return line
    pattern = re.compile(f"({re.escape(wanted)})", re.IGNORECASE)
    return [
        (part, "match" if number % 2 else role)
        for text, role in line
        for number, part in enumerate(pattern.split(text))
        if part
    ]
