"""The nodes of a rollout with the reasons they wait, filtered by words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, partialmethod
from operator import attrgetter
from typing import Any

from textual.widget import Widget

from machines.model.node import natural_sort_key
from rolloutd.control.rollouts import wire
from rolloutd.texts import formats
from tui.formatting import formatting, lines
from tui.formatting.glyphs import node_glyph
from tui.formatting.lines import Line, column, fit
from tui.operations.confirm import Selection
from tui.screens.page import LazyRows, RolloutScreen
from tui.state.values import BUSY_PHASES, NodeState
from tui.widgets.virtual_list import Banner, VirtualList

MIN_NAME_WIDTH, MAX_NAME_WIDTH = 13, 64

MAX_STATE_WIDTH = 16
"""Cells of the longest outcome, and of an attempt."""

_PHASE_RANK: Mapping[str, int] = {"failed": 0, **dict.fromkeys(BUSY_PHASES, 1), "pending": 2, "done": 3}

BY_NAME, BY_AGE = "by name", "latest change first"

SORT_KEYS: Mapping[str, Callable[[NodeState], Any]] = {
    "plan order": lambda _: 0,
    "most urgent first": lambda node: (_PHASE_RANK.get(node.phase, 9), node.since or 0.0),
    BY_AGE: lambda node: -(node.since or 0.0),
    BY_NAME: lambda node: natural_sort_key(node.node),
}
"""Sort orders; nodes with equal keys stay in plan order."""


class NodesPage(RolloutScreen):
    """The nodes of a rollout, limited to one pool or to one reason (a `reason_key`) if given."""

    screen_name = "nodes"
    filter_label = "show nodes that contain"

    def __init__(self, rollout: str, *, pool: str = "", reason: str = "") -> None:
        super().__init__(rollout)
        self.pool = pool
        self.reason = reason
        self.node_order = next(iter(SORT_KEYS))

    def compose_body(self) -> Iterator[Widget]:
        yield Banner(self._render_head, id="head")
        yield VirtualList(id="body")

    def breadcrumb(self) -> str:
        return f"▸ {self.rollout_id} ▸ {self.pool or 'nodes'}"

    def selection(self) -> Selection:
        name = self.body.cursor_key
        return Selection(rollout=self.rollout, node=self.find_node(name), node_name=name)

    def update_body(self) -> None:
        nodes = self._filtered_nodes()
        name_width = lines.column_width((node.node for node in nodes), MIN_NAME_WIDTH, MAX_NAME_WIDTH)
        states = lines.column_width(map(_state_text, nodes), 8, MAX_STATE_WIDTH)
        in_flight = {} if self.rollout is None else self.rollout.in_flight
        draw = partial(
            _node_line, now=self.console.now(), name_width=name_width, state_width=states, in_flight=in_flight
        )
        self.body.set_rows(LazyRows(nodes, attrgetter("node"), draw))
        self.query_one("#head", Banner).update_lines()

    def do_open(self) -> None:
        if self.body.cursor_key:
            self.console.open_page("node", self.rollout_id, self.body.cursor_key)

    def do_sort(self) -> None:
        orders = list(SORT_KEYS)
        self._sort(orders[(orders.index(self.node_order) + 1) % len(orders)])

    def _sort(self, order: str) -> None:
        self.node_order = order
        self.update_view()
        self.body.show_cursor(at_top=True)

    do_sort_by_name, do_sort_by_age = partialmethod(_sort, BY_NAME), partialmethod(_sort, BY_AGE)

    def _filtered_nodes(self) -> list[NodeState]:
        rollout = self.rollout
        if rollout is None or rollout.nodes is None:
            return []
        nodes: Sequence[NodeState] = list(rollout.nodes.values())
        if self.pool in rollout.pools:
            nodes = rollout.pools[self.pool].nodes
        if self.reason:
            # A code alone stands for all reasons with it.
            keys = ((each, each.waiting_key) for each in nodes)
            nodes = [each for each, key in keys if key == self.reason or key.startswith(f"{self.reason} ")]
        if self.filter_text:
            nodes = [each for each in nodes if formatting.matches(_search_text(each), self.filter_text)]
        return sorted(nodes, key=SORT_KEYS[self.node_order])

    def _render_head(self, width: int) -> Sequence[Line]:
        rollout, rows = self.rollout, self.body.rows
        if rollout is None:
            return [[(f" {self.absence_note()}", "dim")]]
        if rollout.nodes is None:
            return [[(" loading the nodes", "dim")]]
        pool = f" of pool {self.pool}" if self.pool else ""
        groups = self.console.node_summary(rollout).waiting_groups
        text = next((group.text for group in groups if group.key == self.reason), "none any more")
        reason = f" that wait: {text}" if self.reason else ""
        found = formats.pluralize(len(rows) if rows is not None else 0, "node")
        return [[(f" {found}{pool}{reason}, {self.node_order}", "head")]]


def _search_text(node: NodeState) -> str:
    # Without the reason: it may name other nodes.
    pools = " ".join(node.pools)
    return f"{node.node} {node.team} {node.phase} {node.outcome} {node.wave} {pools}"


def _state_text(node: NodeState) -> str:
    return (node.outcome or node.phase) + (f" #{node.attempt}" if node.attempt > 1 else "")


def _node_line(
    node: NodeState,
    width: int,
    *,
    now: float,
    name_width: int,
    state_width: int,
    in_flight: Mapping[str, wire.InFlight],
) -> Line:
    glyph, role = node_glyph(node)
    work = in_flight.get(node.node)
    runner = None if work is None else work.get("runner")
    moves = "next" if node.phase == "pending" else f"runs by {runner}" if runner else ""
    why = node.failure or (node.reason["text"] if node.reason is not None else moves)
    line: Line = [
        (f" {glyph} ", role),
        (column(node.node, name_width + 1, width), "bold"),
        (column(node.team or "-", 16 if width >= 110 else 12, width), ""),
        (column(node.wave, 10 if width >= 110 else 8, width), "dim"),
        (fit(_state_text(node), state_width) + " ", role),
    ]
    room = width - lines.line_width(line)
    line.append((lines.shorten(lines.sanitize(why), room), "bad" if node.phase == "failed" else "dim"))
    age = "" if node.phase == "pending" else formatting.format_age(node.since, now)
    return lines.justify(line, [(f" {age} ", "dim")] if age else [], width)
