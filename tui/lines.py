"""Lines of text before anybody draws them: spans with a role instead of a colour.

A role says what a span means (`ok`, `bad`, `dim`); which colour that is, the
theme knows.  So everything that makes lines can be read and tested as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size

Span = tuple[str, str]
"""Text and its role."""

Line = list[Span]

_CONTROL = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\xad\\u0600-\\u0605\\u061c\\u06dd\\u070f\\u180e\\u200b-\\u200f\\u2028-\\u202e"
    "\\u2060-\\u206f\\ud800-\\udfff\\ufeff\\ufff9-\\ufffb\\U000e0000-\\U000e007f]"
)
"""What moves the cursor, turns the direction of writing, or shows nothing."""


def clean(text: str) -> str:
    """Return one line that cannot write over a terminal: controls become blanks."""
    if text.isascii() and text.isprintable():
        return text
    return _CONTROL.sub(" ", text)


def column(names: Iterable[str], least: int, most: int) -> int:
    """Return how wide a column of names is to be: as the longest, within these bounds."""
    return min(most, max(least, max(map(cell_len, names), default=0)))


def width_of(line: Line) -> int:
    """Return the cells that a line takes."""
    return sum(cell_len(text) for text, _ in line)


def plain(line: Line) -> str:
    """Return a line's text."""
    return "".join(text for text, _ in line)


def fit(text: str, width: int, *, right: bool = False) -> str:
    """Return exactly `width` cells: padded, or cut with an ellipsis."""
    length = cell_len(text)
    if length <= width:
        pad = " " * (width - length)
        return pad + text if right else text + pad
    if width <= 1:
        return set_cell_size(text, max(width, 0))
    return set_cell_size(text, width - 1) + "…"


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


def beside(left: Line, right: Line, width: int) -> Line:
    """Return one line with `right` at its right edge; the left part gives way."""
    room = width - width_of(right)
    if room < 1:
        return fit_line(right, width)
    return [*fit_line(left, room), *right]


def wrapped(text: str, width: int, most: int) -> list[str]:
    """Return a text in at most `most` lines of `width` cells, broken at blanks."""
    lines: list[str] = []
    current = ""
    words = clean(text).split()
    for place, word in enumerate(words):
        longer = f"{current} {word}" if current else word
        if cell_len(longer) <= width or not current:
            current = longer
            continue
        if len(lines) == most - 1:
            return [*lines, fit(" ".join([current, *words[place:]]), width).rstrip()]
        lines.append(current)
        current = word
    return [fit(line, width).rstrip() for line in [*lines, current]]


def runs(cells: Iterable[Span]) -> Line:
    """Join neighbours of one role, so that a strip of a thousand cells is a few spans."""
    joined: Line = []
    for text, role in cells:
        if joined and joined[-1][1] == role:
            joined[-1] = (joined[-1][0] + text, role)
        else:
            joined.append((text, role))
    return joined


def bar(fractions: Sequence[tuple[float, str]], width: int) -> Line:
    """Return a bar of exactly `width` cells: parts with their roles, the rest empty.

    A part that is there at all has at least one cell, so that one failed node of
    ten thousand is seen.
    """
    line: Line = []
    left = width
    for fraction, role in fractions:
        cells = min(left, max(1 if fraction > 0 else 0, int(fraction * width)))
        if cells:
            line.append(("━" * cells, role))
            left -= cells
    if left > 0:
        line.append(("─" * left, "faint"))
    return line
