"""Inventory sources with the nodes whose sources conflict, and the verdicts on content that failed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rolloutd.control import wire_fleet, wire_plans
from tui.formatting import formatting, lines
from tui.formatting.lines import Line, fit
from tui.operations.confirm import Selection
from tui.screens.fetched import FetchedPage
from tui.screens.page import Item, heading, note_row, static_line
from tui.state.values import parse_timestamp

MAX_NAMED_NODES = 10
"""Nodes of a held answer that are named; YAML has all."""


class InventoryPage(FetchedPage):
    """The inventory sources and their age, held answers, and the nodes that conflicts quarantine."""

    screen_name = "inventory"
    refresh_interval_s = 10.0
    """Sources are read every minutes."""

    def __init__(self) -> None:
        super().__init__("inventory")

    def selection(self) -> Selection:
        kind, _, name = self.body.cursor_key.partition(":")
        return Selection(node_name=name.partition(":")[0] if kind == "node" else "")

    def object_under_cursor(self) -> tuple[str, Any] | None:
        kind, _, name = self.body.cursor_key.partition(":")
        sources = self._found["sources"] if self._found is not None and kind == "source" else ()
        source = next((each for each in sources if each["source"] == name), None)
        return (name, source) if source is not None else super().object_under_cursor()

    def found_items(self, found: wire_fleet.Inventory) -> Iterator[Item]:
        yield heading("SOURCES", str(len(found["sources"])))
        for source in found["sources"]:
            yield f"source:{source['source']}", static_line(_source_line(source, self.console.now()))
        conflicting = [node for node in found["nodes"] if node["conflicts"]]
        quarantined = sum(node["quarantined"] for node in conflicting)
        note = f"{len(conflicting)} of {formatting.pluralize(len(found['nodes']), 'node')}"
        yield heading("CONFLICTS", f"{note}, {quarantined} quarantined: they do not start")
        for node in conflicting:
            for number, conflict in enumerate(node["conflicts"]):
                key = f"node:{node['node']}:{number}"
                yield key, static_line(_conflict_line(node["node"], conflict, self.console.now()))
        if not conflicting:
            yield note_row("the sources agree")


def _source_line(source: wire_fleet.InventorySourceStatus, now: float) -> Line:
    held = source["held"]
    if held is not None:
        names = formatting.join_limited(held["removed"], MAX_NAMED_NODES)
        role, state = "bad", f"held: an answer removes {len(held['removed'])} of {held['known']}: {names}"
    elif source["stale"]:
        role, state = "bad", f"stale: no node of it starts: {source['error'] or 'no answer'}"
    elif source["error"]:
        role, state = "warn", f"failing: {source['error']}"
    else:
        role, state = "ok", "fresh"
    age = formatting.format_age(parse_timestamp(source["refreshed_at"]), now)
    return [
        ("  ", ""),
        (fit(source["source"], 28), "bold"),
        (fit(formatting.pluralize(source["nodes"], "node"), 13), ""),
        (fit(age, 10), "dim"),
        (lines.sanitize(state), role),
    ]


def _conflict_line(node: str, conflict: wire_fleet.NodeConflict, now: float) -> Line:
    role, effect = ("warn", "warning") if conflict["warning"] else ("bad", "quarantined")
    age = formatting.format_age(parse_timestamp(conflict["since"]), now)
    return [
        ("  ", ""),
        (fit(node, 20), "bold"),
        (fit(effect, 12), role),
        (fit(age, 10), "dim"),
        (lines.sanitize(f"{conflict['kind']}: {conflict['text']}"), ""),
    ]


class VerdictsPage(FetchedPage):
    """The content that failed on a node by its own fault, and is not submitted there again."""

    screen_name = "verdicts"
    refresh_interval_s = 10.0
    """A verdict is recorded with a failed node, minutes apart."""

    def __init__(self) -> None:
        super().__init__("verdicts")

    def object_under_cursor(self) -> tuple[str, Any] | None:
        verdicts = self._found["verdicts"] if self._found is not None else ()
        found = next((each for each in verdicts if each["id"] == self.body.cursor_key), None)
        return None if found is None else (f"verdict {found['id']}", found)

    def found_items(self, found: wire_plans.Verdicts) -> Iterator[Item]:
        note = "a submit of this content is refused; rolloutctl verdicts clear ID --reason TEXT"
        yield heading("VERDICTS", note if found["verdicts"] else "none")
        for verdict in reversed(found["verdicts"]):
            age = formatting.format_age(parse_timestamp(verdict["at"]), self.console.now())
            line: Line = [
                ("  ✗ ", "bad"),
                (fit(verdict["id"], 28), "bold"),
                (fit(age, 10), "dim"),
                (f"{verdict['node']} ", ""),
                (f"({lines.sanitize(verdict['class'] or 'all nodes')}) ", "dim"),
                (lines.sanitize(f"{verdict['step']}: {verdict['text']}"), "bad"),
            ]
            yield verdict["id"], static_line(line)
