"""All keys, made from the registry of actions, with what is ours to do and what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from textual.widget import Widget

from tui import actions
from tui.lines import Line, beside, fit, width_of
from tui.listing import Listing
from tui.page import Items, Page, fixed, heading
from tui.phases import LOOKS

GROUPS = (
    ("move", "MOVE"),
    (
        "decide",
        "DECIDE AND ACT",
    ),
    ("app", "THE CONSOLE"),
)
CURSOR_KEYS = (
    ("↑ ↓  j k", "move the cursor"),
    ("pgup pgdn space", "a page up or down"),
    ("home end  g G", "to the first, to the last"),
    ("mouse", "a click moves the cursor, two open; the wheel scrolls"),
)


class HelpPage(Page):
    """The screen of all keys."""

    place = "help"

    def body(self) -> Iterator[Widget]:
        """Yield the list."""
        yield Listing(id="body")

    def on_mount(self) -> None:
        """Give the keys to the list."""
        self.query_one("#body").focus()
        super().on_mount()

    def redraw(self) -> None:
        """List all keys."""
        self.query_one("#body", Listing).show(Items(list(self._items())))

    def _items(self) -> Iterator[tuple[str, Callable[[int], Line]]]:
        for group, title in GROUPS:
            yield ("", heading(title))
            if group == "move":
                for keys, text in CURSOR_KEYS:
                    yield (keys, _row(keys, "", text))
            for action in actions.ACTIONS:
                if action.group == group:
                    is_narrow = action.deed is not None and len(action.places) < 5
                    places = f"on {', '.join(sorted(action.places))}" if is_narrow else ""
                    yield (action.name, _row(action.shown_key, action.title, action.help, places))
        yield ("", heading("GLYPHS"))
        for name, (glyph, role) in LOOKS.items():
            yield (f"glyph:{name}", fixed([("  ", ""), (f"{glyph:<17}", role), (name, "")]))


def _row(keys: str, title: str, text: str, places: str = "") -> Callable[[int], Line]:
    """Return how to draw a key; where it works is told as far as there is room."""
    line: Line = [("  ", ""), (fit(keys, 16), "key"), (fit(title, 12), "bold"), (text, "dim")]
    note: Line = [(f"  {places} ", "faint")] if places else []
    return lambda width: beside(line, note, width) if width_of(line) + width_of(note) <= width else line
