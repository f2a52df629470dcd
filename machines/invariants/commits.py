"""Commits: each event is judged after those before it, because one commit may free a slot and take it."""

from __future__ import annotations

from collections.abc import Sequence

from machines.facts.projection import Projection
from machines.invariants.facts import EarlierEvents
from machines.invariants.violations import violation
from machines.model.events import Event, RolloutOpened, TargetsJoined


def first_violation(facts: Projection, events: Sequence[Event], now: float) -> str | None:
    """Return the first rule that these events would break, None if they break none; changes no fact."""
    earlier, applied = EarlierEvents(), 0
    for number, event in enumerate(events, 1):
        broken = violation(facts, event, now, earlier)
        if broken is not None:
            return broken
        earlier.add(event)
        if isinstance(event, RolloutOpened | TargetsJoined):  # its targets may move in the same commit
            facts = facts.fork()
            for each in events[applied:number]:
                facts.apply(each)
            applied = number
    return None


def apply_judged(facts: Projection, events: Sequence[Event], now: float) -> str | None:
    """Apply events until one of them would break an invariant; return why it would, None for none."""
    earlier = EarlierEvents()
    for event in events:
        broken = violation(facts, event, now, earlier)
        if broken is not None:
            return broken
        earlier.add(event)
        facts.apply(event)
    return None
