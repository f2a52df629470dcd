"""All nodes of a rollout in their order, with the reason of each that waits; found by any word."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from textual.widget import Widget

from tui import lines, wording
from tui.lines import Line, fit
from tui.listing import Banner, Listing
from tui.page import Page
from tui.phases import look
from tui.question import Subject
from tui.values import BUSY, NodeState, RolloutState


class NodesPage(Page):
    """The nodes of one rollout; of one pool, or with one reason, where that is what was opened."""

    place = "nodes"

    def __init__(self, rollout: str, *, pool: str = "", reason: str = "") -> None:
        super().__init__()
        self.rollout_id = rollout
        self.pool = pool
        self.reason = reason
        self.text = ""

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
        self.query_one("#body").focus()
        super().on_mount()

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
        return (
            [each for each in nodes if all(word in _words(each) for word in words)] if words else list(nodes)
        )

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
        return [[(f" {found}{why}{text}", "head")]]


def _words(node: NodeState) -> str:
    """Return by what a node is found: not by its reason, which may tell of other nodes."""
    pools = " ".join(node.pools)
    return f"{node.node} {node.team} {node.phase} {node.outcome} {node.wave} {pools}".lower()


class NodeRows:
    """A line per node, drawn when it is seen."""

    def __init__(self, nodes: Sequence[NodeState], now: float) -> None:
        self._nodes = nodes
        self._now = now

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
            (fit(node.node, 24 if wide else 14), "bold"),
            (fit(node.team or "-", 12), ""),
            (fit(node.wave, 10 if wide else 8), "dim"),
            (fit(state + again, 16), role),
        ]
        when = wording.ago(node.since, self._now) if node.phase in BUSY | {"done", "failed"} else ""
        line.append((lines.clean(why), "bad" if node.phase == "failed" else "dim"))
        return (lines.beside(line, [(f" {when} ", "dim")] if when else [], width),)
