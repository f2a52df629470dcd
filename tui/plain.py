"""A terminal without glyphs: whatever is drawn becomes ASCII, cell by cell, whoever drew it.

Our own glyphs have stand-ins that can be told apart; frames and marks of the
toolkit have others; what people wrote in another script becomes question marks
of the same width, so that columns stay.
"""

from __future__ import annotations

from functools import lru_cache

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

STAND_INS: dict[str, str] = {
    "·": ".",
    "◔": "i",
    "◑": "m",
    "◕": "v",
    "■": "#",
    "✗": "X",
    "□": "=",
    "»": "s",
    "↺": "r",
    "▣": "+",
    "━": "=",
    "─": "-",
    "│": "|",
    "…": "~",
    "▸": ">",
    "●": "*",
    "○": "o",
    "◆": "!",
    "✓": "y",
    "→": ">",
    "▌": "|",
    "▏": ":",
    "‖": "=",
    "►": ">",
    "◷": "%",
    "↵": "<",
    "↑": "^",
    "↓": "v",
    "▂": "_",
    "“": '"',
    "”": '"',
    "╭": "+",
    "╮": "+",
    "╰": "+",
    "╯": "+",
    "▔": "-",
    "▁": "_",
    "█": "#",
    "▎": "|",
    "▊": "|",
    "🔎": "/ ",
    **dict.fromkeys("▃▄▅▆▇▀", " "),
}
"""What stands for our glyphs, and for those of the toolkit's frames and bars."""


class Plain(LineFilter):
    """Lets no glyph through."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Return the same cells in ASCII."""
        return [Segment(in_ascii(text), style, control) for text, style, control in segments]


@lru_cache(maxsize=4_096)
def in_ascii(text: str) -> str:
    """Return a text of the same width in ASCII."""
    if text.isascii():
        return text
    return "".join(each if each.isascii() else STAND_INS.get(each, "?" * cell_len(each)) for each in text)
