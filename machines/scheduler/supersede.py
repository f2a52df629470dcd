"""Superseding: nodes that a superseded rollout finishes with the same change.

Such a node was in flight when the new rollout was submitted, and finishes under the old digest.  The new
rollout records it as done in the same commit, so no crash lies between.
"""

from __future__ import annotations

from collections.abc import Iterator

from machines.facts.index import Index
from machines.model.events import PhaseMoved
from machines.model.plan import PILOT_WAVE
from machines.model.rollout import Rollout
from machines.states import Outcome, Phase, Trigger
from machines.workflow.phase_transitions import transition


def carry_over(index: Index, event: PhaseMoved) -> list[PhaseMoved]:
    """Return the node's transitions in rollouts that supersede the one in which it is now done."""
    if event.outcome is not Outcome.CHANGED:
        return []
    change = index.rollout(event.rollout).digest.change
    found = []
    for rollout in index.rollouts.values():
        if (
            rollout.closed
            or rollout.digest.change != change
            or event.rollout not in _predecessors(index, rollout)
        ):
            continue
        for target in index.targets_on(event.node):
            # A pilot shows the new plan: it is not taken over.
            is_pilot = target.wave == PILOT_WAVE
            if target.rollout == rollout.id and target.phase is Phase.PENDING and not is_pilot:
                text = f"done in {event.rollout} with the same change"
                found.append(
                    transition(
                        target,
                        Trigger.FOUND_CURRENT,
                        event.at,
                        outcome=Outcome.ALREADY_CURRENT,
                        text=text,
                    )
                )
    return found


def _predecessors(index: Index, rollout: Rollout) -> Iterator[str]:
    """Yield the rollouts that this one supersedes, directly or not, the latest first."""
    current: Rollout | None = rollout
    while current is not None and current.supersedes is not None:
        yield current.supersedes
        current = index.rollouts.get(current.supersedes)
