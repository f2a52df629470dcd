"""What the next action of one node follows from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from machines.model.causes import Causes
from machines.model.plan import Plan
from machines.model.reasons import Reason
from machines.model.rollout import Target
from machines.model.step_record import StepRecord
from machines.workflow.outage import Outage


@dataclass(frozen=True, slots=True)
class Situation:
    """All that the next action of one node follows from.

    `plan` is the plan as it applies to this node (plan_for_target).  `records` are the node's step records in
    this rollout, oldest first.  `elapsed_s` is the time in its phase during which a daemon was running.
    `has_unfinished_run`: processes of an older run may still be on the node.  `abort`: why its
    isolation should be aborted, empty if it should not.  `over_budget`: why its pools have no slot for it;
    None when they have.  `failed_before`: its attempt before this one failed.  `outage`: those that share it.
    """

    plan: Plan
    target: Target
    records: Sequence[StepRecord]
    now: float
    elapsed_s: float
    has_unfinished_run: bool = False
    abort: Causes = ()
    over_budget: Reason | None = None
    failed_before: bool = False
    outage: Outage = field(default_factory=Outage)
