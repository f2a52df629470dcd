"""The phases of a node and the table of their transitions.

Each node of a rollout is in one of six phases.  The happy path is

    pending -> isolating -> maintaining -> verifying -> done

and every node on it (IN_FLIGHT_PHASES) uses a slot of each of its pools.  Three kinds of edges leave the
path:

- `failed` can follow every in-flight phase, and `done` when a check fails during the soak.  A failed node
  stays isolated if it was isolated, keeps its slots, and waits for a person: retry, rollback or skip.
- `isolation-aborted` leads from isolating back to pending.  Nothing was changed on the node yet, so this is
  no failure; the node waits a little longer after each abort.
- `left` leads to done from every phase, because the inventory can lose a node at any time.

EDGES below is the only place where a transition is defined.  The store, the index, the invariants and the
diagram in ARCHITECTURE.md all read it; a transition that is not in the table raises IllegalTransition before
anything is written. This file does not know when a legal transition is wise: the scheduler and the workflow
decide that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from transitions import Machine


class Phase(StrEnum):
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
    """What made a node change its phase; the audit and the metrics carry these words."""

    ADMITTED = "admitted"
    FOUND_CURRENT = "found-current"
    SKIPPED = "skipped"
    LEFT = "left"
    ISOLATION_ABORTED = "isolation-aborted"
    ISOLATED = "isolated"
    MAINTAINED = "maintained"
    VERIFIED = "verified"
    FAILED = "failed"
    RETRIED = "retried"
    ROLLBACK_ORDERED = "rollback-ordered"
    ROLLED_BACK = "rolled-back"
    SOAK_CHECK_FAILED = "soak-check-failed"
    DRIFTED = "drifted"


IN_FLIGHT_PHASES = frozenset({Phase.ISOLATING, Phase.MAINTAINING, Phase.VERIFYING})
"""Phases in which rolloutd works on the node, so that it counts as down."""

NEW_ATTEMPT = frozenset({Trigger.ADMITTED, Trigger.ROLLBACK_ORDERED})
"""Triggers that begin a new attempt."""

RESETS_BACKOFF = frozenset({Trigger.RETRIED, Trigger.ROLLBACK_ORDERED})
"""Orders after a failure; they set the count of aborted isolations, and so the backoff, to zero."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One legal transition, and the outcomes that it may end with."""

    trigger: Trigger
    source: Phase
    target: Phase
    outcomes: frozenset[Outcome] = frozenset()


# The order is that of the diagram; tests/sim requires that a long simulation takes every edge.
EDGES: tuple[Edge, ...] = (
    Edge(Trigger.ADMITTED, Phase.PENDING, Phase.ISOLATING),
    Edge(Trigger.FOUND_CURRENT, Phase.PENDING, Phase.DONE, frozenset({Outcome.ALREADY_CURRENT})),
    Edge(Trigger.SKIPPED, Phase.PENDING, Phase.DONE, frozenset({Outcome.SKIPPED})),
    Edge(Trigger.LEFT, Phase.PENDING, Phase.DONE, frozenset({Outcome.LEFT})),
    Edge(Trigger.ISOLATION_ABORTED, Phase.ISOLATING, Phase.PENDING),
    Edge(Trigger.ISOLATED, Phase.ISOLATING, Phase.MAINTAINING),
    Edge(Trigger.MAINTAINED, Phase.MAINTAINING, Phase.VERIFYING),
    Edge(Trigger.VERIFIED, Phase.VERIFYING, Phase.DONE, frozenset({Outcome.CHANGED, Outcome.ROLLED_BACK})),
    Edge(Trigger.FAILED, Phase.ISOLATING, Phase.FAILED),
    Edge(Trigger.FAILED, Phase.MAINTAINING, Phase.FAILED),
    Edge(Trigger.FAILED, Phase.VERIFYING, Phase.FAILED),
    Edge(Trigger.LEFT, Phase.ISOLATING, Phase.DONE, frozenset({Outcome.LEFT})),
    Edge(Trigger.LEFT, Phase.MAINTAINING, Phase.DONE, frozenset({Outcome.LEFT})),
    Edge(Trigger.LEFT, Phase.VERIFYING, Phase.DONE, frozenset({Outcome.LEFT})),
    Edge(Trigger.RETRIED, Phase.FAILED, Phase.PENDING),
    Edge(Trigger.ROLLBACK_ORDERED, Phase.FAILED, Phase.ISOLATING),
    Edge(Trigger.SKIPPED, Phase.FAILED, Phase.DONE, frozenset({Outcome.SKIPPED})),
    Edge(Trigger.LEFT, Phase.FAILED, Phase.DONE, frozenset({Outcome.LEFT})),
    Edge(Trigger.ROLLED_BACK, Phase.FAILED, Phase.DONE, frozenset({Outcome.ROLLED_BACK})),
    Edge(Trigger.SOAK_CHECK_FAILED, Phase.DONE, Phase.FAILED),
    Edge(Trigger.DRIFTED, Phase.DONE, Phase.PENDING),
)

_EDGES_BY_TRIGGER = {(edge.trigger, edge.source): edge for edge in EDGES}

MACHINE = Machine(
    model=None,
    states=list(Phase),
    initial=Phase.PENDING,
    transitions=[[edge.trigger.value, edge.source, edge.target] for edge in EDGES],
    auto_transitions=False,
    send_event=False,
)
"""The table as a `transitions` machine; the tests compare the library's reading with find_edge()."""


class IllegalTransition(ValueError):
    """A requested transition is not in the table."""


def find_edge(trigger: Trigger, source: Phase, outcome: Outcome | None = None) -> Edge:
    """Return the edge that `trigger` takes from `source`.

    Raises IllegalTransition when the table has no such edge, or when the edge does not end with `outcome`.
    """
    edge = _EDGES_BY_TRIGGER.get((trigger, source))
    if edge is None:
        raise IllegalTransition(f"a {source} node cannot be {trigger}")
    if outcome not in (edge.outcomes or {None}):
        allowed = ", ".join(sorted(edge.outcomes)) or "none"
        raise IllegalTransition(f"{trigger} from {source} has outcome {allowed}, not {outcome}")
    return edge


def mermaid_diagram() -> str:
    """Return the table as a Mermaid state diagram for ARCHITECTURE.md."""
    lines = ["stateDiagram-v2", "    [*] --> pending"]
    for edge in EDGES:
        outcomes = f" ({', '.join(sorted(edge.outcomes))})" if edge.outcomes else ""
        lines.append(f"    {edge.source} --> {edge.target}: {edge.trigger}{outcomes}")
    return "\n".join(lines) + "\n"
