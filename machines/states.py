"""The phases of a node and the one table of the ways between them.

Every other part asks this table; nothing in the project moves a node along an
edge that is not written here.  It knows no plan, no pool and no clock: whether
a legal edge may be taken *now* is decided in schedule.py and reconcile.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from transitions import Machine


class Phase(StrEnum):
    """Where a node stands in one rollout; these six and no more."""

    PENDING = "pending"
    ISOLATING = "isolating"
    MAINTAINING = "maintaining"
    VERIFYING = "verifying"
    DONE = "done"
    FAILED = "failed"


class Outcome(StrEnum):
    """How a node came to be done."""

    CHANGED = "changed"
    ALREADY_CURRENT = "already-current"
    SKIPPED = "skipped"
    LEFT = "left"
    ROLLED_BACK = "rolled-back"


class Trigger(StrEnum):
    """What happened to a node that made it take an edge."""

    ADMITTED = "admitted"
    FOUND_CURRENT = "found-current"
    SKIPPED = "skipped"
    LEFT = "left"
    PUT_BACK = "put-back"
    ISOLATED = "isolated"
    MAINTAINED = "maintained"
    VERIFIED = "verified"
    FAILED = "failed"
    RETRIED = "retried"
    ROLLBACK_ORDERED = "rollback-ordered"
    ROLLED_BACK = "rolled-back"
    REDDENED = "reddened"
    DRIFTED = "drifted"


BUSY = frozenset({Phase.ISOLATING, Phase.MAINTAINING, Phase.VERIFYING})
"""Phases in which rolloutd works on the node, so that it counts as down."""

NEW_ATTEMPT = frozenset({Trigger.ADMITTED, Trigger.ROLLBACK_ORDERED})
"""What begins a passage of its own out of pending or failed."""

FROM_ANEW = frozenset({Trigger.RETRIED, Trigger.ROLLBACK_ORDERED})
"""A person's orders after a failure: how often the node was put back before them counts no more."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One legal way between two phases, and the outcomes it may end with."""

    trigger: Trigger
    source: Phase
    target: Phase
    outcomes: frozenset[Outcome] = frozenset()


def _edges() -> tuple[Edge, ...]:
    p, t, o = Phase, Trigger, Outcome
    busy = (p.ISOLATING, p.MAINTAINING, p.VERIFYING)
    return (
        Edge(t.ADMITTED, p.PENDING, p.ISOLATING),
        Edge(t.FOUND_CURRENT, p.PENDING, p.DONE, frozenset({o.ALREADY_CURRENT})),
        Edge(t.SKIPPED, p.PENDING, p.DONE, frozenset({o.SKIPPED})),
        Edge(t.LEFT, p.PENDING, p.DONE, frozenset({o.LEFT})),
        Edge(t.PUT_BACK, p.ISOLATING, p.PENDING),
        Edge(t.ISOLATED, p.ISOLATING, p.MAINTAINING),
        Edge(t.MAINTAINED, p.MAINTAINING, p.VERIFYING),
        Edge(t.VERIFIED, p.VERIFYING, p.DONE, frozenset({o.CHANGED, o.ROLLED_BACK})),
        *(Edge(t.FAILED, phase, p.FAILED) for phase in busy),
        *(Edge(t.LEFT, phase, p.DONE, frozenset({o.LEFT})) for phase in busy),
        Edge(t.RETRIED, p.FAILED, p.PENDING),
        Edge(t.ROLLBACK_ORDERED, p.FAILED, p.ISOLATING),
        Edge(t.SKIPPED, p.FAILED, p.DONE, frozenset({o.SKIPPED})),
        Edge(t.LEFT, p.FAILED, p.DONE, frozenset({o.LEFT})),
        Edge(t.ROLLED_BACK, p.FAILED, p.DONE, frozenset({o.ROLLED_BACK})),
        Edge(t.REDDENED, p.DONE, p.FAILED),
        Edge(t.DRIFTED, p.DONE, p.PENDING),
    )


TABLE: tuple[Edge, ...] = _edges()

_BY_KEY = {(edge.trigger, edge.source): edge for edge in TABLE}

MACHINE = Machine(
    model=None,
    states=list(Phase),
    initial=Phase.PENDING,
    transitions=[[edge.trigger.value, edge.source, edge.target] for edge in TABLE],
    auto_transitions=False,
    send_event=False,
)
"""The table as a `transitions` machine: its diagram and its cross-check."""


class IllegalTransition(ValueError):
    """A move that is not in the table was asked for."""


def edge(trigger: Trigger, source: Phase, outcome: Outcome | None = None) -> Edge:
    """Return the edge that `trigger` takes from `source`.

    Raises IllegalTransition when the table has no such edge, or when the edge
    does not end with `outcome`.
    """
    found = _BY_KEY.get((trigger, source))
    if found is None:
        raise IllegalTransition(f"a {source} node cannot be {trigger}")
    if (outcome is None) != (not found.outcomes) or (outcome is not None and outcome not in found.outcomes):
        allowed = ", ".join(sorted(found.outcomes)) or "none"
        raise IllegalTransition(f"{trigger} from {source} has outcome {allowed}, not {outcome}")
    return found


def diagram() -> str:
    """Return the table as a Mermaid state diagram, for the documents."""
    lines = ["stateDiagram-v2", "    [*] --> pending"]
    for way in TABLE:
        ends = f" ({', '.join(sorted(way.outcomes))})" if way.outcomes else ""
        lines.append(f"    {way.source} --> {way.target}: {way.trigger}{ends}")
    return "\n".join(lines) + "\n"
