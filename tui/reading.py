"""The whole of what a line had no room for: read, copied, and closed again."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from tui.lines import clean

MOST_SHOWN = 100_000
"""Characters shown: some thousand lines, more than anybody reads here; rolloutctl has them all."""


class Reading(ModalScreen[None]):
    """Shows a text that scrolls."""

    DEFAULT_CSS = """
    Reading { align: center middle; background: $background 60%; }
    Reading > VerticalScroll {
        width: 96%; height: auto; max-height: 90%; padding: 0 2;
        border: round $primary; background: $panel; scrollbar-size-vertical: 1;
    }
    Reading #title { text-style: bold; margin-bottom: 1; }
    Reading #hint { color: $foreground 60%; margin-top: 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,enter,l,backspace,q", "close", show=False),
        Binding("y", "copy", show=False),
        Binding("j", "scroll('down')", show=False),
        Binding("k", "scroll('up')", show=False),
        Binding("space", "scroll('page_down')", show=False),
    ]

    def __init__(self, title: str, text: str) -> None:
        super().__init__()
        self._title = clean(title)
        self._text = "\n".join(clean(line) for line in text[:MOST_SHOWN].splitlines())

    def compose(self) -> ComposeResult:
        """Lay the text out."""
        with VerticalScroll():
            yield Static(self._title, id="title", markup=False)
            yield Static(self._text, id="text", markup=False)
            yield Static("esc back   y copy   ↑ ↓ scroll", id="hint", markup=False)

    def action_close(self) -> None:
        """Go back."""
        self.dismiss(None)

    def action_copy(self) -> None:
        """Copy the text."""
        self.app.copy_to_clipboard(self._text)
        self.notify("copied to the terminal's clipboard", markup=False)

    def action_scroll(self, way: str) -> None:
        """Scroll with the keys that move a cursor elsewhere."""
        getattr(self.query_one(VerticalScroll), f"action_{'scroll_' if way != 'page_down' else ''}{way}")()
