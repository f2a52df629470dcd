"""A text as a page of lines, and the search in lines that it shares with the log."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.cells import cell_len, chop_cells

from rolloutd.texts import formats
from tui.formatting.lines import UNCUT_WIDTH, Line, line_text, mark_matches, sanitize
from tui.screens.page import LazyRows, Page
from tui.widgets.virtual_list import VirtualList

CUT = "(no more: rolloutctl prints all of it)"

MAX_LINES = 100_000
"""Lines of a text, some megabytes."""


class SearchablePage(Page):
    """A page with a list of lines: a user searches in it as in less, copies it and saves it."""

    search_text = ""

    @property
    def searched(self) -> VirtualList:
        return self.body

    def whole_text(self) -> tuple[str, str]:
        """Return a file name for the lines, and all of them."""
        raise NotImplementedError

    def mark(self, line: Line) -> Line:
        return mark_matches(line, self.search_text)

    def do_search(self) -> None:
        self.console.prompt_text("search for", self.search_text, self._search)

    def _search(self, text: str) -> None:
        self.search_text = text
        self.update_view()
        if text:
            self.set_focus(self.searched)
            self._go_to_match(1, includes_cursor=True)

    def _go_to_match(self, direction: int, *, includes_cursor: bool = False) -> None:
        rows, cursor = self.searched.rows, self.searched.cursor
        if not self.search_text or rows is None:
            self.console.show_message("nothing is searched for: / searches")
            return
        wanted, count = self.search_text.lower(), len(rows)
        for distance in range(0 if includes_cursor else 1, count + 1):
            row = cursor + direction * distance
            if wanted in line_text(rows.draw(row % count, UNCUT_WIDTH)).lower():
                self.searched.move_to(row % count)
                if not 0 <= row < count:
                    self.console.show_message("the search continues at the other end")
                return
        self.console.show_message(f"no line contains “{self.search_text}”")

    def do_next_match(self) -> None:
        self._go_to_match(1)

    def do_previous_match(self) -> None:
        self._go_to_match(-1)

    def do_copy(self) -> None:
        text = self.whole_text()[1]
        self.app.copy_to_clipboard(text)
        count = formats.pluralize(len(text.splitlines()), "line")
        self.console.show_message(f"copied {count} to the terminal's clipboard")

    def do_save(self) -> None:
        name, text = self.whole_text()
        if self.app.is_web:
            self.app.deliver_text(io.StringIO(text), save_filename=name)
        else:
            self.console.prompt_text("save as", name, self._save)

    def _save(self, name: str) -> None:
        path = Path(name).expanduser().absolute()
        text = self.whole_text()[1]
        try:
            # Only a new file: a typing error must not replace another one.
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            self.console.show_message(f"{path}: {error.strerror}; save it under another name", "error")
        else:
            count = formats.pluralize(len(text.splitlines()), "line")
            self.console.show_message(f"saved {count} as {path}")


class TextPage(SearchablePage):
    """A text whose long lines are wrapped; it shows `loading` until its text has come."""

    screen_name = "text"
    filter_label = ""

    def __init__(self, title: str, text: str | None = None) -> None:
        super().__init__()
        self._title = title
        self._lines: Sequence[str] = ["loading"]
        self._wrapped: tuple[object, Sequence[str]] = (None, ())
        if text is not None:
            self.show_text(text)

    def show_text(self, text: str) -> None:
        text_lines = [sanitize(line.expandtabs()) for line in text.splitlines()]
        self._lines = text_lines if len(text_lines) <= MAX_LINES else [*text_lines[:MAX_LINES], CUT]
        self.update_view()

    def breadcrumb(self) -> str:
        return f"▸ {sanitize(self._title)}"

    def whole_text(self) -> tuple[str, str]:
        name = re.sub("[^a-zA-Z0-9.]+", "-", self._title)
        return f"{name}.txt", "".join(f"{line}\n" for line in self._lines)

    def update_body(self) -> None:
        # A list keeps a column for its cursor, and a page of a text is read at its left edge.
        width = max(20, self.body.scrollable_content_region.width - 2)
        if self._wrapped[0] != (id(self._lines), width):
            wrapped = [part for line in self._lines for part in _wrap(line, width)]
            self._wrapped = ((id(self._lines), width), wrapped)
        rows = range(len(self._wrapped[1]))
        self.body.set_rows(LazyRows(rows, str, lambda row, _width: self.mark([(self._wrapped[1][row], "")])))


def _wrap(line: str, width: int) -> Iterable[str]:
    if cell_len(line) <= width:
        return (line,)
    if not line.isascii():
        return chop_cells(line, width)
    # The rest of a line stands under its beginning and right of it, so that YAML and lists keep their form.
    indent = " " * min(len(line) - len(line.lstrip(" -")) + 2, width // 2)
    return textwrap.wrap(
        line, width, subsequent_indent=indent, replace_whitespace=False, break_on_hyphens=False
    )
