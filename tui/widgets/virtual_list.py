"""A list of any length that draws only its visible rows, and a banner.

The list asks for rows when they come into view.  The cursor stays on its row, by
the row's key, while other rows come and go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import ClassVar, Protocol

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.filter import ANSIToTruecolor
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widget import Widget

from tui.formatting.lines import Line, fit_line, sanitize
from tui.formatting.theme import CURSOR_STYLES, DARK, ROLE_STYLES, UNFOCUSED_CURSOR_STYLES

CURSOR_MARK, UNFOCUSED_CURSOR_MARK = "▌", "▏"
"""The cursor's marks, different without colour too."""


@lru_cache(maxsize=64)
def _role_styles(theme: str, base: Style, *, is_stale: bool) -> Mapping[str, Style]:
    styles = ROLE_STYLES.get(theme, ROLE_STYLES[DARK])
    if is_stale:
        # Alerts stay bright.  The attribute `dim` also works without colour.
        dim = styles["faint"] + Style(dim=True)
        styles = {role: style if role == "alert" else dim for role, style in styles.items()}
    return {role: base + style for role, style in styles.items()}


def _span_style(styles: Mapping[str, Style], role: str) -> Style:
    """Return a role's style; of `ROLE@ACTION`, a click performs the action."""
    name, _, action = role.partition("@")
    style = styles.get(name, styles[""])
    return style + _click_style(action) if action else style


@lru_cache(maxsize=64)
def _click_style(action: str) -> Style:
    return Style(meta={"@click": f"app.perform('{action}')"})


class UncachedStrip(Strip):
    """A strip without a reference to itself.

    Textual's own caches itself as its only part.  Each drawn line would then wait
    for a full garbage collection, which stops the console for a tenth of a second.
    """

    __slots__ = ()

    def divide(self, cuts: Iterable[int]) -> Sequence[Strip]:
        wanted = [cut for cut in cuts if cut <= self.cell_length]
        return [self] if wanted == [self.cell_length] else super().divide(wanted)


class BlankWidget(Widget):
    """A widget with nothing of its own to draw behind its children."""

    def render_lines(self, crop: Region) -> list[Strip]:
        blank, background = Strip.blank(crop.width, self.rich_style), self.background_colors[1]
        for each in self.get_line_filters():
            blank = blank.apply_filter(each, background)
        return [blank] * crop.height


