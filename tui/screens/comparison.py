"""The nodes of a rollout against its canaries: times and changed tasks, outliers first."""

from __future__ import annotations

from collections.abc import Iterator

from rolloutd.control import response_text, wire
from tui.formatting import formatting, lines
from tui.formatting.glyphs import PHASE_GLYPHS
from tui.formatting.lines import Line, fit
from tui.screens.page import Item, RolloutScreen, heading, note_row, static_line

REFRESH_INTERVAL_S = 5.0


class ComparisonPage(RolloutScreen):
    screen_name = "comparison"

    def __init__(self, rollout: str) -> None:
        super().__init__(rollout)
        self._comparison: wire.Comparison | None = None
        self._error = ""

    def on_mount(self) -> None:
        self._start_fetch()
        # The times of nodes in flight grow.
        self.set_interval(REFRESH_INTERVAL_S, self._start_fetch)

    def breadcrumb(self) -> str:
        return f"▸ {self.rollout_id} ▸ canaries"

    def _start_fetch(self) -> None:
        if not self.console.is_stale:
            self.run_worker(self._fetch(), group="comparison", exclusive=True)

    async def _fetch(self) -> None:
        response = await self.console.fetch_path("rollouts", self.rollout_id, "comparison")
        self._comparison = response.result or self._comparison
        self._error = str(response.error or response.unreachable or "")
        self.update_view()

    def build_items(self) -> Iterator[Item]:
        found = self._comparison
        if found is None:
            yield note_row(lines.sanitize(self._error) or "loading")
            return
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
