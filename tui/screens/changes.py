"""Which node has which change, across rollouts: by change, with its groups and the nodes without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rolloutd.control import wire_fleet
from tui.formatting import formatting
from tui.formatting.lines import Line, fit
from tui.screens.page import FetchedPage, Item, heading, note_row, static_line

SHORT_HASH = 12
"""Characters of a change's hash: enough to tell a plan's changes apart."""

ROLES = {"drifted": "warn", "failed": "bad", "never": "dim", "done": "ok"}


class ChangesPage(FetchedPage):
    screen_name = "changes"
    refresh_interval_s = 30.0
    """The matrix covers the whole fleet and all rollouts, so it is not fetched with each event."""

    def __init__(self) -> None:
        super().__init__("changes")

    def found_items(self, found: wire_fleet.Changes) -> Iterator[Item]:
        for change in found["changes"]:
            yield from _change_items(change)
        if not found["changes"]:
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
