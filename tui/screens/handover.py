"""The handover: what changed since the user last looked, who decided, and what waits."""

from __future__ import annotations

from collections.abc import Iterator

from rolloutd import event_text
from rolloutd.control import response_text, wire_fleet
from tui.formatting import formatting, lines
from tui.formatting.lines import Line, fit
from tui.screens.page import FetchedPage, Item, heading, note_row, static_line
from tui.state.values import parse_timestamp
from tui.widgets import summaries

MIN_NAME_WIDTH, MAX_NAME_WIDTH = 12, 40
"""Bounds for the column of rollout names."""


class HandoverPage(FetchedPage):
    """What happened from `since` on."""

    screen_name = "handover"

    def __init__(self, since: str) -> None:
        super().__init__("handover", since=since)

    def found_items(self, found: wire_fleet.Handover) -> Iterator[Item]:
        since = parse_timestamp(found["since"]) or 0.0
        age = formatting.format_age(since, self.console.now())
        waiting = [each for each in found["rollouts"] if response_text.describe_wait(each)]
        yield heading("WAITS", "nothing" if not waiting else str(len(waiting)))
        for each in waiting:
            yield _rollout_row(f"wait:{each['rollout']}", each, response_text.describe_wait(each))
        yield heading("CHANGED", f"since {formatting.format_datetime(since)}, {age}")
        for each in found["rollouts"]:
            yield _rollout_row(f"change:{each['rollout']}", each, response_text.describe_change(each))
        if not found["rollouts"]:
            yield note_row("no rollout is live, and none was closed since then")
        yield heading("DECISIONS", str(len(found["decisions"])) if found["decisions"] else "none")
        for decided in reversed(found["decisions"]):
            yield _decision_row(decided)
        if found["omitted"]:
            yield note_row("older ones are left out; 4 shows the audit")

    def do_open(self) -> None:
        _, _, rollout = self.body.cursor_key.partition(":")
        if rollout:
            self.console.open_rollout(rollout)


def _rollout_row(key: str, each: wire_fleet.HandoverRollout, text: str) -> Item:
    skipped = each["reason"] is not None and each["reason"]["code"] == "done-with-exceptions"
    glyph, role = summaries.state_glyph(each["state"], int(skipped))
    percent = formatting.format_percent(each["percent"])

    def draw(width: int) -> Line:
        name = fit(each["rollout"], min(MAX_NAME_WIDTH, max(MIN_NAME_WIDTH, width // 3)))
        return [(f"  {glyph} ", role), (name, "bold"), (f" {percent}  ", "dim"), (lines.sanitize(text), "")]

    return key, draw


def _decision_row(decided: wire_fleet.AuditEntry) -> Item:
    entry = decided["entry"]
    at = formatting.format_time(parse_timestamp(decided["at"]) or 0.0)
    line: Line = [
        (f"  {at}  ", "dim"),
        (fit(event_text.actor_name(entry), 12), "bold"),
        (lines.sanitize(event_text.describe_entry(entry)), formatting.entry_role(entry)),
    ]
    return f"entry:{entry['rollout'] or ''}", static_line(line)
