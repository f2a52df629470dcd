"""The deadline of an isolation, and what an isolated node without a slot waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machines.facts.apply import apply_to_target
from machines.model.actions import Action, Isolate, Transition, Wait
from machines.model.events import DeadlineExtended
from machines.model.node import Node
from machines.model.plan import StepDef
from machines.model.reasons import Reason, ReasonCode
from machines.model.rollout import Target
from machines.model.selector import parse_selector
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.model.target_plan import plan_for_target
from machines.states import Phase, Trigger
from machines.workflow.next_action import SLOT_STEP, next_action
from machines.workflow.phase_transitions import transition
from machines.workflow.situation import Situation
from tests.machines.builders import T0, plan_of

DRAIN = StepDef("isolate.0.kubernetes", "kubernetes", drain_timeout_s=600.0)
PLAN = plan_of(isolate=(DRAIN,), isolate_timeout_s=600.0)
ISOLATING = Target("R", "n1", "t1", (), "fleet", 1, phase=Phase.ISOLATING, attempt=1, since=T0)
FULL = Reason(ReasonCode.POOL_OVER_BUDGET, "team/a")


def decided_action(state: StepState, after_s: float, *, over_budget: Reason | None = None) -> Action:
    """Return what comes next when the isolator has answered, so long after the phase began."""
    drained = StepRecord("R", "n1", 1, DRAIN.name, StepAction.APPLY, 1, state, at=T0 + 1.0, began_at=T0)
    return next_action(
        Situation(
            PLAN,
            ISOLATING,
            [drained],
            T0 + after_s,
            elapsed_s=after_s,
            has_unfinished_run=False,
            over_budget=over_budget,
        )
    )


def test_isolated_node_waits_for_slot_then_is_maintained() -> None:
    assert decided_action(StepState.OK, 2.0, over_budget=FULL) == Wait(T0 + 600.0, SLOT_STEP)
    assert decided_action(StepState.OK, 3.0) == Transition(Trigger.ISOLATED)


def test_wait_for_slot_ends_at_deadline() -> None:
    given_back = decided_action(StepState.OK, 600.0, over_budget=FULL)
    assert type(given_back).__name__ == "Revert"


def test_half_isolated_node_gives_way_at_once() -> None:
    assert isinstance(decided_action(StepState.BUSY, 30.0), Isolate)
    assert type(decided_action(StepState.BUSY, 30.0, over_budget=FULL)).__name__ == "Revert"


def test_isolated_node_is_finished_after_deadline_too() -> None:
    assert decided_action(StepState.OK, 3600.0) == Transition(Trigger.ISOLATED)
    assert type(decided_action(StepState.BUSY, 3600.0)).__name__ == "Revert"


@pytest.mark.parametrize(("role", "limit_s"), [("web", 120.0), ("worker", 600.0), ("host", 900.0)])
def test_node_has_limit_of_its_own_isolators(role: str, limit_s: float) -> None:
    plan = plan_of(
        isolate=(
            replace(DRAIN, where=parse_selector("role=worker")),
            StepDef("isolate.1.haproxy", "haproxy", where=parse_selector("role=web"), drain_timeout_s=120.0),
        ),
        isolate_timeout_s=900.0,
    )
    assert plan_for_target(plan, ISOLATING, Node("n1", labels={"role": role})).isolate_timeout_s == limit_s


def test_extension_ends_with_its_phase() -> None:
    extended = apply_to_target(ISOLATING, DeadlineExtended("R", "n1", 300.0, T0 + 900.0))
    assert extended.downtime_s == 300.0
    moved = transition(extended, Trigger.ISOLATED, T0 + 901.0)
    assert apply_to_target(extended, moved).downtime_s == 0.0
