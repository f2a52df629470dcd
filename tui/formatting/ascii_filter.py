"""A filter that replaces every glyph by ASCII of the same width.

The console's own glyphs have distinct replacements.  Text in other scripts
becomes question marks, so that columns keep their width.
"""

from __future__ import annotations

from functools import lru_cache

from rich.cells import cell_len
from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

ASCII_REPLACEMENTS: dict[str, str] = {
    "·": ".",
    "◔": "i",
    "◑": "m",
    "◕": "v",
    "■": "#",
    "✗": "X",
    "□": "=",
    "»": "s",
    "≠": "d",
    "↺": "r",
    "▣": "+",
    "━": "=",
    "╍": "+",
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
    "▼": "V",
    "◷": "%",
    "↵": "<",
    "↑": "^",
    "↓": "v",
    "←": "<",
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
"""The console's own glyphs, and those of Textual's frames and bars."""


class AsciiFilter(LineFilter):
    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(to_ascii(text), style, control) for text, style, control in segments]


@lru_cache(maxsize=4_096)
def to_ascii(text: str) -> str:
    if text.isascii():
        return text
    return "".join(
        each if each.isascii() else ASCII_REPLACEMENTS.get(each, "?" * cell_len(each)) for each in text
    )
