"""Who did what: the audit from its latest entry backwards, and whether it is whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from textual.widget import Widget

from rolloutd.control import sentences
from tui import lines, wording
from tui.lines import Line, fit
from tui.listing import Banner, Listing
from tui.page import Page

FIRST = 500
"""Entries asked for at first, and with each step further back."""

KEPT = 20_000
"""Entries kept while this is open; rolloutctl audit reads further back."""


class AuditPage(Page):
    """Entries, the latest first."""

    place = "audit"

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.entries: list[Mapping[str, Any]] = []
        self.verdict: Line = []
        self._first: int | None = None
        self._is_asking = False

    def body(self) -> Iterator[Widget]:
        """Yield the heading and the entries."""
        yield Banner(self._head, id="head")
        yield Listing(id="body")

    def redraw(self) -> None:
        """Take the entries that came by the stream, and list what is meant."""
        if self._first is None and self.console.model.seq >= 0:
            self._ask_before(self.console.model.seq + 1)
        latest = self.entries[0]["seq"] if self.entries else -1
        if self.entries:
            fresh = []
            for entry in reversed(self.console.model.entries):
                if entry["seq"] <= latest:
                    break
                fresh.append(entry)
            if fresh and fresh[-1]["seq"] > latest + 1:
                # While this was covered more has happened than the console keeps: a gap must not look whole.
                self.entries, self._first = [], None
            elif fresh:
                self.entries = [*fresh, *self.entries][:KEPT]
        self.query_one("#body", Listing).show(EntryRows(self._shown()))
        self.query_one("#head", Banner).again()

    def on_listing_moved(self, message: Listing.Moved) -> None:
        """Ask for earlier entries when the last one is near."""
        rows = message.listing.rows
        near = rows is not None and message.listing.cursor > len(rows) - 20
        if near and self._first is not None and self._first > 1 and len(self.entries) < KEPT:
            self._ask_before(self._first)

    def do_open(self) -> None:
        """Go to the node or the rollout of the entry under the cursor."""
        key = self.query_one("#body", Listing).cursor_key
        entry = next((each for each in self.entries if str(each["seq"]) == key), None)
        if entry is None or not entry["rollout"]:
            return
        if entry["node"]:
            self.console.open_node(entry["rollout"], entry["node"])
        else:
            self.console.open_rollout(entry["rollout"])

    def whole(self) -> tuple[str, str] | None:
        """Return an entry as it was written, with its sentence."""
        key = self.query_one("#body", Listing).cursor_key
        entry = next((each for each in self.entries if str(each["seq"]) == key), None)
        if entry is None:
            return None
        who = f"{wording.day_and_hour(entry['at'])} {sentences.actor(entry)}"
        fields = json.dumps(dict(entry), indent=2, ensure_ascii=False)
        return f"entry {entry['seq']}: {who}", f"{sentences.sentence(entry)}\n\n{fields}"

    def do_find(self) -> None:
        """Ask which entries are meant."""
        self.console.ask_text("show entries that contain", self.text, self._find)

    def do_verify(self) -> None:
        """Have the chain checked."""
        self.verdict = [("checking every entry …", "dim")]
        self.run_worker(self._verify(), group="verify")
        self.changed()

    def _find(self, text: str) -> None:
        self.text = text
        self.changed()

    async def _verify(self) -> None:
        said = await self.console.ask_path("audit", "verify")
        if said.answer is not None:
            whole = said.answer["ok"]
            self.verdict = [
                ("✓ whole: " if whole else "✗ NOT WHOLE: ", "ok" if whole else "bad"),
                (said.answer["message"], ""),
            ]
        else:
            self.verdict = [(str(said.refused or said.silent), "bad")]
        self.changed()

    def _ask_before(self, seq: int) -> None:
        if not self._is_asking:
            self._is_asking = True
            self.run_worker(self._ask(seq), group="entries")

    async def _ask(self, seq: int) -> None:
        after = max(0, seq - 1 - FIRST)
        said = await self.console.ask_path("audit", after=after, limit=FIRST)
        self._is_asking = False
        if said.answer is None:
            return
        found = [each["entry"] for each in said.answer["entries"] if each["seq"] < seq]
        self._first = after + 1
        self.entries += found[::-1]
        self.changed()

    def _shown(self) -> Sequence[Mapping[str, Any]]:
        words = self.text.lower().split()
        return (
            [each for each in self.entries if all(word in _words(each) for word in words)]
            if words
            else self.entries
        )

    def _head(self, width: int) -> Sequence[Line]:
        rows = self.query_one("#body", Listing).rows
        shown = wording.count(0 if rows is None else len(rows), "entry", "entries")
        text = f" containing “{self.text}”" if self.text else ", the latest first"
        return [[(f" {shown}{text}   ", "head"), *self.verdict]]


def _words(entry: Mapping[str, Any]) -> str:
    who, what = sentences.actor(entry), sentences.sentence(entry)
    return f"{entry['event']} {who} {entry['rollout']} {entry['node']} {what}".lower()


class EntryRows:
    """A line per entry, drawn when it is seen."""

    def __init__(self, entries: Sequence[Mapping[str, Any]]) -> None:
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    def key(self, row: int) -> str:
        """Return the entry's number."""
        return str(self._entries[row]["seq"])

    def draw(self, row: int, width: int) -> Sequence[Line]:
        """Return the entry's line."""
        entry = self._entries[row]
        wide = width >= 110
        at = wording.day_and_hour(entry["at"]) if wide else wording.hour(entry["at"])
        node = f"{entry['node']}: " if entry["node"] else ""
        line: Line = [
            (f"{entry['seq']:>7} ", "faint"),
            (f"{at}  ", "dim"),
            (fit(sentences.actor(entry), 10), "accent"),
            (" ", ""),
        ]
        if wide:
            line.append((fit(entry["rollout"] or "", 24) + " ", "dim"))
        return ([*line, (node, "bold"), (lines.clean(sentences.sentence(entry)), wording.tone(entry))],)
