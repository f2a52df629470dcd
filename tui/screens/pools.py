"""The pools of a rollout as rows: a strip of their nodes, or a timeline.

Rows are drawn only where they are visible, so that five hundred pools scroll like five.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from tui.formatting import formatting, lines
from tui.formatting.glyphs import legend, node_strip
from tui.formatting.lines import Line, fit, fit_line, fit_name, justify
from tui.screens.page import Item, heading, item_rows, static_line
from tui.state.history import History
from tui.state.values import NodeState, PoolState
from tui.widgets import timeline
from tui.widgets.timeline import BarCache, TimeScale
from tui.widgets.virtual_list import RowSource

MIN_NAME_WIDTH, MAX_NAME_WIDTH = 6, 24

SIDE_WIDTH = 17
"""Cells for a pool's slots and progress."""


class PoolRows:
    def __init__(
        self,
        head: Sequence[Item],
        pools: Sequence[PoolState],
        draw_pool: Callable[[PoolState, int], Line],
    ) -> None:
        self._head = head
        self._pools = pools
        self._draw_pool = draw_pool

    def __len__(self) -> int:
        return len(self._head) + len(self._pools)

    def key(self, row: int) -> str:
        above = len(self._head)
        return self._head[row][0] if row < above else f"pool:{self._pools[row - above].pool}"

    def draw(self, row: int, width: int) -> Line:
        above = len(self._head)
        return self._head[row][1](width) if row < above else self._draw_pool(self._pools[row - above], width)


def strip_rows(pools: Sequence[PoolState], order: str, *, nodes_known: bool) -> PoolRows:
    head = [
        heading("POOLS", f"{len(pools)}, {order}"),
        ("", lambda width: [(" ", ""), *legend(width - 1)]),
    ]
    return PoolRows(head, pools, partial(_strip_line, nodes_known=nodes_known))


def _strip_line(pool: PoolState, width: int, *, nodes_known: bool) -> Line:
    name = fit_name(pool.pool, min(MAX_NAME_WIDTH, max(10, width // 4)))
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

    def rows(self, pools: Sequence[PoolState], order: str, height: int) -> RowSource:
        """Return rows in which a cell is an interval; below each pool its nodes, if all fit into `height`."""
        width = name_width(pools)
        note = f"{len(pools)}, {order}, {formatting.format_duration(self.scale.step)} a column"
        head = [
            heading("POOLS", note),
            ("", lambda room: [(" ", ""), *legend(room - 1)]),
            ("", static_line([(" ", ""), *timeline.MARKS_LEGEND])),
            ("", static_line([(fit("time", width) + " ", "dim"), *timeline.axis(self.scale, self.moment)])),
            ("", static_line([(fit("gates", width) + " ", "dim"), *self.marks])),
        ]
        if self.starts:
            head.append(("", static_line([(fit("starts", width) + " ", "dim"), *self.starts])))
        if len(head) + sum(1 + len(pool.nodes) for pool in pools) > height:
            return PoolRows(head, pools, partial(self._pool_line, width))
        return item_rows([*head, *self._items_with_nodes(pools, width)])

    def _items_with_nodes(self, pools: Sequence[PoolState], width: int) -> Iterator[Item]:
        for pool in pools:
            yield f"pool:{pool.pool}", partial(self._pool_line, width, pool)
            for node in pool.nodes:
                yield f"node:{pool.pool}/{node.node}", partial(self._node_line, pool, node, width)

    def _pool_line(self, width: int, pool: PoolState, room: int) -> Line:
        counts = (pool.used, pool.failed, pool.done)
        if self.moment is not None:
            in_flight, failed, done = timeline.past_pool(self.history, pool, self.moment)
            counts = (in_flight + failed, failed, done)
        bar = self.bars.bar(self.history, pool, self.scale, self.moment)
        return justify([(fit_name(pool.pool, width) + " ", "bold"), *bar], _side(pool, counts), room)

    def _node_line(self, pool: PoolState, node: NodeState, width: int, room: int) -> Line:
        bar = self.bars.bar(self.history, pool, self.scale, self.moment, node)
        return fit_line([("  " + fit_name(node.node, width - 2) + " ", "dim"), *bar], room)


def name_width(pools: Sequence[PoolState]) -> int:
    return _name_width(frozenset(pool.pool for pool in pools))


@lru_cache(maxsize=4)
def _name_width(names: frozenset[str]) -> int:
    return lines.column_width(names, MIN_NAME_WIDTH, MAX_NAME_WIDTH)


def timeline_columns(pools: Sequence[PoolState], width: int) -> int:
    """Return the intervals that fit next to names, slots and progress."""
    return width - name_width(pools) - 1 - SIDE_WIDTH
