"""What a rollout that took over from another one owes to the nodes of the old one.

A node that the old rollout brings to the very same change stays done: it was in
flight when the new one was submitted, and finishes under the old digest.  The
new rollout learns of it in the same commit, so no crash lies in between.
"""

from __future__ import annotations

from collections.abc import Iterator

from machines.events import PhaseMoved
from machines.index import Index
from machines.moves import move
from machines.rollout import Rollout
from machines.states import Outcome, Phase, Trigger


def carried(index: Index, moved: PhaseMoved) -> list[PhaseMoved]:
    """Return the moves of the same node in rollouts that supersede the one in which it is now done."""
    if moved.outcome is not Outcome.CHANGED:
        return []
    change = index.rollout(moved.rollout).digest.change
    found = []
    for rollout in index.rollouts.values():
        if rollout.closed or rollout.digest.change != change or moved.rollout not in _before(index, rollout):
            continue
        for target in index.targets_on(moved.node):
            if target.rollout == rollout.id and target.phase is Phase.PENDING:
                text = f"done in {moved.rollout} with the same change"
                found.append(
                    move(
                        target,
                        Trigger.FOUND_CURRENT,
                        moved.at,
                        outcome=Outcome.ALREADY_CURRENT,
                        text=text,
                    )
                )
    return found


def _before(index: Index, rollout: Rollout) -> Iterator[str]:
    """Yield the rollouts that this one took over from, the latest first."""
    seen: Rollout | None = rollout
    while seen is not None and seen.supersedes is not None:
        yield seen.supersedes
        seen = index.rollouts.get(seen.supersedes)
