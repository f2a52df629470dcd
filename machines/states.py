"""The phases of a node and the table of their transitions.

Each node of a rollout is in one of six phases.  The happy path is

    pending -> isolating -> maintaining -> verifying -> done

and every node on it (IN_FLIGHT_PHASES) uses a slot of each of its pools.  These edges leave the path:

- `failed` can follow every in-flight phase, `pending` when a prepare stage disturbs the node, and `done` when
  a check fails during the soak.  A failed node stays isolated if it was isolated, keeps its slots, and waits
  for a person: retry, rollback or skip.
- `isolation-aborted` leads from isolating back to pending.  Nothing was changed on the node yet, so this is
  no failure; the node waits a little longer after each abort.  The rollback of a changed node leads back to
  done: the node still has the change.
- `left` leads to done from every phase, because the inventory can lose a node at any time; `rejoined` leads
  back to pending when the inventory has the node again.
- `drifted` leads from done back to pending, for plans that keep their change only.
- `rollback-ordered` leads from failed or done to isolating: by a person, or by the plan after a failure.

MACHINE below is the only place where a transition is defined.  Legality, the next phase, the outcomes that a
transition may end with, and the diagram in ARCHITECTURE.md all come from it; a transition that it does not
have raises IllegalTransition before anything is written.  One machine serves all nodes, because binding a
model to it costs as much as ten triggers or more.  This file does not know when a legal transition is wise:
the scheduler and the workflow decide that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from itertools import chain
from typing import Any

from transitions import Machine, MachineError, Transition


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
    SOAK_CHECK_FAILED = "soak-check-failed"
    REJOINED = "rejoined"
    DRIFTED = "drifted"
    DISTURBED = "disturbed"


CARRIES_CHANGE = frozenset({Outcome.CHANGED, Outcome.ALREADY_CURRENT})

EXCEPTIONS = frozenset({Outcome.SKIPPED, Outcome.ROLLED_BACK})
"""Outcomes of a node that is done without the change, by a user's decision."""

IN_FLIGHT_PHASES = frozenset({Phase.ISOLATING, Phase.MAINTAINING, Phase.VERIFYING})
"""Phases in which rolloutd works on the node, so that it counts as down."""

NEW_ATTEMPT = frozenset({Trigger.ADMITTED, Trigger.ROLLBACK_ORDERED})

RESETS_BACKOFF = frozenset({Trigger.RETRIED, Trigger.ROLLBACK_ORDERED})
"""Orders after a failure; they set the count of aborted isolations, and so the backoff, to zero."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One legal transition, and the outcomes that it may end with."""

    trigger: Trigger
    source: Phase
    target: Phase
    outcomes: frozenset[Outcome]


@dataclass(frozen=True, slots=True)
class _EndsWith:
    """Condition of a transition: it ends with one of these outcomes, or with none if there are none."""

    outcomes: frozenset[Outcome]

    def __call__(self, outcome: Outcome | None) -> bool:
        return outcome in self.outcomes if self.outcomes else outcome is None


def _edge(trigger: Trigger, sources: list[Phase], target: Phase, *outcomes: Outcome) -> dict[str, Any]:
    return {
        "trigger": trigger.value,
        "source": sources,
        "dest": target,
        "conditions": _EndsWith(frozenset(outcomes)),
    }


MACHINE = Machine(
    model=None,
    states=list(Phase),
    initial=Phase.PENDING,
    # The library would otherwise add an edge from every phase to every other.
    auto_transitions=False,
    transitions=[
        _edge(Trigger.ADMITTED, [Phase.PENDING], Phase.ISOLATING),
        _edge(Trigger.FOUND_CURRENT, [Phase.PENDING], Phase.DONE, Outcome.ALREADY_CURRENT),
        _edge(Trigger.ISOLATION_ABORTED, [Phase.ISOLATING], Phase.PENDING),
        _edge(Trigger.ISOLATION_ABORTED, [Phase.ISOLATING], Phase.DONE, Outcome.CHANGED),
        _edge(Trigger.ISOLATED, [Phase.ISOLATING], Phase.MAINTAINING),
        _edge(Trigger.MAINTAINED, [Phase.MAINTAINING], Phase.VERIFYING),
        _edge(Trigger.VERIFIED, [Phase.VERIFYING], Phase.DONE, Outcome.CHANGED, Outcome.ROLLED_BACK),
        _edge(Trigger.FAILED, sorted(IN_FLIGHT_PHASES), Phase.FAILED),
        _edge(Trigger.RETRIED, [Phase.FAILED], Phase.PENDING),
        _edge(Trigger.ROLLBACK_ORDERED, [Phase.FAILED, Phase.DONE], Phase.ISOLATING),
        _edge(Trigger.SKIPPED, [Phase.PENDING, Phase.FAILED], Phase.DONE, Outcome.SKIPPED),
        _edge(
            Trigger.LEFT, [Phase.PENDING, *sorted(IN_FLIGHT_PHASES), Phase.FAILED], Phase.DONE, Outcome.LEFT
        ),
        _edge(Trigger.SOAK_CHECK_FAILED, [Phase.DONE], Phase.FAILED),
        _edge(Trigger.REJOINED, [Phase.DONE], Phase.PENDING),
        _edge(Trigger.DRIFTED, [Phase.DONE], Phase.PENDING),
        _edge(Trigger.DISTURBED, [Phase.PENDING], Phase.FAILED),
    ],
)


class IllegalTransition(ValueError):
    """A requested transition is not in the table."""


@dataclass(slots=True)
class _Node:
    """What the machine moves; `state` is its name for a phase."""

    state: Phase


@cache
def next_phase(trigger: Trigger, source: Phase, outcome: Outcome | None = None) -> Phase:
    """Return the phase that `trigger` leads to from `source`.

    Raises IllegalTransition when the machine has no such transition, or when it does not end with `outcome`.
    The machine answers each question once: a trigger costs some 10 us, and the writer asks for every event.
    """
    node = _Node(source)
    event = MACHINE.events.get(trigger)
    try:
        if event is not None and event.trigger(node, outcome):
            return node.state
    # Two refusals differ below: the error names the outcomes where the edge itself is legal.
    except MachineError:
        pass
    for transition in MACHINE.get_transitions(trigger.value, source):
        allowed = ", ".join(sorted(_outcomes(transition))) or "none"
        raise IllegalTransition(f"{trigger} from {source} has outcome {allowed}, not {outcome}")
    raise IllegalTransition(f"a {source} node cannot be {trigger}")


def edges() -> tuple[Edge, ...]:
    """Return the transitions of the machine, in the order of the diagram."""
    return tuple(
        Edge(Trigger(trigger), Phase[transition.source], Phase[str(transition.dest)], _outcomes(transition))
        for trigger, event in MACHINE.events.items()
        for transition in chain.from_iterable(event.transitions.values())
    )


def _outcomes(transition: Transition) -> frozenset[Outcome]:
    (condition,) = (each.func for each in transition.conditions if isinstance(each.func, _EndsWith))
    return condition.outcomes


def mermaid_diagram() -> str:
    """Return the machine as a Mermaid state diagram for ARCHITECTURE.md."""
    lines = ["stateDiagram-v2", "    [*] --> pending"]
    for edge in edges():
        outcomes = f" ({', '.join(sorted(edge.outcomes))})" if edge.outcomes else ""
        lines.append(f"    {edge.source} --> {edge.target}: {edge.trigger}{outcomes}")
    return "\n".join(lines) + "\n"
