"""What becomes of a run whose node is not found isolated any more.

Before a run there is time: nothing was harmed, so the isolation is asked for
again for as long as a node may take to be isolated.  Under a run there is not:
where the isolation is seen to be lost and is not had again, the run is ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from machines.actions import Action, Halt, Move
from machines.events import StepAction, StepRecord, StepState
from machines.rollout import Target
from machines.states import Trigger

REGAIN_S = 30.0
"""How long a run goes on while its lost isolation is not had again: the pass of a drain, and one more."""

_ASKED = (StepAction.DO, StepAction.LOOK)


def losing(
    target: Target,
    again: Action,
    records: Sequence[StepRecord],
    begun: StepRecord | None,
    now: float,
    elapsed_s: float,
    limit_s: float,
) -> Action:
    """Return what comes next for an isolator that was not found standing.

    `again` is what it needs; `records` are its own of this attempt, oldest first;
    `begun` is the run that is under way; `limit_s` is for when none is.
    """
    asked = [record for record in records if record.action in _ASKED]
    since = now
    for record in reversed(asked):
        if record.state is StepState.OK:
            break
        since = min(since, record.at)  # a clock that was set back gives nobody more time
    latest = asked[-1]
    hurried = begun is not None and latest.action is StepAction.DO
    lost_s = min(now - since, elapsed_s)
    if not isinstance(again, Move) and lost_s < (REGAIN_S if hurried else limit_s):
        return again
    text = f"{target.node} is no longer isolated and could not be again: {latest.text}"
    if begun is not None:
        return Halt(begun, f"{text}; its playbook was ended")
    return Move(Trigger.FAILED, step=latest.step, text=f"{text}; no playbook was begun")
