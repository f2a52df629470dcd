"""A list of any length that draws only what is seen, and the pieces that frame it.

Rows are asked for when they come into view; a cursor stays on its row by the
row's key while rows come and go around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, Protocol

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from tui.lines import Line, clean, fit_line
from tui.theme import CURSOR, CURSOR_AWAY, DARK, ROLES

HERE, HERE_AWAY = "▌", "▏"
"""The cursor's mark in the half of the screen that has the keys, and in the other, without colour too."""


@lru_cache(maxsize=64)
def _styles(theme: str, ground: Style) -> Mapping[str, Style]:
    """Return how each role looks on a ground."""
    return {role: ground + style for role, style in ROLES.get(theme, ROLES[DARK]).items()}


class Cells(Strip):
    """A strip that is gone as soon as nobody draws it.

    Textual's own keeps itself as its only part, so that each line ever drawn
    waits for a full collection, and that stops the picture for a tenth of a second.
    """

    __slots__ = ()

    def divide(self, cuts: Iterable[int]) -> Sequence[Strip]:
        """Return the parts between these cuts."""
        wanted = [cut for cut in cuts if cut <= self.cell_length]
        return [self] if wanted == [self.cell_length] else super().divide(wanted)


class Drawing(Widget):
    """Draws lines in the theme of the moment; a line that is as it was is not made again."""

    def __init__(self, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._ground: tuple[str, Style] = ("", Style())
        self._strips: dict[int, tuple[Line, int, Style | None, str, Strip]] = {}
        self._filtered: dict[int, tuple[Strip, Strip]] = {}

    def render_lines(self, crop: Region) -> list[Strip]:
        """Draw the lines that are wanted; with no borders, Textual's way around them would only copy all."""
        first, last = crop.column_span
        strips = (self._filter(y, self.render_line(y)) for y in crop.line_range)
        return [
            strip if not first and last >= strip.cell_length else strip.crop(first, last) for strip in strips
        ]

    def _filter(self, y: int, strip: Strip) -> Strip:
        """Return the strip as the terminal is to have it, which may be without colours."""
        kept = self._filtered.get(y)
        if kept is not None and kept[0] is strip:
            return kept[1]
        seen, background = strip, self.background_colors[1]
        for each in self.get_line_filters():
            seen = seen.apply_filter(each, background)
        seen = Cells(seen, seen.cell_length)
        self._filtered[y] = (strip, seen)
        return seen

    def forget(self) -> None:
        """Draw everything anew."""
        self._strips.clear()
        self._filtered.clear()

    def drawn(self, y: int, line: Line, width: int, back: Style | None = None) -> Strip:
        """Return the line as Textual draws it; `y` is where on the widget it will stand."""
        theme = self.app.theme
        kept = self._strips.get(y)
        if kept is not None and kept[0] == line and kept[1:4] == (width, back, theme):
            return kept[4]
        if self._ground[0] != theme:
            self._ground = (theme, self.rich_style)
        ground = self._ground[1]
        styles = _styles(theme, ground if back is None else ground + back)
        segments = [
            Segment(text, styles.get(role, styles[""]))
            for text, role in fit_line([(clean(text), role) for text, role in line], width)
        ]
        strip = Strip(segments, width)
        self._strips[y] = (line, width, back, theme, strip)
        return strip


class Rows(Protocol):
    """What a listing shows."""

    def __len__(self) -> int:
        """Return how many rows there are."""
        ...

    def key(self, row: int) -> str:
        """Return what tells the row from every other one; empty where the cursor cannot be."""
        ...

    def draw(self, row: int, width: int) -> Sequence[Line]:
        """Return the row's lines: as many as the listing's row height."""
        ...


class Listing(Drawing, ScrollView, can_focus=True):
    """Rows, a cursor among them, and nothing drawn that is not seen."""

    DEFAULT_CSS = """
    Listing { background: $background; scrollbar-size-vertical: 1; overflow-x: hidden; overflow-y: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup,ctrl+u,ctrl+b", "page(-1)", show=False),
        Binding("pagedown,ctrl+d,ctrl+f,space", "page(1)", show=False),
        Binding("home,g", "jump(0)", show=False),
        Binding("end,G", "jump(-1)", show=False),
    ]

    class Moved(Message):
        """The cursor is on another row."""

        def __init__(self, listing: Listing) -> None:
            super().__init__()
            self.listing = listing

    class Opened(Message):
        """A row was clicked twice; the key that opens is the screen's."""

        def __init__(self, listing: Listing) -> None:
            super().__init__()
            self.listing = listing

    def __init__(
        self,
        *,
        id: str,  # noqa: A002
        row_height: int = 1,
        marker: bool = True,
        rests_on_top: bool = False,
    ) -> None:
        super().__init__(id=id)
        self._rows: Rows | None = None
        # What comes on top is what wants a person: a cursor that nobody has moved yet is to be there.
        self._rests_on_top = rests_on_top
        self._height = row_height
        self._marker = marker
        self.cursor = 0
        self.cursor_key = ""

    @property
    def rows(self) -> Rows | None:
        """What is shown."""
        return self._rows

    def show(self, rows: Rows) -> None:
        """Show these rows; the cursor stays with its row if that is still there."""
        self._rows = rows
        self.virtual_size = Size(self.size.width, len(rows) * self._height)
        self._find_cursor()
        self.refresh()

    def take(self, *, all_there_is: bool, least: int = 1) -> None:
        """Take all the height there is, or no more than the rows need where something else can use it."""
        rows = len(self._rows) * self._height if self._rows is not None else 0
        wanted = None if all_there_is else max(least, rows)
        height = self.styles.max_height
        if (None if height is None else height.value) != wanted:
            self.styles.max_height = wanted

    def _find_cursor(self) -> None:
        assert self._rows is not None
        count = len(self._rows)
        if not count:
            self.cursor, self.cursor_key = 0, ""
            return
        here = 0 if self._rests_on_top else min(self.cursor, count - 1)
        if not self._rests_on_top and self.cursor_key and self._rows.key(here) != self.cursor_key:
            found = next((row for row in range(count) if self._rows.key(row) == self.cursor_key), None)
            here = here if found is None else found
        self._put_cursor(self._nearest(here, 1), follow=False)

    def _nearest(self, row: int, direction: int) -> int:
        """Return the first row from here on, then back, where the cursor may be."""
        assert self._rows is not None
        ways = (range(row, len(self._rows)), range(row, -1, -1))
        for way in ways if direction > 0 else reversed(ways):
            for each in way:
                if self._rows.key(each):
                    return each
        return row

    def _put_cursor(self, row: int, *, follow: bool = True) -> None:
        assert self._rows is not None
        key = self._rows.key(row)
        moved = key != self.cursor_key
        old, self.cursor, self.cursor_key = self.cursor, row, key
        if old != row:
            self._refresh_row(old)
            self._refresh_row(row)
        if follow:
            self._keep_in_view()
        if moved:
            self.post_message(self.Moved(self))

    def _refresh_row(self, row: int) -> None:
        top = row * self._height - self.scroll_offset.y
        self.refresh(Region(0, top, self.size.width, self._height))

    def _keep_in_view(self) -> None:
        top, height = self.cursor * self._height, self.scrollable_content_region.height
        if top < self.scroll_offset.y:
            self.scroll_to(y=0 if self._first() else top, animate=False, immediate=True)
        elif top + self._height > self.scroll_offset.y + height:
            self.scroll_to(y=top + self._height - height, animate=False, immediate=True)

    def _first(self) -> bool:
        """Say whether no row above the cursor can have it: then the headings above are shown too."""
        assert self._rows is not None
        return (
            not any(self._rows.key(row) for row in range(min(self.cursor, 8))) if self.cursor < 8 else False
        )

    def on_resize(self, event: events.Resize) -> None:
        """Rows are as wide as the listing."""
        self.forget()
        if self._rows is not None:
            self.virtual_size = Size(event.size.width, len(self._rows) * self._height)
            self._keep_in_view()

    def render_line(self, y: int) -> Strip:
        """Draw one line that is seen."""
        width = self.scrollable_content_region.width
        row, part = divmod(y + self.scroll_offset.y, self._height)
        if self._rows is None or row >= len(self._rows):
            return self.drawn(y, [], width)
        here = row == self.cursor and bool(self.cursor_key)
        lines = self._rows.draw(row, width - (1 if self._marker else 0))
        line = lines[part] if part < len(lines) else []
        back = (CURSOR if self.has_focus else CURSOR_AWAY)[self.app.theme] if here and self._marker else None
        if self._marker:
            line = [((HERE if self.has_focus else HERE_AWAY) if here else " ", "accent"), *line]
        return self.drawn(y, line, width, back)

    def watch_has_focus(self, value: bool) -> None:
        """The cursor looks different where the keys are."""
        super().watch_has_focus(value)
        self._refresh_row(self.cursor)

    def action_move(self, by: int) -> None:
        """Move the cursor to the next row that can have it."""
        self._rests_on_top = False
        if self._rows is None or not len(self._rows):
            return
        row = self.cursor + by
        while 0 <= row < len(self._rows):
            if self._rows.key(row):
                self._put_cursor(row)
                return
            row += by
        self.scroll_to(y=0 if by < 0 else self.max_scroll_y, animate=False, immediate=True)

    def action_page(self, by: int) -> None:
        """Move by what fits."""
        self._rests_on_top = False
        if self._rows is None or not len(self._rows):
            return
        step = max(1, self.scrollable_content_region.height // self._height - 1)
        row = min(max(self.cursor + by * step, 0), len(self._rows) - 1)
        self._put_cursor(self._nearest(row, by))

    def action_jump(self, row: int) -> None:
        """Move to the first or the last row."""
        self._rests_on_top = False
        if self._rows is not None and len(self._rows):
            self._put_cursor(self._nearest(row % len(self._rows), 1 if row == 0 else -1))
            # Rows that came just now can be scrolled to only once they are laid out.
            self.call_after_refresh(self._keep_in_view)

    def on_click(self, event: events.Click) -> None:
        """Put the cursor where the mouse is; twice opens."""
        self._rests_on_top = False
        if self._rows is None:
            return
        row = (event.y + self.scroll_offset.y) // self._height
        if 0 <= row < len(self._rows) and self._rows.key(row):
            self._put_cursor(row)
            if event.chain == 2:
                self.post_message(self.Opened(self))


class Banner(Drawing):
    """Some lines that are made anew whenever they are drawn."""

    DEFAULT_CSS = "Banner { height: auto; background: $background; }"

    def __init__(self, make: Callable[[int], Sequence[Line]], *, id: str, lines: int = 1) -> None:  # noqa: A002
        super().__init__(id=id)
        self._make = make
        self._lines: Sequence[Line] = ()
        self.styles.height = lines

    def again(self) -> None:
        """Draw again if anything is different."""
        # One that is hidden has no width of its own, and must find out that it has something to say.
        width = self.size.width or self.screen.size.width
        lines = self._make(width) if width else ()
        if lines != self._lines:
            self._lines = lines
            if self.styles.height is not None and self.styles.height.value != max(1, len(lines)):
                self.styles.height = max(1, len(lines))
            self.refresh()

    def on_resize(self) -> None:
        """Make the lines for the new width."""
        self.forget()
        self._lines = ()
        self.again()

    def render_line(self, y: int) -> Strip:
        """Draw one line."""
        if y >= len(self._lines):
            return self.drawn(y, [], self.size.width)
        return self.drawn(y, self._lines[y], self.size.width)
