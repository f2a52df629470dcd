"""A rollout over time: a row per pool, a column per interval, and marks for decisions, soaks and windows.

The scale chooses the interval so that the whole rollout fits, or the last ninety minutes.
A user can choose a moment; pages then show the state at that moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zoneinfo import ZoneInfo

from machines.model.windows import DAYS, Window, any_open
from tui.formatting.formatting import format_time
from tui.formatting.glyphs import PHASE_GLYPHS, Glyph, phase_glyph
from tui.formatting.lines import Line, merge_spans
from tui.state.history import History
from tui.state.values import BUSY_PHASES, COUNTER_BY_OUTCOME, NodeState, PoolState

STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 14_400, 28_800, 86_400)

MAX_CHOSEN_STEP_S = 60
"""The longest interval that the console chooses itself: a longer one loads much of the audit."""

LABEL_INTERVAL = 18
"""Columns between two times on the axis."""

LARGE_POOL, LARGE_POOL_INTERVAL_S = 500, 2.0
"""The bar of a pool with so many nodes is drawn again only after this time."""

CURSOR_ROLE = "tab"

MARKS: Mapping[str, Glyph] = {
    "soak": ("◷", "run"),
    "VoteCast": ("◆", "accent"),
    "RolloutResumed": ("►", "run"),
    "RolloutPaused": ("‖", "bad"),
    "GateOpened": ("✓", "ok"),
    "RolloutEnded": ("■", "ok"),
    "RolloutCancelled": ("✗", "bad"),
}
"""Marks of what happened in an interval, the most important last."""

_RANKS = {name: rank for rank, name in enumerate(MARKS)}

MARKS_LEGEND: Line = [
    part
    for name, text in (
        ("VoteCast", "vote"),
        ("GateOpened", "gate open"),
        ("soak", "soak"),
        ("RolloutPaused", "paused"),
        ("RolloutResumed", "resumed"),
    )
    for part in (MARKS[name], (f" {text}  ", "dim"))
]

OPEN, CLOSED, FROZEN = ("━", "ok"), ("─", "dim"), ("‖", "warn")
"""Whether nodes may start in an interval: in a window, outside all windows, in a freeze."""


@dataclass(frozen=True, slots=True)
class TimeScale:
    """The intervals on the screen; `now` is the end of what is known."""

    start: float
    step: float
    columns: int
    now: float

    @property
    def end(self) -> float:
        return self.start + self.step * self.columns

    def column(self, at: float) -> int:
        """Return the column of an instant, also of one that is not on the screen."""
        return math.floor((at - self.start) / self.step)


@dataclass(slots=True)
class TimelineView:
    """What the user chose: a moment (None is now) and the interval of a column (None is automatic)."""

    moment: float | None = None
    step: float | None = None
    _start: float | None = field(default=None)

    def scale(self, columns: int, began: float, now: float) -> TimeScale:
        """Return the scale that shows the moment, or the latest time."""
        columns = max(1, columns)
        fitting = (
            each for each in STEPS_S if now - began < each * (columns - 1) or each == MAX_CHOSEN_STEP_S
        )
        step = self.step or next(fitting)
        latest = max(math.floor(began / step), math.floor(now / step) - columns + 1)
        first = latest
        if self.moment is not None:
            column = math.floor(self.moment / step)
            kept = latest if self._start is None else math.floor(self._start / step)
            first = kept if kept <= column < kept + columns else column - columns // 2
            first = min(first, latest)
        self._start = first * step
        return TimeScale(self._start, step, columns, now)

    def move(self, columns: int, scale: TimeScale) -> None:
        """Choose the end of an interval; the moment after the latest interval is now."""
        column = scale.column(scale.now if self.moment is None else self.moment) + columns
        moment = scale.start + (column + 1) * scale.step - 0.001
        self.moment = None if moment >= scale.now else moment

    def zoom(self, by: int, scale: TimeScale) -> None:
        """Choose the next shorter (-1) or longer (+1) interval."""
        index = min(range(len(STEPS_S)), key=lambda each: abs(STEPS_S[each] - scale.step)) + by
        self.step = STEPS_S[min(max(index, 0), len(STEPS_S) - 1)]
        self._start = None


def axis(scale: TimeScale, moment: float | None) -> Line:
    """Return the times at regular columns, or the chosen moment's time alone next to its column."""
    if moment is not None:
        column, label = scale.column(moment), format_time(moment)
        if column + len(label) < scale.columns:
            return [(" " * column, ""), (f"▼{label}", CURSOR_ROLE)]
        return [(" " * (column - len(label)), ""), (f"{label}▼", CURSOR_ROLE)]
    text = ""
    for column in range(0, scale.columns - 8, LABEL_INTERVAL):
        text = text.ljust(column) + f"│{format_time(scale.start + column * scale.step)}"
    return [(text, "dim")]


