"""One line of text at the bottom of the screen: what to look for."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import ModalScreen
from textual.widgets import Input, Label


class Prompt(ModalScreen[str | None]):
    """Asks for a text; dismissed with it, or with None where it stays as it was."""

    DEFAULT_CSS = """
    Prompt { align: left bottom; background: $background 0%; }
    Prompt > Horizontal { height: 1; background: $boost; }
    Prompt Label { padding: 0 1; color: $primary; text-style: bold; }
    Prompt Input { width: 1fr; padding: 0; background: $boost; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", show=False)]

    def __init__(self, label: str, text: str) -> None:
        super().__init__()
        self._label = label
        self._text = text

    def compose(self) -> ComposeResult:
        """Lay the line out."""
        with Horizontal():
            yield Label(f"/ {self._label}:", markup=False)
            yield Input(self._text, compact=True)

    def on_mount(self) -> None:
        """Give the keys to the line."""
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Look for it."""
        self.dismiss(event.value.strip())

    def action_cancel(self) -> None:
        """Leave it as it was."""
        self.dismiss(None)
