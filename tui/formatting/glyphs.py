"""One glyph and one role per phase, strips of nodes, and log lines.

Glyphs differ without colour.  A cell that stands for several nodes shows the most
urgent one: a failure before work in flight, work in flight before the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from tui.formatting.formatting import format_time
from tui.formatting.lines import Line, line_width, merge_spans, sanitize
from tui.state.values import NodeState, parse_timestamp

Glyph = tuple[str, str]

PHASE_GLYPHS: dict[str, Glyph] = {
    "pending": ("·", "pending"),
    "isolating": ("◔", "isolating"),
    "maintaining": ("◑", "maintaining"),
    "verifying": ("◕", "verifying"),
    "done": ("■", "ok"),
    "failed": ("✗", "bad"),
    "skipped": ("»", "dim"),
    "already-current": ("□", "ok"),
    "rolled-back": ("↺", "warn"),
    "left": ("-", "dim"),
}
"""By phase, and by outcome for done nodes."""

CHANGE_GLYPHS: dict[str, Glyph] = {
    **{state: PHASE_GLYPHS[state] for state in ("failed", "pending", "skipped", "done")},
    "unknown": ("?", "bad"),
    "drifted": ("≠", "warn"),
    "held": ("‖", "warn"),
    "in-flight": PHASE_GLYPHS["maintaining"],
    "never": ("-", "faint"),
}

PARTLY_DONE: Glyph = ("▣", "ok")
"""A cell of several nodes, some done and some pending."""

_PRECEDENCE = ("failed", "verifying", "maintaining", "isolating")


def node_glyph(node: NodeState) -> Glyph:
    return phase_glyph(node.phase, node.outcome)


def phase_glyph(phase: str, outcome: str | None) -> Glyph:
    if phase == "done" and outcome in PHASE_GLYPHS:
        return PHASE_GLYPHS[outcome]
    return PHASE_GLYPHS.get(phase, ("?", "warn"))


def node_strip(nodes: Sequence[NodeState], width: int) -> Line:
    """Return the nodes in at most `width` cells, one cell each if they fit."""
    if width <= 0 or not nodes:
        return []
    if len(nodes) <= width:
        return merge_spans(node_glyph(node) for node in nodes)
    # The cells differ by one node at most.
    edges = (cell * len(nodes) // width for cell in range(width + 1))
    return merge_spans(_cell_glyph(nodes[begin:end]) for begin, end in pairwise(edges))


def _cell_glyph(nodes: Sequence[NodeState]) -> Glyph:
    phases = {node.phase for node in nodes}
    for phase in _PRECEDENCE:
        if phase in phases:
            return PHASE_GLYPHS[phase]
    if phases == {"done"}:
        outcomes = {node.outcome for node in nodes}
        return node_glyph(nodes[0]) if len(outcomes) == 1 else PHASE_GLYPHS["done"]
    return PARTLY_DONE if "done" in phases else PHASE_GLYPHS["pending"]


def legend(width: int) -> Line:
    """Return the meaning of as many glyphs as fit on one line."""
    line: Line = []
    for name, (glyph, role) in PHASE_GLYPHS.items():
        if line_width(line) + len(name) + 3 > width:
            break
        line += [(glyph, role), (f" {name}  ", "dim")]
    return line


LOG_ROLES = {
    "ok": "ok",
    "changed": "warn",
    "failed": "bad",
    "unreachable": "bad",
    "skipped": "dim",
    "begun": "run",
    "unknown": "bad",
    "stats": "dim",
    "busy": "warn",
}


def log_line(line: Mapping[str, Any]) -> Line:
    at, text = parse_timestamp(line["at"]) or 0.0, sanitize(line["text"])
    is_title = line["kind"] in ("task", "play")
    role = "title" if is_title else LOG_ROLES.get(line["kind"], "")
    return [(format_time(at), "dim"), (f"{' ' if is_title else '   '}{text}", role)]
