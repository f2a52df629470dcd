"""All nodes of a rollout in their order, with the reason of each that waits; found by any word."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from textual.widget import Widget

from tui import lines, wording
from tui.lines import Line, fit
from tui.listing import Banner, Listing
from tui.page import Page
from tui.phases import look
from tui.question import Subject
from tui.values import BUSY, NodeState, RolloutState

LEAST_NAME, MOST_NAME = 13, 40
"""Cells of a node's name: as many as the longest has, within these bounds and a third of the width."""

_URGENCY: Mapping[str, int] = {"failed": 0, **dict.fromkeys(BUSY, 1), "pending": 2, "done": 3}

ORDERS: Mapping[str, Callable[[NodeState], Any]] = {
    "the plan's order": lambda _: 0,
    "what wants a look first": lambda node: (_URGENCY.get(node.phase, 9), node.since or 0.0),
    "the latest change first": lambda node: -(node.since or 0.0),
    "by name": lambda node: node.node,
}
"""Ways to sort; equals stay in the plan's order."""


class NodesPage(Page):
    """The nodes of one rollout; of one pool, or with one reason, where that is what was opened."""

    place = "nodes"

    def __init__(self, rollout: str, *, pool: str = "", reason: str = "") -> None:
        super().__init__()
        self.rollout_id = rollout
        self.pool = pool
        self.reason = reason
        self.text = ""
        self.order = next(iter(ORDERS))

    @property
    def rollout(self) -> RolloutState | None:
        """The rollout, once it is known."""
        return self.console.model.rollouts.get(self.rollout_id)

    def body(self) -> Iterator[Widget]:
        """Yield the heading and the list."""
        yield Banner(self._head, id="head")
        yield Listing(id="body")

    def on_mount(self) -> None:
        """Have the nodes asked for."""
        self.console.look_at(self.rollout_id)

    def crumbs(self) -> str:
        """Return whose nodes these are."""
        return f"▸ {self.rollout_id} ▸ {self.pool or 'nodes'}"

    def subject(self) -> Subject:
        """Return the node under the cursor."""
        rollout, name = self.rollout, self.query_one("#body", Listing).cursor_key
        node = (rollout.nodes or {}).get(name) if rollout is not None else None
        return Subject(rollout=rollout, node=node, node_name=name)

    def redraw(self) -> None:
        """List the nodes that are meant."""
        self.query_one("#body", Listing).show(NodeRows(self._shown(), self.console.now()))
        self.query_one("#head", Banner).again()

    def do_open(self) -> None:
        """Go to the node under the cursor."""
        name = self.query_one("#body", Listing).cursor_key
        if name:
            self.console.open_node(self.rollout_id, name)

    def do_find(self) -> None:
        """Ask which nodes are meant."""
        self.console.ask_text("show nodes that contain", self.text, self._find)

    def do_sort(self) -> None:
        """Sort in the next way."""
        ways = list(ORDERS)
        self.order = ways[(ways.index(self.order) + 1) % len(ways)]
        self.changed()

    def _find(self, text: str) -> None:
        self.text = text
        self.changed()

    def _shown(self) -> list[NodeState]:
        rollout = self.rollout
        if rollout is None or rollout.nodes is None:
            return []
        nodes: Sequence[NodeState] = list(rollout.nodes.values())
        if self.pool in rollout.pools:
            nodes = rollout.pools[self.pool].nodes
        if self.reason:
            nodes = [each for each in nodes if each.reason is not None and each.reason["text"] == self.reason]
        words = self.text.lower().split()
        if words:
            nodes = [each for each in nodes if all(word in _words(each) for word in words)]
        return sorted(nodes, key=ORDERS[self.order])

    def _head(self, width: int) -> Sequence[Line]:
        rollout = self.rollout
        if rollout is None or rollout.nodes is None:
            return [[(" asking the daemon for the nodes", "dim")]]
        shown = self.query_one("#body", Listing).rows
        found = wording.count(len(shown) if shown is not None else 0, "node")
        why = "".join(
            [
                f" of pool {self.pool}" if self.pool else "",
                f" that wait: {self.reason}" if self.reason else "",
            ]
        )
        text = f", containing “{self.text}”" if self.text else ""
        return [[(f" {found}{why}{text}, {self.order}", "head")]]


def _words(node: NodeState) -> str:
    """Return by what a node is found: not by its reason, which may tell of other nodes."""
    pools = " ".join(node.pools)
    return f"{node.node} {node.team} {node.phase} {node.outcome} {node.wave} {pools}".lower()


class NodeRows:
    """A line per node, drawn when it is seen."""

    def __init__(self, nodes: Sequence[NodeState], now: float) -> None:
        self._nodes = nodes
        self._now = now
        self._named = lines.column((node.node for node in nodes), LEAST_NAME, MOST_NAME)

    def __len__(self) -> int:
        return len(self._nodes)

    def key(self, row: int) -> str:
        """Return the node's name."""
        return self._nodes[row].node

    def draw(self, row: int, width: int) -> Sequence[Line]:
        """Return the node's line."""
        node = self._nodes[row]
        glyph, role = look(node)
        wide = width >= 110
        state = node.outcome or node.phase
        why = node.failure or (node.reason["text"] if node.reason is not None else "")
        if not why and node.phase == "pending":
            why = "next"
        again = f" #{node.attempt}" if node.attempt > 1 else ""
        line: Line = [
            (f" {glyph} ", role),
            (fit(node.node, min(self._named, width // 3)) + " ", "bold"),
            (fit(node.team or "-", 12), ""),
            (fit(node.wave, 10 if wide else 8), "dim"),
            (fit(state + again, 16), role),
        ]
        when = wording.ago(node.since, self._now) if node.phase in BUSY | {"done", "failed"} else ""
        line.append((lines.clean(why), "bad" if node.phase == "failed" else "dim"))
        return (lines.beside(line, [(f" {when} ", "dim")] if when else [], width),)
