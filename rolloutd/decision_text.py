"""The texts that the events of a decision carry."""

from __future__ import annotations

from typing import Final

from machines.model.decision import Command, EndFreeze, EndHold, Requeue, RollBack, SkipQuarantined
from machines.model.rollout import Target
from rolloutd.reason_text import describe

TIME_IS_OVER: Final = "its time is over"
"""Cause of the end of a hold or freeze by time."""

CLOCK_SET_BACK: Final = "the clock was set back to before the soak began"
"""Cause of a soak that begins again."""


def describe_command(command: Command, target: Target | None) -> str:
    """Return why the daemon carries out this command; "" where the event says it all."""
    match command:
        case EndHold() | EndFreeze():
            return TIME_IS_OVER
        case SkipQuarantined():
            return "by rolloutd, after a day in quarantine"
        case Requeue() if target is not None:
            return drift_text(target)
        case RollBack() if target is not None and target.order_by is not None:
            return f"ordered by {target.order_by.name}"
        case RollBack(reason=reason) if reason is not None:
            return describe(reason)
        case _:
            return ""


def drift_text(target: Target) -> str:
    """Return why a drifted node is changed again."""
    return "drifted" if target.drift is None else f"drifted: {', '.join(target.drift.tasks)}"
