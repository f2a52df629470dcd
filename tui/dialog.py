"""The one dialog before a deed: what will happen, to which digest, and why you want it.

Nothing is done by one key: a reason is typed, or a button is chosen.  Where
something cannot be taken back, the digest's beginning is typed too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, Static

from tui.question import Field, Question


class Dialog(ModalScreen[Mapping[str, str] | None]):
    """Asks a question; dismissed with the answers, or with None."""

    DEFAULT_CSS = """
    Dialog { align: center middle; background: $background 60%; }
    Dialog > VerticalScroll {
        width: 76; max-width: 96%; height: auto; max-height: 96%; padding: 0 2;
        border: round $primary; background: $panel;
    }
    Dialog.-grave > VerticalScroll { border: round $error; }
    Dialog #title { text-style: bold; margin-bottom: 1; }
    Dialog .text { color: $foreground; }
    Dialog .label { color: $foreground 75%; margin-top: 1; }
    Dialog Input { background: $boost; padding: 0 1; }
    Dialog Input.-wrong { background: $error 25%; }
    Dialog #problem { color: $error; height: 1; }
    Dialog Horizontal { height: auto; margin-top: 1; align-horizontal: right; }
    Dialog Button { min-width: 12; margin-left: 2; background: $boost; }
    Dialog Button:focus { background: $primary; color: $background; }
    Dialog.-grave Button#yes:focus { background: $error; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "cancel", "no"),
        Binding("ctrl+n,down", "app.focus_next", show=False),
        Binding("ctrl+p,up", "app.focus_previous", show=False),
    ]

    def __init__(self, question: Question) -> None:
        super().__init__(classes="-grave" if question.grave else "")
        self.question = question

    def compose(self) -> ComposeResult:
        """Lay the question out."""
        with VerticalScroll(can_focus=False):
            yield Static(self.question.title, id="title", markup=False)
            for number, text in enumerate(self.question.text):
                yield Static(text, classes="text", id=f"text-{number}", markup=False)
            for field in self.question.fields:
                choices = f" ({' or '.join(field.choices)})" if field.choices else ""
                yield Label(field.label + choices, classes="label", markup=False)
                # What is typed takes the place of what was proposed.
                yield Input(field.initial, id=f"field-{field.name}", select_on_focus=True, compact=True)
            yield Static("", id="problem", markup=False)
            with Horizontal():
                yield Button("esc  no", id="no", compact=True)
                yield Button(f"↵  {self.question.yes}", id="yes", compact=True)

    def on_mount(self) -> None:
        """Start where something is missing; a question without fields starts at its no."""
        fields = self.question.fields
        if fields:
            empty = next((each for each in fields if not each.initial), fields[0])
            self.query_one(f"#field-{empty.name}", Input).focus()
        else:
            self.query_one("#no", Button).focus()

    def on_input_submitted(self) -> None:
        """Go on to the next field that is empty, or say yes."""
        self._confirm()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Say yes or no."""
        if event.button.id == "yes":
            self._confirm()
        else:
            self.dismiss(None)

    def action_cancel(self) -> None:
        """Say no."""
        self.dismiss(None)

    def _confirm(self) -> None:
        answers: dict[str, str] = {}
        for field in self.question.fields:
            box = self.query_one(f"#field-{field.name}", Input)
            answer = box.value.strip()
            wrong = problem(field, answer)
            box.set_class(bool(wrong), "-wrong")
            if wrong:
                self.query_one("#problem", Static).update(wrong)
                box.focus()
                return
            answers[field.name] = answer
        self.dismiss({name: answer for name, answer in answers.items() if name != "proof"})


def problem(field: Field, answer: str) -> str:
    """Return what is wrong with an answer; empty when nothing is."""
    if not answer:
        return "" if field.optional else f"{field.label.split('(')[0].strip()}: say something"
    if field.must_be and answer != field.must_be:
        return f"that is not {field.must_be}"
    if field.choices and answer not in field.choices:
        return f"one of {', '.join(field.choices)}"
    return ""
