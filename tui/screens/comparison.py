"""The nodes of a rollout against its canaries: times and changed tasks, outliers first."""

from __future__ import annotations

from collections.abc import Iterator

from rolloutd.control import response_text, wire
from tui.formatting import formatting, lines
from tui.formatting.glyphs import PHASE_GLYPHS
from tui.formatting.lines import Line, fit
from tui.screens.page import FetchedPage, Item, heading, note_row, static_line


class ComparisonPage(FetchedPage):
    screen_name = "comparison"
    refresh_interval_s = 5.0
    """The times of nodes in flight grow."""

    def __init__(self, rollout: str) -> None:
        super().__init__("rollouts", rollout, "comparison")
        self.rollout_id = rollout

    def breadcrumb(self) -> str:
        return f"▸ {self.rollout_id} ▸ canaries"

    def found_items(self, found: wire.Comparison) -> Iterator[Item]:
        outliers = sum(bool(response_text.describe_outlier(each)) for each in found["nodes"])
        count = formatting.pluralize(outliers, "outlier") if found["canaries"] else ""
        yield heading("NODES OF NOW", count)
        for each in found["nodes"]:
            yield _node_row(each)
        if not found["nodes"]:
            yield note_row("no other node is in flight or changed")
        yield heading("CANARIES", response_text.describe_canaries(found))
        for each in found["canaries"]:
            yield _node_row(each)
        if found["omitted"]:
            yield note_row(f"{formatting.pluralize(found['omitted'], 'more node')} not compared")

    def do_open(self) -> None:
        if self.body.cursor_key:
            self.console.open_node(self.rollout_id, self.body.cursor_key)


def _node_row(node: wire.ComparedNode) -> Item:
    glyph, role = PHASE_GLYPHS.get(node["phase"], ("?", "warn"))
    outlier = response_text.describe_outlier(node)
    tasks = node["changed_tasks"]
    changed = "no log" if tasks is None else f"{len(tasks)} changed"
    line: Line = [
        (f" {'!' if outlier else ' '} ", "warn"),
        (f"{glyph} ", role),
        (fit(node["node"], 16), "bold"),
        (f"{formatting.format_clock(node['seconds']):>8}  ", "warn" if node["time"] != "usual" else ""),
        (fit(changed, 12), "dim"),
        (lines.sanitize(outlier), "warn"),
    ]
    return node["node"], static_line(line)
