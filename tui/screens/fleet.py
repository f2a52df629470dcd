"""All rollouts: progress, status in one sentence, and the gates that need the user's vote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partialmethod

from rolloutd.control.rollouts import wire
from rolloutd.texts import formats
from rolloutd.texts.formats import format_exceptions
from tui.formatting import formatting, lines
from tui.formatting.lines import Line, column, fit
from tui.operations.confirm import Selection
from tui.screens.page import GATE_GLYPHS, Item, Page, find_pending_gate, heading, note_row, static_line
from tui.state.values import RolloutState, parse_timestamp
from tui.widgets import summaries
from tui.widgets.summaries import WaveSegment

MAX_CLOSED = 50
"""The audit has all closed rollouts."""

MIN_NAME_WIDTH, MAX_NAME_WIDTH = 12, 48
"""Bounds for the column of rollout names, which takes a quarter of the width at most."""

MIN_BAR_WIDTH = 5
"""A shorter bar says less than the figures after it."""


class FleetPage(Page):
    screen_name = "fleet"

    def build_items(self) -> Iterator[Item]:
        model, now = self.console.model, self.console.now()
        rollouts = summaries.sort_by_urgency(model)
        is_spacious = len(rollouts) * 3 <= self.body.size.height
        for each in rollouts:
            yield each.id, self._rollout_row(each, now)
            yield "", _status_row(*summaries.describe_status(model, each, now))
            if is_spacious:
                yield "", static_line([])
        if not rollouts:
            is_loaded = self.console.has_connected
            empty = "no rollout is live: open one with rolloutctl plan submit FILE"
            yield note_row(empty if is_loaded else "waiting for the daemon")
            yield "", static_line([])
        closed = [each for each in model.closed_rollouts if each["rollout"] not in model.rollouts]
        if closed:
            yield heading("CLOSED", str(len(closed[:MAX_CLOSED])))
            for line in closed[:MAX_CLOSED]:
                yield line["rollout"], _closed_row(line, now)

    def selection(self) -> Selection:
        rollout = self.console.model.rollouts.get(self.body.cursor_key)
        return Selection(rollout=rollout, gate=find_pending_gate(self, rollout))

    def _open(self, page: str) -> None:
        if self.body.cursor_key:
            self.console.open_page(page, self.body.cursor_key)

    do_open, do_nodes = partialmethod(_open, "rollout"), partialmethod(_open, "nodes")

    def _rollout_row(self, rollout: RolloutState, now: float) -> Callable[[int], Line]:
        ids = list(self.console.model.rollouts)

        def draw(width: int) -> Line:
            glyph, role = summaries.state_glyph(rollout.state, rollout.status["skipped"])
            wide = width >= 110
            name_width = lines.column_width(ids, MIN_NAME_WIDTH, min(MAX_NAME_WIDTH, width // 4))
            state = "approval" if rollout.state == "awaiting-approval" and not wide else rollout.state
            rate = summaries.completion_rate(rollout, None, now)
            work_left = summaries.format_work_left(rollout)[1]
            columns = (
                (formats.format_percent(rollout.status["percent"]), 5),
                (f"{rollout.status['done']:,}/{rollout.wanted:,}", 13 if wide else 9),
                (fit(f" {rollout.status['wave'] or ''}", 11 if wide else 7), 0),
                ("" if rate is None else f"{rate:,.0f}/h", 8 if wide else 5),
                (f"~{work_left}{' left' if wide else ''}" if work_left else "", 11 if wide else 6),
            )
            tail = (
                "".join(f" {fit(text, cells or len(text), align_right=True)}" for text, cells in columns)
                + " "
            )
            left: Line = [
                (f"{glyph} ", role),
                (column(rollout.id, name_width + 1, width), "bold"),
                (fit(state, 18 if wide else 9) + " ", role),
            ]
            room = max(6, width - lines.line_width(left) - len(tail))
            return [*left, *rollout_progress_bar(rollout, room), (tail, "")]

        return draw


def rollout_progress_bar(rollout: RolloutState, width: int) -> Line:
    counts, wanted = rollout.status, max(1, rollout.wanted)
    parts = [(counts["done"], "ok"), (counts["failed"], "bad"), (len(rollout.in_flight), "run")]
    return lines.progress_bar([(count / wanted, role) for count, role in parts], width)


def progress_line(rollout: RolloutState, rate: float | None, width: int) -> Line:
    """Return a rollout's figures; on a narrow screen the rate gives way to them, and then the bar."""
    counts = rollout.status
    exceptions = format_exceptions(counts["skipped"], counts["rolled_back"])
    numbers = (
        f" {formats.format_percent(counts['percent']):>5}  {counts['done']:,} of {rollout.wanted:,} changed"
        + (f", {counts['failed']:,} failed" if counts["failed"] else "")
        + (f", {exceptions}" if exceptions else "")
        + f", {len(rollout.in_flight)} in flight, {counts['pending']:,} pending"
    )
    low, high = summaries.format_work_left(rollout)
    work_left = f"~{low if low == high else f'{low}-{high}'} left " if high else ""
    for right in (work_left if rate is None else f"{rate:,.0f}/h {work_left}", work_left):
        room = width - len(numbers) - len(right) - 3
        if room >= MIN_BAR_WIDTH:
            break
    bar = [(" ", ""), *rollout_progress_bar(rollout, room)] if room >= MIN_BAR_WIDTH else []
    return lines.justify([*bar, (numbers, "")], [(f" {right}", "dim")] if right else [], width)


