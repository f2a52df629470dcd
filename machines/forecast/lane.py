"""One node at work in a walk, as the walk remembers it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from machines.model.actions import Action, Wait
from machines.model.plan import Plan
from machines.model.rollout import Target
from machines.model.step_record import StepRecord
from machines.workflow.records import upsert


@dataclass(slots=True)
class Lane:
    """One node at work: its plan, its records, and what it does now.

    `kind` is what nodes have in common that take the same steps if each step takes as long; None for a node
    with a past.  `passed` is when each of its steps has ended, from `began_at` on, and how.
    """

    plan: Plan
    records: tuple[StepRecord, ...]
    began_at: float
    kind: tuple[object, ...] | None = None
    passed: tuple[tuple[float, str], ...] = ()
    action: Action | None = None

    def add(self, record: StepRecord) -> None:
        self.records = upsert(self.records, record)
        # To the millisecond: the same durations at other instants differ by a rounding.
        self.passed += ((round(record.at - self.began_at, 3), record.state),)


def kind_of(target: Target, plan: Plan) -> tuple[object, ...]:
    """Return what next_action() reads of a node without records, other than times."""
    # The plan of a node is its rollout's, but for the items that do not apply to it.
    specs = (*plan.traffic, *plan.isolate, *plan.verify, *(plan.guard.confirm if plan.guard else ()))
    names = tuple(spec.name for spec in specs)
    return target.rollout, target.attempt, target.isolated, names


def later_by(action: Action, seconds: float) -> Action:
    return replace(action, until=action.until + seconds) if isinstance(action, Wait) else action