class LineWidget(Widget):
    """A widget that draws lines in the current theme, and caches those that did not change."""

    def __init__(self, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._base_style: tuple[str, Style] = ("", Style())
        self._appearance = ("", False)
        self._strip_cache: dict[int, tuple[Line, int, Style | None, tuple[str, bool], Strip]] = {}

    def render_lines(self, crop: Region) -> list[Strip]:
        """Draw without Textual's style cache: it copies every strip for borders, and there are none."""
        self._appearance = (self.app.theme, self.screen.has_class("-stale"))
        first, last = crop.column_span
        strips = (self.render_line(y) for y in crop.line_range)
        return [
            strip if not first and last >= strip.cell_length else strip.crop(first, last) for strip in strips
        ]

    def clear_line_cache(self) -> None:
        self._strip_cache.clear()

    def render_strip(self, y: int, line: Line, width: int, background: Style | None = None) -> Strip:
        cached = self._strip_cache.get(y)
        if cached is not None and cached[0] == line and cached[1:4] == (width, background, self._appearance):
            return cached[4]
        theme, is_stale = self._appearance
        if self._base_style[0] != theme:
            self._base_style = (theme, self.rich_style)
        ground = self._base_style[1]
        styles = _role_styles(theme, ground if background is None else ground + background, is_stale=is_stale)
        segments = [
            Segment(text, _span_style(styles, role))
            for text, role in fit_line([(sanitize(text), role) for text, role in line], width)
        ]
        strip = self._apply_line_filters(UncachedStrip(segments, width))
        self._strip_cache[y] = (line, width, background, self._appearance, strip)
        return strip

    def _apply_line_filters(self, strip: Strip) -> Strip:
        """Return the strip after the app's filters, such as those for ASCII and NO_COLOR."""
        # The colours of all roles are true colours.
        filters = [each for each in self.get_line_filters() if not isinstance(each, ANSIToTruecolor)]
        if not filters:
            return strip
        background = self.background_colors[1]
        for each in filters:
            strip = strip.apply_filter(each, background)
        return UncachedStrip(strip, strip.cell_length)


class RowSource(Protocol):
    def __len__(self) -> int: ...

    def key(self, row: int) -> str:
        """Return the row's unique key; empty where the cursor cannot be."""
        ...

    def draw(self, row: int, width: int) -> Line: ...


class VirtualList(LineWidget, ScrollView, can_focus=True, inherit_bindings=False):
    """A list with a cursor; only visible rows are drawn."""

    DEFAULT_CSS = """
    VirtualList { background: $background; scrollbar-size-vertical: 1; overflow-x: hidden; overflow-y: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup,ctrl+u,ctrl+b", "page(-1)", show=False),
        Binding("pagedown,ctrl+d,ctrl+f,space", "page(1)", show=False),
        Binding("home,g", "jump(0)", show=False),
        Binding("end,G", "jump(-1)", show=False),
    ]

    class CursorMoved(Message):
        """The cursor moved to a row with another key."""

    class RowOpened(Message):
        """A row was double-clicked."""

    def __init__(
        self,
        *,
        id: str,  # noqa: A002
        pin_cursor_to_top: bool = False,
    ) -> None:
        super().__init__(id=id)
        self.rows: RowSource | None = None
        self._drawn_lines: list[Line] = []
        self._drawn_view = self._rendered_view = (0, 0)
        # The top row is the most urgent one: the cursor stays on it until the user moves the cursor.
        self._pins_cursor_to_top = pin_cursor_to_top
        self.cursor = 0
        self.cursor_key = ""

    def set_rows(self, rows: RowSource) -> None:
        """Show these rows; the cursor stays on its row's key if that still exists."""
        self.rows = rows
        self._set_row_count(len(rows))
        self._restore_cursor()
        self._refresh_changed_lines()

    def _set_row_count(self, count: int) -> None:
        """Set the height of the rows; only a scrollbar that comes or goes needs a new layout."""
        height, before = self.size.height, self.virtual_size.height
        if not height or (count > height) != (before > height):
            self.virtual_size = Size(self.size.width, count)
        elif count != before:
            # Assigned, it would lay out the whole screen again, for each row that comes or goes.
            self.set_reactive(Widget.virtual_size, Size(self.size.width, count))
            self.scroll_y = self.validate_scroll_y(self.scroll_y)
            if count > height:
                self.vertical_scrollbar.window_virtual_size = count

    def _refresh_changed_lines(self) -> None:
        """Draw the visible rows, and refresh those that differ from before."""
        before, view_before = self._drawn_lines, self._drawn_view
        top, width = self._drawn_view = self._view()
        height = self.size.height
        self._drawn_lines = [self._draw_row(row, width) for row in range(top, top + height)]
        if view_before != self._drawn_view or len(before) != height:
            self.refresh()
            return
        changed = [y for y in range(height) if before[y] != self._drawn_lines[y]]
        if changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def _view(self) -> tuple[int, int]:
        """Return the first visible row and the width of the rows."""
        return self.scroll_offset.y, self.scrollable_content_region.width

    def _draw_row(self, row: int, width: int) -> Line:
        return self.rows.draw(row, width - 1) if self.rows is not None and row < len(self.rows) else []

    def limit_height(self, *, fill: bool, min_rows: int = 1) -> None:
        """Fill the container, or limit the height to the rows so that other widgets get the rest."""
        rows = len(self.rows) if self.rows is not None else 0
        wanted = None if fill else max(min_rows, rows)
        height = self.styles.max_height
        if (None if height is None else height.value) != wanted:
            self.styles.max_height = wanted

    def _restore_cursor(self) -> None:
        assert self.rows is not None
        count = len(self.rows)
        if not count:
            self.cursor, self.cursor_key = 0, ""
            return
        position = 0 if self._pins_cursor_to_top else min(self.cursor, count - 1)
        if not self._pins_cursor_to_top and self.cursor_key and self.rows.key(position) != self.cursor_key:
            found = next((row for row in range(count) if self.rows.key(row) == self.cursor_key), None)
            position = position if found is None else found
        self._set_cursor(self._nearest_selectable(position, 1), scroll=False)

    def _nearest_selectable(self, row: int, direction: int) -> int:
        """Return the nearest row with a key, searching in `direction` first."""
        assert self.rows is not None
        searches = [range(row, len(self.rows)), range(row, -1, -1)][::direction]
        return next((each for search in searches for each in search if self.rows.key(each)), row)

    def _set_cursor(self, row: int, *, scroll: bool = True) -> None:
        assert self.rows is not None
        key = self.rows.key(row)
        moved = key != self.cursor_key
        old, self.cursor, self.cursor_key = self.cursor, row, key
        if old != row:
            self._refresh_row(old)
            self._refresh_row(row)
        if scroll:
            self._scroll_to_cursor()
        if moved:
            self.post_message(self.CursorMoved())

    def _refresh_row(self, row: int) -> None:
        self.refresh(Region(0, row - self.scroll_offset.y, self.size.width, 1))

    def _scroll_to_cursor(self) -> None:
        top, height = self.scroll_offset.y, self.scrollable_content_region.height
        if self.cursor < top:
            self.scroll_to(y=0 if self._is_first_selectable() else self.cursor, animate=False, immediate=True)
        elif self.cursor + 1 > top + height:
            self.scroll_to(y=self.cursor + 1 - height, animate=False, immediate=True)

    def _is_first_selectable(self) -> bool:
        """Return whether only headings stand above the cursor, so that they must be visible too."""
        assert self.rows is not None
        return self.cursor < 8 and not any(self.rows.key(row) for row in range(self.cursor))

    def on_resize(self, event: events.Resize) -> None:
        self.clear_line_cache()
        if self.rows is not None:
            self.virtual_size = Size(event.size.width, len(self.rows))
            self._scroll_to_cursor()

    def render_lines(self, crop: Region) -> list[Strip]:
        self._rendered_view = self._view()
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        top, width = view = self._rendered_view
        row = top + y
        if self.rows is None or row >= len(self.rows):
            return self.render_strip(y, [], width)
        mark, background = " ", None
        if row == self.cursor and self.cursor_key:
            mark = CURSOR_MARK if self.has_focus else UNFOCUSED_CURSOR_MARK
            background = (CURSOR_STYLES if self.has_focus else UNFOCUSED_CURSOR_STYLES)[self.app.theme]
        # Textual may draw between a scroll and the next `set_rows`: then the lines are of other rows.
        is_drawn = view == self._drawn_view and y < len(self._drawn_lines)
        line = self._drawn_lines[y] if is_drawn else self._draw_row(row, width)
        return self.render_strip(y, [(mark, "accent"), *line], width, background)

    def watch_has_focus(self, value: bool) -> None:
        super().watch_has_focus(value)
        self._refresh_row(self.cursor)

    def action_move(self, by: int) -> None:
        self._pins_cursor_to_top = False
        if self.rows is None or not len(self.rows):
            return
        row = self.cursor + by
        while 0 <= row < len(self.rows):
            if self.rows.key(row):
                self._set_cursor(row)
                return
            row += by
        self.scroll_to(y=0 if by < 0 else self.max_scroll_y, animate=False, immediate=True)

    def action_page(self, by: int) -> None:
        self._pins_cursor_to_top = False
        if self.rows is None or not len(self.rows):
            return
        step = max(1, self.scrollable_content_region.height - 1)
        row = min(max(self.cursor + by * step, 0), len(self.rows) - 1)
        self._set_cursor(self._nearest_selectable(row, by))

    def action_jump(self, row: int) -> None:
        self._pins_cursor_to_top = False
        if self.rows is not None and len(self.rows):
            self._set_cursor(self._nearest_selectable(row % len(self.rows), 1 if row == 0 else -1))
            # New rows can be scrolled to only after their layout.
            self.call_after_refresh(self._scroll_to_cursor)

    def move_to(self, row: int) -> None:
        """Put the cursor on a row that has a key, and scroll there."""
        self._pins_cursor_to_top = False
        self._set_cursor(row)

    def show_cursor(self, *, at_top: bool) -> None:
        """Scroll to the cursor after rows have moved, or put it on the first row."""
        if at_top:
            self.action_jump(0)
        else:
            self.call_after_refresh(self._scroll_to_cursor)

    def on_click(self, event: events.Click) -> None:
        self._pins_cursor_to_top = False
        if self.rows is None:
            return
        row = event.y + self.scroll_offset.y
        if 0 <= row < len(self.rows) and self.rows.key(row):
            self._set_cursor(row)
            if event.chain == 2:
                self.post_message(self.RowOpened())


class Banner(LineWidget):
    """A few lines that a function makes for the width of the screen."""

    DEFAULT_CSS = "Banner { height: auto; background: $background; }"

    def __init__(self, make_lines: Callable[[int], Sequence[Line]], *, id: str, height: int = 1) -> None:  # noqa: A002
        super().__init__(id=id)
        self._make_lines = make_lines
        self._lines: Sequence[Line] = ()
        self.styles.height = height

    def update_lines(self) -> None:
        # A hidden banner has no width of its own, and still must notice that it has lines to show.
        width = self.size.width or self.screen.size.width
        lines = self._make_lines(width) if width else ()
        if lines != self._lines:
            self._lines = lines
            if self.styles.height is not None and self.styles.height.value != max(1, len(lines)):
                self.styles.height = max(1, len(lines))
            self.refresh()

    def on_resize(self) -> None:
        self.clear_line_cache()
        # Lines that are the same in the new width must be drawn too.
        self._lines = ()
        self.update_lines()

    def render_line(self, y: int) -> Strip:
        return self.render_strip(y, self._lines[y] if y < len(self._lines) else [], self.size.width)
