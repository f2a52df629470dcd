"""How phases look: one glyph and one role each, so that they read without colour too.

Strips show many nodes in few cells.  Where one cell stands for several nodes it
shows what most wants to be seen: a failure before work, work before the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from tui.lines import Line, runs, width_of
from tui.values import BUSY, NodeState

Look = tuple[str, str]
"""A glyph and its role."""

LOOKS: dict[str, Look] = {
    "pending": ("·", "pending"),
    "isolating": ("◔", "isolating"),
    "maintaining": ("◑", "maintaining"),
    "verifying": ("◕", "verifying"),
    "done": ("■", "ok"),
    "failed": ("✗", "bad"),
    "already-current": ("□", "ok"),
    "skipped": ("»", "dim"),
    "rolled-back": ("↺", "warn"),
    "left": ("-", "dim"),
}
"""By phase, and for done nodes by outcome."""

PARTLY: Look = ("▣", "ok")
"""Some of the cell's nodes are done, and nothing else is to be told of the others."""

_URGENT = ("failed", "verifying", "maintaining", "isolating")


def look(node: NodeState) -> Look:
    """Return how a node looks."""
    if node.phase == "done" and node.outcome in LOOKS:
        return LOOKS[node.outcome]
    return LOOKS.get(node.phase, ("?", "warn"))


def strip(nodes: Sequence[NodeState], width: int) -> Line:
    """Return the nodes in at most `width` cells, one each while they fit."""
    if width <= 0 or not nodes:
        return []
    if len(nodes) <= width:
        return runs(look(node) for node in nodes)
    return runs(_cell(nodes[begin:end]) for begin, end in _cuts(len(nodes), width))


@lru_cache(maxsize=256)
def _cuts(count: int, width: int) -> tuple[tuple[int, int], ...]:
    """Cut `count` nodes into `width` cells that differ by one node at most."""
    edges = [cell * count // width for cell in range(width + 1)]
    return tuple(pairwise(edges))


def _cell(nodes: Sequence[NodeState]) -> Look:
    phases = {node.phase for node in nodes}
    for phase in _URGENT:
        if phase in phases:
            return LOOKS[phase]
    if phases == {"done"}:
        outcomes = {node.outcome for node in nodes}
        return look(nodes[0]) if len(outcomes) == 1 else LOOKS["done"]
    return PARTLY if "done" in phases else LOOKS["pending"]


def legend(width: int) -> Line:
    """Return what the glyphs mean, in one line: as many as it has room for."""
    line: Line = []
    for name in (
        "pending",
        *sorted(BUSY, key=list(LOOKS).index),
        "done",
        "failed",
        "skipped",
        "already-current",
    ):
        glyph, role = LOOKS[name]
        if width_of(line) + len(name) + 3 > width:
            break
        line += [(glyph, role), (f" {name}  ", "dim")]
    return line
