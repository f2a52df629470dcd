"""Which node has which change, across rollouts: by change, with its groups and the nodes without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rolloutd.control import wire_fleet
from tui.formatting import formatting, lines
from tui.formatting.lines import Line, fit
from tui.screens.page import Item, Page, heading, note_row, static_line

REFRESH_INTERVAL_S = 30.0
"""The matrix covers the whole fleet and all rollouts, so it is not fetched with each event."""

SHORT_HASH = 12
"""Characters of a change's hash: enough to tell a plan's changes apart."""

ROLES = {"drifted": "warn", "failed": "bad", "never": "dim", "done": "ok"}


class ChangesPage(Page):
    screen_name = "changes"

    def __init__(self) -> None:
        super().__init__()
        self._changes: wire_fleet.Changes | None = None
        self._error = ""

    def on_mount(self) -> None:
        self._start_fetch()
        self.set_interval(REFRESH_INTERVAL_S, self._start_fetch)

    def breadcrumb(self) -> str:
        return "▸ changes"

    def _start_fetch(self) -> None:
        if not self.console.is_stale:
            self.run_worker(self._fetch(), group="changes", exclusive=True)

    async def _fetch(self) -> None:
        response = await self.console.fetch_path("changes")
        self._changes = response.result or self._changes
        self._error = str(response.error or response.unreachable or "")
        self.update_view()

    def build_items(self) -> Iterator[Item]:
        if self._changes is None:
            yield note_row(lines.sanitize(self._error) or "loading")
            return
        for change in self._changes["changes"]:
            yield from _change_items(change)
        if not self._changes["changes"]:
            yield note_row("no rollout has been submitted")


def _change_items(change: wire_fleet.Change) -> Iterator[Item]:
    key = f"{change['plan']} {change['change'][:SHORT_HASH]}"
    yield heading(key, formatting.format_percent(change["percent"]).lstrip())
    counts = Counter(node["state"] for node in change["nodes"])
    counted: Line = [("  ", "")]
    for state, number in counts.items():
        counted.append((f"{number} {state}  ", ROLES.get(state, "")))
    yield f"{key} counts", static_line(counted)
    for group in change["groups"]:
        done = f"{group['done']}/{group['total']}"
        row: Line = [
            ("  ", ""),
            (fit(group["group"], 32), "bold"),
            (f"{formatting.format_percent(group['percent'])}  ", ""),
            (done, "dim"),
        ]
        yield f"{key} {group['group']}", static_line(row)
    for state in ("drifted", "failed", "never"):
        names = [node["node"] for node in change["nodes"] if node["state"] == state]
        if names:
            text = f"{formatting.pluralize(len(names), 'node')}: {', '.join(names)}"
            yield f"{key} {state}", static_line([("  ", ""), (fit(state, 32), ROLES[state]), (text, "")])
