"""A rollout at a past moment: what had failed, what was in flight, and what happened just before."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from rolloutd.control import user_time
from rolloutd.texts import event_text, formats
from rolloutd.texts.formats import format_exceptions
from tui.formatting import formatting, lines
from tui.formatting.glyphs import phase_glyph
from tui.formatting.lines import Line, fit_name
from tui.screens.page import Item, heading, note_row, static_line
from tui.state.history import History, PastPhase
from tui.state.values import BUSY_PHASES, NodeState, RolloutState, parse_timestamp

MAX_NAME_WIDTH = 32

MAX_DECISIONS, MAX_TRANSITIONS = 8, 12

_CLOCK = re.compile(r"(?:(\d{4}-\d\d-\d\d)[ T])?(\d{1,2}):(\d\d)(?::(\d\d))?")


def parse_moment(text: str, now: float) -> float | None:
    """Return the instant of `03:44`, `2026-11-22 03:44:10`, `10m ago` or RFC 3339; None for another text.

    A time without a date is the latest such time that has passed; without a zone it is local.
    """
    clock = _CLOCK.fullmatch(text.strip())
    if clock is None:
        with suppress(ValueError):
            return parse_timestamp(user_time.parse_past(text.strip(), datetime.fromtimestamp(now, UTC)))
        return None
    today = datetime.fromtimestamp(now).astimezone()
    try:
        day = today if clock[1] is None else datetime.fromisoformat(clock[1]).astimezone()
        at = day.replace(hour=int(clock[2]), minute=int(clock[3]), second=int(clock[4] or 0), microsecond=0)
    except ValueError:
        return None
    if clock[1] is None and at > today:
        at -= timedelta(days=1)
    return at.timestamp()


def moment_items(history: History, rollout: RolloutState, at: float, now: float) -> Iterator[Item]:
    yield heading(f"AT {formatting.format_datetime(at)}", f"{formatting.format_age(at, now)}: 0 shows now")
    if at < history.loaded_from:
        yield note_row(
            "the console keeps no more of the audit: rolloutctl audit has it"
            if history.is_full
            else "loading the audit back to this time"
        )
        return
    nodes = (rollout.nodes or {}).values()
    past = [(node, history.phase_at(node, at)) for node in nodes if node.outcome != "left"]
    yield "", static_line(_counts_line(past))
    for title, phases in (("FAILED", {"failed"}), ("IN FLIGHT", BUSY_PHASES)):
        found = [(node, phase) for node, phase in past if phase.phase in phases]
        if found or title == "IN FLIGHT":
            yield heading(title, str(len(found)))
        width = lines.column_width((node.node for node, _ in found), 0, MAX_NAME_WIDTH)
        for node, phase in sorted(found, key=lambda each: each[1].since or 0.0):
            yield f"node:{node.node}", _node_row(node, phase, at, width)
    yield from _before_items(history, at)


def _counts_line(past: list[tuple[NodeState, PastPhase]]) -> Line:
    counts = Counter(
        phase.outcome if phase.outcome in ("skipped", "rolled-back") else phase.phase for _, phase in past
    )
    skipped = counts["skipped"] + counts["rolled-back"]
    wanted = len(past) - skipped
    in_flight = sum(counts[phase] for phase in BUSY_PHASES)
    percent = formats.format_percent(100.0 * counts["done"] / wanted) if wanted else "-"
    return [
        (f"  {percent:>5}  {counts['done']:,} of {wanted:,} changed", "bold"),
        (f", {counts['failed']:,} failed" if counts["failed"] else "", "bad"),
        (f", {format_exceptions(skipped, counts['rolled-back'])}" if skipped else "", ""),
        (f", {in_flight:,} in flight, {counts['pending']:,} pending", ""),
    ]


def _node_row(node: NodeState, phase: PastPhase, at: float, width: int) -> Callable[[int], Line]:
    glyph, role = phase_glyph(phase.phase, phase.outcome)
    took = "" if phase.since is None else f"for {formatting.format_clock(at - phase.since)}"
    return static_line(
        [
            (f" {glyph} ", role),
            (fit_name(node.node, width), "bold"),
            (f" {phase.phase:<12}", role),
            (took, ""),
        ]
    )


def _before_items(history: History, at: float) -> Iterator[Item]:
    decisions = [entry for entry in reversed(history.decisions) if entry["at"] <= at][:MAX_DECISIONS]
    yield heading("DECIDED BEFORE", "the latest first")
    for entry in decisions:
        who, what = event_text.actor_name(entry), event_text.describe_event(entry)
        text: Line = [(f"{who} ", "accent"), (lines.sanitize(what), formatting.entry_role(entry))]
        yield "", static_line([(f"  {formatting.format_time(entry['at'])}  ", "dim"), *text])
    if not decisions:
        yield note_row("nothing")
    yield heading("HAPPENED BEFORE", "the latest first")
    for each in history.transitions_before(at, MAX_TRANSITIONS):
        glyph, role = phase_glyph(each.target, each.outcome)
        outcome = f" ({each.outcome})" if each.outcome else ""
        line: Line = [(f"  {formatting.format_time(each.at)}  ", "dim"), (f"{glyph} ", role)]
        line += [(each.node, "bold"), (f" {each.source} → {each.target}{outcome}", "")]
        yield "", static_line(line)
