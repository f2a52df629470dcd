"""The pools of a rollout as rows: a strip of their nodes, or a timeline.

Rows are drawn only where they are visible, so that five hundred pools scroll like five.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tui.formatting import lines
from tui.formatting.glyphs import legend, node_strip
from tui.formatting.lines import Line, fit, justify
from tui.screens.page import heading
from tui.state.history import History
from tui.state.values import PoolState
from tui.widgets import timeline
from tui.widgets.timeline import BarCache, TimeScale

MIN_NAME_WIDTH, MAX_NAME_WIDTH = 6, 24

SIDE_WIDTH = 17
"""Cells for a pool's slots and progress."""


class PoolRows:
    """Header rows, then a row per pool."""

    def __init__(
        self,
        header: Sequence[Callable[[int], Line]],
        pools: Sequence[PoolState],
        draw_pool: Callable[[PoolState, int], Line],
    ) -> None:
        self._header = header
        self._pools = pools
        self._draw_pool = draw_pool

    def __len__(self) -> int:
        return len(self._header) + len(self._pools)

    def key(self, row: int) -> str:
        number = row - len(self._header)
        return "" if number < 0 else f"pool:{self._pools[number].pool}"

    def draw(self, row: int, width: int) -> Line:
        if row < len(self._header):
            return self._header[row](width)
        return self._draw_pool(self._pools[row - len(self._header)], width)


def strip_rows(pools: Sequence[PoolState], order: str, *, nodes_known: bool) -> PoolRows:
    """Return rows in which a cell is a node."""
    header = [heading("POOLS", f"{len(pools)}, {order}")[1], lambda width: [(" ", ""), *legend(width - 1)]]
    return PoolRows(header, pools, lambda pool, width: _strip_line(pool, width, nodes_known=nodes_known))


def _strip_line(pool: PoolState, width: int, *, nodes_known: bool) -> Line:
    name = fit(pool.pool, min(MAX_NAME_WIDTH, max(10, width // 4)))
    room = width - lines.line_width([(name, "")]) - SIDE_WIDTH - 1
    cells = node_strip(pool.nodes, room) if nodes_known else [("·" * min(room, pool.total), "faint")]
    side = _side(pool, (pool.used, pool.failed, pool.done))
    return justify([(name, ""), (" ", ""), *cells], side, width)


def _side(pool: PoolState, counts: tuple[int, int, int]) -> Line:
    """Return a pool's slots and progress; `counts` are used slots, failed and done nodes."""
    used, failed, done = counts
    role = "bad" if used > pool.max_unavailable else "warn" if used == pool.max_unavailable else ""
    return [
        (" ✗" if failed else "  ", "bad"),
        (fit(f"{used}/{pool.max_unavailable}", 5, align_right=True), role if used else "dim"),
        (fit(f" {done:,}/{pool.wanted:,} ", 10, align_right=True), "ok" if done == pool.wanted else ""),
    ]


@dataclass(frozen=True, slots=True)
class TimelineRows:
    """What the rows of a timeline show; `moment` None is now."""

    history: History
    scale: TimeScale
    moment: float | None
    marks: Line
    starts: Line
    bars: BarCache

    def rows(self, pools: Sequence[PoolState], order: str) -> PoolRows:
        """Return rows in which a cell is an interval."""
        width = name_width(pools)
        note = f"{len(pools)}, {order}, {timeline.describe_scale(self.scale)}"
        header = [
            heading("POOLS", note)[1],
            lambda room: [(" ", ""), *legend(room - 1)],
            lambda _: [(" ", ""), *timeline.MARKS_LEGEND],
            lambda _: [(fit("time", width) + " ", "dim"), *timeline.axis(self.scale, self.moment)],
            lambda _: [(fit("gates", width) + " ", "dim"), *self.marks],
        ]
        if self.starts:
            header.append(lambda _: [(fit("starts", width) + " ", "dim"), *self.starts])
        return PoolRows(header, pools, lambda pool, room: self._line(pool, width, room))

    def _line(self, pool: PoolState, width: int, room: int) -> Line:
        counts = (pool.used, pool.failed, pool.done)
        if self.moment is not None:
            in_flight, failed, done = timeline.past_pool(self.history, pool, self.moment)
            counts = (in_flight + failed, failed, done)
        bar = self.bars.bar(self.history, pool, self.scale, self.moment)
        return justify([(fit(pool.pool, width) + " ", ""), *bar], _side(pool, counts), room)


def name_width(pools: Sequence[PoolState]) -> int:
    return lines.column_width((pool.pool for pool in pools), MIN_NAME_WIDTH, MAX_NAME_WIDTH)


def timeline_columns(pools: Sequence[PoolState], width: int) -> int:
    """Return the intervals that fit beside names, slots and progress."""
    return width - name_width(pools) - 1 - SIDE_WIDTH