def wave_line(segments: Sequence[WaveSegment]) -> Line:
    line: Line = [(" ", "")]
    for number, segment in enumerate(segments):
        if number:
            line.append((" ─ ", "faint"))
        is_done = segment.total > 0 and segment.done + segment.skipped == segment.total
        role = "bad" if segment.failed else "ok" if is_done else "bold" if segment.is_current else "dim"
        mark = "✗ " if segment.failed else "✓ " if is_done else "▸ " if segment.is_current else ""
        line.append((f"{mark}{segment.wave} {segment.done}/{segment.total - segment.skipped}", role))
        if segment.soak_remaining is not None:
            line.append((f" ─ ◷ soaks {formatting.format_clock(segment.soak_remaining)}", "run"))
        elif segment.soak_s:
            line.append((f" ─ soak {formatting.format_duration(segment.soak_s)}", "dim"))
        if segment.gate is not None:
            glyph, role = GATE_GLYPHS.get(segment.gate["state"], ("○", "dim"))
            line += [(" ─ ", "faint"), (f"{glyph} {segment.gate['gate']}", role)]
    return line


def _status_row(text: str, missing: str) -> Callable[[int], Line]:
    right: Line = [(f"  {missing} ", "accent")] if missing else []
    text = lines.sanitize(text)

    def draw(width: int) -> Line:
        shown = lines.shorten(text, width - lines.line_width(right) - 3)
        return lines.justify([("  ", ""), (shown, "dim")], right, width)

    return draw


def _closed_row(each: wire.RolloutLine, now: float) -> Callable[[int], Line]:
    glyph, role = summaries.state_glyph(each["state"], each["skipped"])
    percent = formats.format_percent(each["percent"])
    ended = formatting.format_age(parse_timestamp(each["ended_at"]), now)
    exceptions = format_exceptions(each["skipped"], each["rolled_back"]) if each["state"] == "done" else ""
    state = ", ".join(filter(None, (each["state"], exceptions)))

    def draw(width: int) -> Line:
        left: Line = [
            (f"{glyph} ", role),
            (column(each["rollout"], MAX_NAME_WIDTH, width), ""),
            (
                f"{state}  {percent:>5}  by {each['submitted_by']}",
                role if exceptions else "dim",
            ),
        ]
        return lines.justify(left, [(f"{ended} ", "dim")], width)

    return draw
