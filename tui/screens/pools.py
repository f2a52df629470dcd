"""The pools of a rollout as rows: a strip of their nodes, or a timeline.

Rows are drawn only where they are visible, so that five hundred pools scroll like five.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tui.formatting import lines
from tui.formatting.glyphs import legend, node_strip
from tui.formatting.lines import Line, fit, fit_line, justify
from tui.screens.page import Item, heading, static_line
from tui.state.history import History
from tui.state.values import NodeState, PoolState
from tui.widgets import timeline
from tui.widgets.timeline import BarCache, TimeScale

MIN_NAME_WIDTH, MAX_NAME_WIDTH = 6, 24

SIDE_WIDTH = 17
"""Cells for a pool's slots and progress."""


def strip_items(pools: Sequence[PoolState], order: str, *, nodes_known: bool) -> list[Item]:
    """Return rows in which a cell is a node."""
    return [
        heading("POOLS", f"{len(pools)}, {order}"),
        ("", lambda width: [(" ", ""), *legend(width - 1)]),
        *((f"pool:{pool.pool}", partial(_strip_line, pool, nodes_known=nodes_known)) for pool in pools),
    ]


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

    def items(self, pools: Sequence[PoolState], order: str, height: int) -> list[Item]:
        """Return rows in which a cell is an interval; below each pool its nodes, if all fit into `height`."""
        width = name_width(pools)
        note = f"{len(pools)}, {order}, {timeline.describe_scale(self.scale)}"
        found = [
            heading("POOLS", note),
            ("", lambda room: [(" ", ""), *legend(room - 1)]),
            ("", static_line([(" ", ""), *timeline.MARKS_LEGEND])),
            ("", static_line([(fit("time", width) + " ", "dim"), *timeline.axis(self.scale, self.moment)])),
            ("", static_line([(fit("gates", width) + " ", "dim"), *self.marks])),
        ]
        if self.starts:
            found.append(("", static_line([(fit("starts", width) + " ", "dim"), *self.starts])))
        with_nodes = len(found) + sum(1 + len(pool.nodes) for pool in pools) <= height
        for pool in pools:
            found.append((f"pool:{pool.pool}", partial(self._pool_line, pool, width)))
            found.extend(
                (f"node:{pool.pool}/{node.node}", partial(self._node_line, pool, node, width))
                for node in (pool.nodes if with_nodes else ())
            )
        return found

    def _pool_line(self, pool: PoolState, width: int, room: int) -> Line:
        counts = (pool.used, pool.failed, pool.done)
        if self.moment is not None:
            in_flight, failed, done = timeline.past_pool(self.history, pool, self.moment)
            counts = (in_flight + failed, failed, done)
        bar = self.bars.pool_bar(self.history, pool, self.scale, self.moment)
        return justify([(fit(pool.pool, width) + " ", "bold"), *bar], _side(pool, counts), room)

    def _node_line(self, pool: PoolState, node: NodeState, width: int, room: int) -> Line:
        bar = self.bars.node_bar(self.history, pool, node, self.scale, self.moment)
        return fit_line([(fit(f"  {node.node}", width) + " ", "dim"), *bar], room)


def name_width(pools: Sequence[PoolState]) -> int:
    return lines.column_width((pool.pool for pool in pools), MIN_NAME_WIDTH, MAX_NAME_WIDTH)


def timeline_columns(pools: Sequence[PoolState], width: int) -> int:
    """Return the intervals that fit beside names, slots and progress."""
    return width - name_width(pools) - 1 - SIDE_WIDTH
