"""Why the work on a node takes a turn, as values: clauses, each a code and what it is about.

The core writes no sentence: rolloutd/texts/cause_text.py renders clauses for events and step records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from machines.model.reasons import Params, Reason


class CauseCode(StrEnum):
    SAID = "said"
    """What an adapter has answered, in its own words."""
    REASON = "reason"
    """A reason for which nodes wait."""
    # An isolation.
    NO_SLOT = "no-slot"
    NOT_ISOLATED = "not-isolated"
    ABORT_CONTINUED = "abort-continued"
    """Another process of the daemon has begun the abort and knew why."""
    ISOLATION_LOST = "isolation-lost"
    NOT_ISOLATED_AGAIN = "not-isolated-again"
    NOT_RETURNED = "not-returned"
    # A run.
    RUN_STOPPED = "run-stopped"
    RUN_NOT_STARTED = "run-not-started"
    RERUN_ENDED_ALIKE = "rerun-ended-alike"
    REPAIR_FAILED = "repair-failed"
    REPAIR_USELESS = "repair-useless"
    PROCESSES_LEFT = "processes-left"
    # An order of a person.
    STOPPED = "stopped"
    NOTHING_TO_STOP = "nothing-to-stop"
    RETURNED = "returned"
    NOT_REVERTED = "not-reverted"
    CHECK_FAILED = "check-failed"
    # A decision.
    TIME_IS_OVER = "time-is-over"
    CLOCK_SET_BACK = "clock-set-back"
    QUARANTINED = "quarantined"
    DRIFTED = "drifted"
    ORDERED = "ordered"
    # Membership.
    NODE_GONE = "node-gone"
    NODE_BACK = "node-back"
    RENAMED = "renamed"
    DONE_BEFORE = "done-before"


@dataclass(frozen=True, slots=True)
class Cause:
    """One clause; `reason` is that of the code REASON, and of others that follow from a reason."""

    code: CauseCode
    params: Params = field(default_factory=dict)
    reason: Reason | None = None


Causes = tuple[Cause, ...]
"""Clauses in their order; none without a cause."""

Describe = Callable[[Causes], str]
"""Returns the text that an event carries for its causes."""


def said(text: str) -> Causes:
    """Return what an adapter has answered as a cause."""
    return (Cause(CauseCode.SAID, {"text": text}),) if text else ()
