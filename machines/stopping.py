"""What comes next on a node that a person ordered to be stopped at once.

Its run is ended, and the node is left where it is: failed, isolated or not, so
that people can look at it and decide.  As in reconcile.py the answer follows
from the records alone, so a daemon that was killed in the middle goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

from machines.actions import Action, Halt, Move, Settle
from machines.events import StepAction, StepRecord, StepState
from machines.rollout import Target
from machines.states import BUSY, Trigger


def stopping(target: Target, records: Sequence[StepRecord]) -> Action:
    """Return the next action of a target whose order is to stop."""
    if target.phase not in BUSY:
        return Settle(done=False, text="there was nothing left to stop")
    by = "a person" if target.order_by is None else target.order_by.name
    text = f"stopped while {target.phase} by order of {by}"
    running = [r for r in records if r.action is StepAction.RUN and r.state is StepState.INTENDED]
    if running:
        return Halt(running[-1], text)
    mine = [r.step for r in records if r.attempt == target.attempt]
    return Move(Trigger.FAILED, step=mine[-1] if mine else str(target.phase), text=text)
