"""The list of steps that a plan compiles to, and the table of retries."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machines.model.actions import Revert, Wait
from machines.model.plan import Capability, MaintainStage, Plan, StepDef
from machines.model.rollout import NodeOrder, Target
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.states import Phase
from machines.workflow.next_action import next_action
from machines.workflow.situation import Situation
from machines.workflow.steps import (
    NOT_ISOLATED_RETRY_S,
    RULES,
    UNKNOWN_RETRY_S,
    Purpose,
    compile_steps,
    next_try,
)
from tests.machines.builders import T0, plan_of

CORDON = StepDef("isolate.0.kubernetes", "kubernetes", capabilities=frozenset({Capability.CORDON_ONLY}))
BALANCER = StepDef("isolate.1.haproxy", "haproxy")
REACHABLE = StepDef("verify.0.reachable", "reachable", capabilities=frozenset({Capability.JUDGES_LIVENESS}))
IN_SERVICE = StepDef("verify.1.ssh", "ssh", in_service=True)
OF_PAYMENTS = StepDef("team.payments.0.ssh", "ssh", team="payments")


def full_plan() -> Plan:
    return replace(
        plan_of(),
        isolate=(CORDON, BALANCER),
        stages=(MaintainStage("build", "build.yml"), MaintainStage("configure", "site.yml")),
        verify=(REACHABLE, IN_SERVICE, OF_PAYMENTS),
        probation_s=60.0,
    )


def node() -> Target:
    return Target("R", "n1", "payments", (), "fleet", 0, phase=Phase.VERIFYING, attempt=1, since=T0)


def record(action: StepAction, state: StepState, number: int, at: float = T0) -> StepRecord:
    return StepRecord(
        "R", "n1", 1, BALANCER.name, action, number, state, at=at, began_at=at - 5.0, text="why"
    )


def test_plan_compiles_to_steps_in_order() -> None:
    assert [(step.purpose, step.id) for step in compile_steps(full_plan(), node())] == [
        (Purpose.CORDON, "isolate.0.kubernetes"),
        (Purpose.ISOLATE, "isolate.0.kubernetes"),
        (Purpose.ISOLATE, "isolate.1.haproxy"),
        (Purpose.MAINTAIN, "run.build"),
        (Purpose.MAINTAIN, "run.configure"),
        (Purpose.VERIFY, "verify.0.reachable"),
        (Purpose.VERIFY, "team.payments.0.ssh"),
        (Purpose.RETURN, "isolate.1.haproxy"),
        (Purpose.RETURN, "isolate.0.kubernetes"),
        (Purpose.VERIFY_IN_SERVICE, "verify.1.ssh"),
        (Purpose.WATCH, "probation"),
        (Purpose.PROBATION, "probation.verify.1.ssh"),
        (Purpose.CONFIRM_RETURN, "return.verify.0.reachable"),
    ]


def test_rows_of_one_phase_stand_together() -> None:
    phases = [step.rule.phase for step in compile_steps(full_plan(), node()) if step.rule.phase]
    assert phases == sorted(phases, key=[Phase.ISOLATING, Phase.MAINTAINING, Phase.VERIFYING].index)


def test_every_purpose_has_a_rule() -> None:
    assert set(RULES) == set(Purpose)


@pytest.mark.parametrize(
    ("purpose", "state", "number", "expected"),
    [
        (Purpose.ISOLATE, StepState.INTENDED, 2, 2),
        (Purpose.ISOLATE, StepState.OK, 2, StepState.OK),
        (Purpose.ISOLATE, StepState.FAILED, 1, StepState.FAILED),
        (Purpose.ISOLATE, StepState.BUSY, 9, Wait(T0 - 5.0 + NOT_ISOLATED_RETRY_S, BALANCER.name)),
        (Purpose.ISOLATE, StepState.UNKNOWN, 2, Wait(T0 + UNKNOWN_RETRY_S, BALANCER.name)),
        (Purpose.ISOLATE, StepState.UNKNOWN, 3, StepState.UNKNOWN),
        (Purpose.RETURN, StepState.UNKNOWN, 3, Wait(T0 + UNKNOWN_RETRY_S, BALANCER.name)),
        (Purpose.RETURN, StepState.UNKNOWN, 4, StepState.UNKNOWN),
        (Purpose.RETURN, StepState.BUSY, 44, Wait(T0 - 5.0 + NOT_ISOLATED_RETRY_S, BALANCER.name)),
        (Purpose.RETURN, StepState.BUSY, 45, StepState.BUSY),
        (Purpose.MAINTAIN, StepState.UNKNOWN, 1, StepState.UNKNOWN),
        (Purpose.VERIFY, StepState.UNKNOWN, 2, 3),
        (Purpose.VERIFY, StepState.UNKNOWN, 3, StepState.UNKNOWN),
        (Purpose.VERIFY, StepState.BUSY, 1, StepState.BUSY),
        (Purpose.CLEAN_UP, StepState.OK, 1, 2),
    ],
)
def test_result_is_retried_by_the_rule_of_its_purpose(
    purpose: Purpose, state: StepState, number: int, expected: int | Wait | StepState
) -> None:
    rule = RULES[purpose]
    assert next_try(rule, record(rule.action, state, number), T0) == expected


def test_first_try_has_the_first_number() -> None:
    assert next_try(RULES[Purpose.RETURN], None, T0, first=4) == 4


def test_isolation_again_in_effect_is_reverted_again() -> None:
    plan = replace(full_plan(), isolate=(BALANCER,))
    ordered = replace(node(), phase=Phase.FAILED, order=NodeOrder.RETURN, ordered_at=T0 - 60.0)
    records = [
        record(StepAction.APPLY, StepState.OK, 3),
        record(StepAction.REVERT, StepState.OK, 4),
        record(StepAction.APPLY, StepState.OK, 4),
    ]
    action = next_action(Situation(plan, ordered, records, T0, elapsed_s=1.0, has_unfinished_run=False))
    assert action == Revert(BALANCER, 5, None, is_last=True)
