"""The audit from its latest entry backwards, and the check of its chain."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from textual.widget import Widget

from rolloutd.texts import event_text, formats
from tui.formatting import formatting, lines
from tui.formatting.lines import Line, column, fit_name, shorten
from tui.screens.page import LazyRows, Page
from tui.widgets.virtual_list import Banner, VirtualList

PAGE_SIZE = 500

MAX_ENTRIES = 20_000
"""Entries kept while the page is open; `rolloutctl audit` reads further back."""

PREFETCH_ROWS = 20
"""Rows before the last one at which the page fetches earlier entries."""

MAX_RESULT_LINES = 4
"""Lines for the result of the check on a narrow screen."""


class AuditPage(Page):
    screen_name = "audit"
    shows_entries = True
    filter_label = "show entries that contain"

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Mapping[str, Any]] = []
        self.verify_result: Line = []
        self._earliest_seq: int | None = None
        self._is_fetching = False

    def compose_body(self) -> Iterator[Widget]:
        yield Banner(self._render_head, id="head")
        yield VirtualList(id="body")

    def update_body(self) -> None:
        """Add the entries that came with the stream, and list those that match the filter."""
        model = self.console.model
        if self._earliest_seq is None and model.seq >= 0:
            # An entry of the stream may be newer than the last status.
            self._request_entries_before(max(model.seq, model.last_received_seq) + 1)
        if self.entries:
            latest = self.entries[0]["seq"]
            newest = reversed(model.entries)
            fresh = list(takewhile(lambda entry: entry["seq"] > latest, newest))
            if fresh and fresh[-1]["seq"] > latest + 1:
                # While another page was open, more entries came than the model keeps: start again.
                self.entries, self._earliest_seq = [], None
            elif fresh:
                self.entries = [*fresh, *self.entries][:MAX_ENTRIES]
        shown: Sequence[Mapping[str, Any]] = self.entries
        if self.filter_text:
            shown = [each for each in shown if formatting.matches(_search_text(each), self.filter_text)]
        self.body.set_rows(LazyRows(shown, lambda entry: str(entry["seq"]), _entry_line))
        self.query_one("#head", Banner).update_lines()

    def on_virtual_list_cursor_moved(self) -> None:
        rows, earliest = self.body.rows, self._earliest_seq
        if rows is None or earliest is None or self.body.cursor <= len(rows) - PREFETCH_ROWS:
            return
        if earliest > 1 and len(self.entries) < MAX_ENTRIES:
            self._request_entries_before(earliest)

    def do_open(self) -> None:
        entry = self._selected_entry()
        if entry is None or not entry["rollout"]:
            self.console.show_message("open: no rollout has this entry; w shows it in full")
        elif entry["node"]:
            self.console.open_page("node", entry["rollout"], entry["node"])
        else:
            self.console.open_page("rollout", entry["rollout"])

    def object_under_cursor(self) -> tuple[str, Any] | None:
        entry = self._selected_entry()
        return None if entry is None else (f"entry {entry['seq']}", dict(entry))

    def full_text(self) -> tuple[str, str] | None:
        entry = self._selected_entry()
        if entry is None:
            return None
        who = f"{formatting.format_datetime(entry['at'])} {event_text.actor_name(entry)}"
        fields = json.dumps(dict(entry), indent=2, ensure_ascii=False)
        return f"entry {entry['seq']}: {who}", f"{event_text.describe_event(entry)}\n\n{fields}"

    def _selected_entry(self) -> Mapping[str, Any] | None:
        key = self.body.cursor_key
        return next((each for each in self.entries if str(each["seq"]) == key), None)

    def do_verify(self) -> None:
        self.verify_result = [("checking every entry …", "dim")]
        self.run_worker(self._verify(), group="verify")
        self.update_view()

    async def _verify(self) -> None:
        response = await self.console.fetch_path("audit", "verify")
        if response.result is not None:
            is_intact = response.result["ok"]
            self.verify_result = [
                ("✓ intact: " if is_intact else "✗ NOT INTACT: ", "ok" if is_intact else "bad"),
                (response.result["message"], ""),
            ]
        else:
            self.verify_result = [(str(response.error or response.unreachable), "bad")]
        self.update_view()

    def _request_entries_before(self, seq: int) -> None:
        if not self._is_fetching:
            self._is_fetching = True
            self.run_worker(self._fetch_entries_before(seq), group="entries")

    async def _fetch_entries_before(self, seq: int) -> None:
        response = await self.console.fetch_path("audit", before=seq, limit=PAGE_SIZE)
        self._is_fetching = False
        if response.result is None:
            return
        found = [each["entry"] for each in response.result["entries"]]
        self._earliest_seq = found[0]["seq"] if found else 0
        self.entries += found[::-1]
        self.update_view()

    def _render_head(self, width: int) -> Sequence[Line]:
        rows = self.body.rows
        shown = formats.pluralize(0 if rows is None else len(rows), "entry", "entries")
        head: Line = [(f" {shown}, the latest first   ", "head"), *self.verify_result]
        if lines.line_width(head) <= width or not self.verify_result:
            return [head]
        # The result of the check in full: what is not intact must not be cut.
        role = self.verify_result[0][1]
        result = lines.wrap_text(lines.line_text(self.verify_result), width - 2, MAX_RESULT_LINES)
        return [head[:1], *([(f" {line}", role)] for line in result)]


def _search_text(entry: Mapping[str, Any]) -> str:
    who, what = event_text.actor_name(entry), event_text.describe_event(entry)
    return f"{entry['event']} {who} {entry['rollout']} {entry['node']} {what}"


def _entry_line(entry: Mapping[str, Any], width: int) -> Line:
    wide = width >= 110
    at = formatting.format_datetime(entry["at"]) if wide else formatting.format_time(entry["at"])
    line: Line = [
        (f"{entry['seq']:>7} ", "faint"),
        (f"{at}  ", "dim"),
        (column(event_text.actor_name(entry), 11, width), "accent"),
        (column(entry["rollout"] or "", 25, width) if wide else "", "dim"),
    ]
    node, what = entry["node"] or "", lines.sanitize(event_text.describe_event(entry))
    room = width - lines.line_width(line)
    if node and len(node) + 2 + len(what) > room:
        node = fit_name(node, lines.MAX_WORD_WIDTH, pad=False)
    line.append((f"{node}: " if node else "", "bold"))
    return [*line, (shorten(what, room - len(node) - 2), formatting.entry_role(entry))]
