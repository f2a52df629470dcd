"""All keys, made from the registry of actions, with what is ours to do and what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tui import actions
from tui.lines import Line, beside, fit, width_of
from tui.page import Item, Page, fixed, heading
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

    def items(self) -> Iterator[Item]:
        """Yield all keys."""
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
