"""Modal screens: the confirmation of an operation, and a one-line prompt.

No operation runs on a single key: the user types a reason or presses a button.
Before an irreversible one the user types the start of the digest too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Button, Input, Label, Static

from rolloutd.control import user_time
from tui.operations.confirm import Confirmation, InputField

T = TypeVar("T")

DIGEST_FIELD_NAME = "digest-prefix"

LOADING = "loading what this starts"


class Modal(ModalScreen[T]):
    """A screen above a page; it loses no key that was typed early, and none that was typed twice."""

    def dismiss(self, result: T | None = None) -> AwaitComplete:
        # After the first of two quick Enters, Textual would close the page below, or fail on the last page.
        return super().dismiss(result) if self.is_active else AwaitComplete()

    def take_key(self, event: events.Key) -> None:
        """Type a key that no widget has handled into the field in focus."""
        if event.is_printable:
            # Messages of the screen are handled in order: this one after its mount, which sets the focus.
            self.call_later(self._type, events.Key(event.key, event.character))

    def _type(self, key: events.Key) -> None:
        if isinstance(self.focused, Input):
            self.focused.post_message(key)


class Dialog(Modal[Mapping[str, str] | None]):
    """A confirmation; its result is the field values, or None if the user declines."""

    DEFAULT_CSS = """
    Dialog { align: center middle; background: $background 60%; }
    Dialog > VerticalScroll {
        width: 76; max-width: 96%; height: auto; max-height: 96%; padding: 0 2;
        border: round $primary; background: $panel;
    }
    Dialog.-irreversible > VerticalScroll { border: round $error; }
    Dialog #title { text-style: bold; margin-bottom: 1; }
    Dialog #text { color: $foreground; }
    Dialog .label { color: $foreground 75%; margin-top: 1; }
    Dialog Input { background: $boost; padding: 0 1; }
    Dialog Input.-invalid { background: $error 25%; }
    Dialog #error { color: $error; height: auto; min-height: 1; }
    Dialog Horizontal { height: auto; margin-top: 1; align-horizontal: right; }
    Dialog Button { min-width: 12; margin-left: 2; background: $boost; }
    Dialog Button:focus { background: $primary; color: $background; }
    Dialog.-irreversible Button#yes:focus { background: $error; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "dismiss(None)", "no", priority=True),
        Binding("ctrl+n,down", "app.focus_next", show=False),
        Binding("ctrl+p,up", "app.focus_previous", show=False),
    ]

    def __init__(self, confirmation: Confirmation, *, is_loading: bool = False) -> None:
        super().__init__(classes="-irreversible" if confirmation.is_irreversible else "")
        self.confirmation = confirmation
        self._is_loading = is_loading

    def compose(self) -> ComposeResult:
        with VerticalScroll(can_focus=False):
            yield Static(self.confirmation.title, id="title", markup=False)
            text = self.confirmation.text + ((LOADING,) if self._is_loading else ())
            yield Static("\n".join(text), id="text", markup=False)
            for field in self.confirmation.fields:
                yield from _field_widgets(field)
            yield Static("", id="error", markup=False)
            with Horizontal():
                yield Button("esc  no", id="no", compact=True)
                yield Button(f"↵  {self.confirmation.confirm_label}", id="yes", compact=True)

    def on_mount(self) -> None:
        """Focus the first field that must be filled in; without fields, the button that declines."""
        fields = self.confirmation.fields
        empty = (each for each in fields if not each.initial and not each.is_optional)
        first = next(empty, fields[0] if fields else None)
        self.query_one(f"#field-{first.name}" if first is not None else "#no").focus()

    async def finish_loading(self, confirmation: Confirmation) -> None:
        """Show the complete text and its further fields; from now on the dialog can be confirmed."""
        if not self.is_attached or self not in self.app.screen_stack:
            return  # the user has declined meanwhile
        for field in confirmation.fields:
            if field not in self.confirmation.fields:
                await self.query_one(VerticalScroll).mount(*_field_widgets(field), before="#error")
        self.confirmation, self._is_loading = confirmation, False
        self.query_one("#text", Static).update("\n".join(confirmation.text))
        self.query_one("#error", Static).update("")

    def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "yes":
            self.on_input_submitted()
        else:
            self.dismiss(None)

    def on_input_submitted(self) -> None:
        if self._is_loading:
            self.query_one("#error", Static).update(f"{LOADING}; press Enter again then")
            return
        field_values: dict[str, str] = {}
        for field in self.confirmation.fields:
            input_widget = self.query_one(f"#field-{field.name}", Input)
            value = input_widget.value.strip()
            error = validation_error(field, value)
            input_widget.set_class(bool(error), "-invalid")
            if error:
                self.query_one("#error", Static).update(error)
                input_widget.focus()
                return
            field_values[field.name] = value
        # It is typed so that the user reads it; the daemon does not need it.
        field_values.pop(DIGEST_FIELD_NAME, None)
        self.dismiss(field_values)


def _field_widgets(field: InputField) -> Iterator[Widget]:
    choices = f" ({' or '.join(field.choices)})" if field.choices else ""
    yield Label(field.label + choices, classes="label", markup=False)
    # Typing replaces the initial value.
    yield Input(field.initial, id=f"field-{field.name}", select_on_focus=True, compact=True)


def validation_error(field: InputField, value: str) -> str:
    """Return why a value is invalid; empty if it is valid."""
    if not value:
        return "" if field.is_optional else f"{field.name}: missing; type one"
    if field.required_value and value != field.required_value:
        return f"{field.name}: no match; type {field.required_value}"
    if field.is_time:
        try:
            user_time.parse_future(value)
        except ValueError as wrong:
            return f"{field.name}: {wrong}"
    if field.choices and value not in field.choices:
        return f"{field.name}: unknown value; type one of {', '.join(field.choices)}"
    return ""


class Prompt(Modal[str | None]):
    """One line of text at the bottom of the screen; its result is None if the user cancels."""

    DEFAULT_CSS = """
    Prompt { align: left bottom; background: $background 0%; }
    Prompt > Horizontal { height: 1; background: $boost; }
    Prompt Label { padding: 0 1; color: $primary; text-style: bold; }
    Prompt Input { width: 1fr; padding: 0; background: $boost; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "dismiss(None)", show=False, priority=True)
    ]

    def __init__(self, label: str, text: str, on_change: Callable[[str], None] | None = None) -> None:
        super().__init__()
        self._label = label
        self._text = text
        self._on_change = on_change

    def compose(self) -> ComposeResult:
        with Horizontal():
            yield Label(f"{self._label}:", markup=False)
            yield Input(self._text, compact=True)

    def on_input_changed(self, event: Input.Changed) -> None:
        if self._on_change is not None:
            self._on_change(event.value.strip())

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip())