def decision_marks(
    history: History, soaks: Sequence[tuple[float, float]], scale: TimeScale, moment: float | None
) -> Line:
    """Return votes, gates, pauses and soaks (each from, until) by column."""
    names: dict[int, str] = {}

    def mark(column: int, name: str) -> None:
        if 0 <= column < scale.columns and _RANKS[name] >= _RANKS.get(names.get(column, ""), -1):
            names[column] = name

    for begin, end in soaks:
        for column in range(max(0, scale.column(begin)), min(scale.columns, scale.column(end) + 1)):
            mark(column, "soak")
    for entry in history.decisions:
        if entry["event"] in MARKS:
            mark(scale.column(entry["at"]), entry["event"])
    glyphs = [MARKS[names[column]] if column in names else (" ", "") for column in range(scale.columns)]
    return _with_moment(glyphs, scale, moment)


def start_marks(history: History, windows: Sequence[Window], scale: TimeScale, moment: float | None) -> Line:
    """Return by column whether nodes may start; empty where neither a window nor a freeze ever said no."""
    freezes = frozen_intervals(history, scale.end)
    if not windows and not any(end > scale.start for _, end in freezes):
        return []
    glyphs: list[Glyph] = []
    for column in range(scale.columns):
        begin = scale.start + column * scale.step
        is_frozen = any(since < begin + scale.step and until > begin for since, until in freezes)
        shown = FROZEN if is_frozen else OPEN if any_open(windows, begin) else CLOSED
        glyphs.append(shown if begin <= scale.now else (" ", ""))
    return _with_moment(glyphs, scale, moment)


def parse_windows(plan: Mapping[str, Any] | None) -> list[Window]:
    """Return the windows of a plan's content; none until the plan is known."""
    found = () if plan is None else plan["content"]["spec"].get("windows") or ()
    return [
        Window(
            frozenset(DAYS.index(day) for day in each["days"]),
            _minute(each["from"]),
            _minute(each["to"]),
            ZoneInfo(each["zone"]),
        )
        for each in found
    ]


def _minute(clock: str) -> int:
    hours, minutes = clock.split(":")
    return int(hours) * 60 + int(minutes)


def frozen_intervals(history: History, end: float) -> list[tuple[float, float]]:
    """Return when freezes began and ended, of any scope; one without an end lasts until `end`."""
    begun: dict[str, tuple[float, float]] = {}
    for entry in history.decisions:
        fields = entry["fields"]
        if entry["event"] == "FreezeStarted":
            freeze = fields["freeze"]
            until = freeze["until"]
            begun[freeze["id"]] = (entry["at"], end if until is None else until)
        elif entry["event"] == "FreezeLifted" and fields["freeze"] in begun:
            since, until = begun[fields["freeze"]]
            begun[fields["freeze"]] = (since, min(until, entry["at"]))
    return list(begun.values())


def pool_cells(history: History, nodes: Sequence[NodeState], scale: TimeScale) -> list[Glyph]:
    """Return by interval what a pool's nodes did: a failure first, else the phase that took most of it."""
    columns = scale.columns
    spent: list[dict[str, float]] = [{} for _ in range(columns)]
    completed: dict[int, Glyph] = {}
    pending = [0] * (columns + 1)
    end = min(scale.end, scale.now)
    for node in nodes:
        for since, until, phase in history.spans(node, scale.start, end):
            first, last = scale.column(since), min(scale.column(until), columns - 1)
            if phase.phase == "done":
                if phase.since == since and 0 <= first < columns:
                    completed[first] = phase_glyph(phase.phase, phase.outcome)
            elif phase.phase == "pending":
                pending[first] += 1
                pending[last + 1] -= 1
            else:
                _spend(spent, phase.phase, (since, until), scale)
    return _cells(history, scale, spent, completed, pending)


def _spend(
    spent: list[dict[str, float]], phase: str, interval: tuple[float, float], scale: TimeScale
) -> None:
    since, until = interval
    for column in range(max(0, scale.column(since)), min(scale.column(until) + 1, scale.columns)):
        begin = scale.start + column * scale.step
        seconds = min(until, begin + scale.step) - max(since, begin)
        # A phase that ends where a column begins is not in it; one that begins just now is.
        if seconds <= 0.0 and until < scale.now:
            continue
        spent[column][phase] = spent[column].get(phase, 0.0) + seconds


