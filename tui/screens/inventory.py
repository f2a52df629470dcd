"""Inventory sources with the nodes whose sources conflict, and the verdicts on content that failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rolloutd.control.fleet import wire_fleet
from rolloutd.control.plans import wire_plans
from rolloutd.texts import formats
from tui.formatting import formatting, lines
from tui.formatting.lines import Line, column
from tui.operations.confirm import Selection
from tui.screens.fetched import FetchedPage
from tui.screens.page import Item, heading, note_row
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
        names = lines.column_width(each["source"] for each in found["sources"])
        for source in found["sources"]:
            yield f"source:{source['source']}", _source_row(source, names, self.console.now())
        conflicting = [node for node in found["nodes"] if node["conflicts"]]
        quarantined = sum(node["quarantined"] for node in conflicting)
        note = f"{len(conflicting)} of {formats.pluralize(len(found['nodes']), 'node')}"
        yield heading("CONFLICTS", f"{note}, {quarantined} quarantined (✗): they do not start")
        names = lines.column_width(node["node"] for node in conflicting)
        for node in conflicting:
            for number, conflict in enumerate(node["conflicts"]):
                mark, role = ("! ", "warn") if conflict["warning"] else ("✗ ", "bad")
                age = formatting.format_age(parse_timestamp(conflict["since"]), self.console.now())
                row = (mark, node["node"], f"{conflict['kind']}: {conflict['text']}", role)
                yield f"node:{node['node']}:{number}", _row(row, names, f" {age} ")
        if not conflicting:
            yield note_row("the sources agree")


def _source_row(
    source: wire_fleet.InventorySourceStatus, name_width: int, now: float
) -> Callable[[int], Line]:
    held = source["held"]
    if held is not None:
        names = formats.join_limited(held["removed"], MAX_NAMED_NODES)
        role, state = "bad", f"held: an answer removes {len(held['removed'])} of {held['known']}: {names}"
    elif source["stale"]:
        role, state = "bad", f"stale: no node of it starts: {source['error'] or 'no answer'}"
    elif source["error"]:
        role, state = "warn", f"failing: {source['error']}"
    else:
        role, state = "ok", "fresh"
    age = formatting.format_age(parse_timestamp(source["refreshed_at"]), now)
    right = f" {formats.pluralize(source['nodes'], 'node')}, {age} "
    return _row(("  ", source["source"], state, role), name_width, right)


def _row(parts: tuple[str, str, str, str], name_width: int, right: str) -> Callable[[int], Line]:
    """Return a row of a mark, a name, a text and its role; the text matters more than what is right of it."""
    mark, name, text, role = parts

    def draw(width: int) -> Line:
        left: Line = [(f"  {mark}", role), (column(name, name_width + 1, width), "bold")]
        left.append((lines.shorten(lines.sanitize(text), width - lines.line_width(left)), role))
        fits = lines.line_width(left) + len(right) <= width
        return lines.justify(left, [(right, "dim")] if fits else [], width)

    return draw


class VerdictsPage(FetchedPage):
    """The content that failed on a node by its own fault, and is not submitted there again."""

    screen_name = "verdicts"
    refresh_interval_s = 10.0
    """A verdict is recorded with a failed node, minutes apart."""

    def __init__(self) -> None:
        super().__init__("verdicts")

    def object_under_cursor(self) -> tuple[str, Any] | None:
        verdicts = self._found["verdicts"] if self._found is not None else ()
        verdict = next((each for each in verdicts if each["id"] == self.body.cursor_key), None)
        return None if verdict is None else (f"verdict {verdict['id']}", verdict)

    def found_items(self, found: wire_plans.Verdicts) -> Iterator[Item]:
        yield heading("VERDICTS", str(len(found["verdicts"])) if found["verdicts"] else "none")
        if found["verdicts"]:
            yield note_row("a submit of this content is refused until")
            yield note_row("rolloutctl verdicts clear ID --reason TEXT")
        else:
            yield note_row("no content failed by its own fault, so none is refused")
        names = lines.column_width(each["id"] for each in found["verdicts"])
        for verdict in reversed(found["verdicts"]):
            age = formatting.format_age(parse_timestamp(verdict["at"]), self.console.now())
            text = (
                f"{verdict['node']} ({verdict['class'] or 'all nodes'}) {verdict['step']}: {verdict['text']}"
            )
            yield verdict["id"], _row(("✗ ", verdict["id"], text, "bad"), names, f" {age} ")