def _cells(
    history: History,
    scale: TimeScale,
    spent: Sequence[Mapping[str, float]],
    completed: Mapping[int, Glyph],
    pending: Sequence[int],
) -> list[Glyph]:
    glyphs: list[Glyph] = []
    loaded_from, waiting = history.loaded_from, 0
    for column in range(scale.columns):
        begin = scale.start + column * scale.step
        waiting += pending[column]
        phases = spent[column]
        if begin > scale.now or begin + scale.step < loaded_from:
            glyphs.append((" ", ""))
        elif "failed" in phases:
            glyphs.append(PHASE_GLYPHS["failed"])
        elif phases:
            glyphs.append(PHASE_GLYPHS[max(phases, key=lambda phase: phases[phase])])
        elif column in completed:
            glyphs.append(completed[column])
        else:
            glyphs.append(("·", "faint") if waiting else PHASE_GLYPHS["done"])
    return glyphs


def _with_moment(glyphs: list[Glyph], scale: TimeScale, moment: float | None) -> Line:
    if moment is not None and 0 <= (column := scale.column(moment)) < len(glyphs):
        glyphs[column] = (glyphs[column][0], CURSOR_ROLE)
    return merge_spans(glyphs)


@dataclass(frozen=True, slots=True)
class _DrawnBar:
    """A bar and what it was drawn for; cells of intervals before `final_until` never change."""

    key: tuple[Any, ...]
    line: Line
    cells: list[Glyph]
    names: tuple[str, ...]
    scale: TimeScale
    loaded_from: float
    final_until: float

    def final_cells(self, names: tuple[str, ...], scale: TimeScale, loaded_from: float) -> list[Glyph]:
        """Return the cells at the beginning of a scale that cannot have changed."""
        same = (self.names, self.loaded_from, self.scale.step) == (names, loaded_from, scale.step)
        shift = self.scale.column(scale.start)
        if not same or shift < 0 or self.final_until < scale.start:
            return []
        end = min(self.scale.column(self.final_until), shift + scale.columns)
        return self.cells[shift:end]


class BarCache:
    """The bars of pools and nodes, drawn again only when they changed, and only from there on."""

    def __init__(self) -> None:
        self._history: History | None = None
        self._bars: dict[str, _DrawnBar] = {}

    def bar(
        self,
        history: History,
        pool: PoolState,
        scale: TimeScale,
        moment: float | None,
        node: NodeState | None = None,
    ) -> Line:
        name, nodes = (pool.pool, pool.nodes) if node is None else (f"{pool.pool}/{node.node}", [node])
        if history is not self._history:
            self._history = history
            self._bars.clear()
        is_large = len(nodes) >= LARGE_POOL
        # Without an event, a bar changes only when the latest interval ends.
        changed = scale.now // LARGE_POOL_INTERVAL_S if is_large else (pool.version, scale.column(scale.now))
        loaded_from = history.loaded_from
        key = (scale.start, scale.step, scale.columns, moment, loaded_from, changed)
        before = self._bars.get(name)
        if before is not None and before.key == key:
            return before.line
        names = tuple(node.node for node in nodes)
        cells = [] if before is None else before.final_cells(names, scale, loaded_from)
        done = len(cells)
        rest = TimeScale(scale.start + done * scale.step, scale.step, scale.columns - done, scale.now)
        cells += pool_cells(history, nodes, rest)
        line = _with_moment(list(cells), scale, moment)
        # One interval more is drawn again: transitions of one instant may come in any order.
        final_until = min(scale.now, history.latest_at) - scale.step
        self._bars[name] = _DrawnBar(key, line, cells, names, scale, loaded_from, final_until)
        return line


def past_pool(history: History, pool: PoolState, at: float) -> tuple[int, int, int]:
    """Return the nodes in flight, failed and done of a pool at a moment; skipped nodes are not done."""
    past = [history.phase_at(node, at) for node in pool.nodes]
    in_flight = sum(each.phase in BUSY_PHASES for each in past)
    failed = sum(each.phase == "failed" for each in past)
    done = sum(
        each.phase == "done" and COUNTER_BY_OUTCOME.get(each.outcome or "changed") == "done" for each in past
    )
    return in_flight, failed, done
