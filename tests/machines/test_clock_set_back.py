"""A clock that was set back: no wait grows, no order is ignored."""

from __future__ import annotations

from dataclasses import replace

from machines.model.actions import CompleteOrder, Isolate, Probe, Revert, RunCheck, StopRun
from machines.model.causes import Cause, CauseCode
from machines.model.plan import Capability, StepDef
from machines.model.rollout import NodeOrder, Target
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.states import Phase
from machines.workflow.failing import REISOLATE_TIMEOUT_S
from machines.workflow.next_action import next_action
from machines.workflow.situation import Situation
from tests.machines.builders import CORDONS, T0, plan_of

CORDON = StepDef("isolate.0.kubernetes", "kubernetes", capabilities=CORDONS)
ALIVE = StepDef("verify.0.reachable", "reachable", capabilities=frozenset(Capability))
PLAN = plan_of(isolate=(CORDON,), verify=(ALIVE,), isolate_timeout_s=600.0)
TARGET = Target("R", "n1", "t1", (), "fleet", 1, phase=Phase.ISOLATING, attempt=1, since=T0)
SET_BACK_S = 3600.0
"""How far the clock was set back after the records were written."""

DONE = (CORDON.name, StepAction.APPLY, 1, StepState.OK, 0.0)
ResultText = tuple[str, StepAction, int, StepState, float]


def decided_action(target: Target, after_s: float, *steps: ResultText) -> object:
    """Return what comes next so long after T0, of records made at such times after T0."""
    records = [
        StepRecord("R", "n1", 1, step, action, number, state, at=T0 + at, began_at=T0 + at, text="why")
        for step, action, number, state, at in steps
    ]
    return next_action(
        Situation(PLAN, target, records, T0 + after_s, elapsed_s=after_s, has_unfinished_run=False)
    )


def test_busy_isolator_asked_again() -> None:
    for state in (StepState.BUSY, StepState.UNKNOWN):
        assert decided_action(
            TARGET, -SET_BACK_S, (CORDON.name, StepAction.INSPECT, 1, state, 5.0)
        ) == Isolate(CORDON, 2)


def test_busy_node_probed_again() -> None:
    probe = StepDef("traffic.0", "ssh")
    plan = plan_of(isolate=(), traffic=(probe,))
    look = StepRecord(
        "R", "n1", 1, probe.name, StepAction.INSPECT, 1, StepState.UNKNOWN, at=T0 + 5.0, began_at=T0
    )
    again = next_action(
        Situation(plan, TARGET, [look], T0 - SET_BACK_S, elapsed_s=0.0, has_unfinished_run=False)
    )
    assert again == Probe(probe, 2)


def test_repeated_return_order_ignores_earlier_attempts() -> None:
    target = replace(
        TARGET, phase=Phase.FAILED, isolated=True, order=NodeOrder.RETURN, ordered_at=T0 + 20.0 - SET_BACK_S
    )
    undone = (CORDON.name, StepAction.REVERT, 1, StepState.FAILED, 10.0)
    assert decided_action(target, 21.0 - SET_BACK_S, DONE, undone) == Revert(CORDON, 2, None, is_last=True)
    back = (CORDON.name, StepAction.REVERT, 1, StepState.OK, 5.0)
    red = ("return.verify.0.reachable", StepAction.CHECK, 1, StepState.FAILED, 10.0)
    assert decided_action(target, 21.0 - SET_BACK_S, DONE, back, red) == RunCheck(ALIVE, red[0], 2)


def test_attempts_after_clock_set_back_are_bounded() -> None:
    target = replace(TARGET, phase=Phase.FAILED, isolated=True, order=NodeOrder.RETURN, ordered_at=T0 + 20.0)
    before, now_s = (CORDON.name, StepAction.REVERT, 1, StepState.FAILED, 10.0), 21.0 - SET_BACK_S
    assert decided_action(target, now_s, DONE, before) == Revert(CORDON, 2, None, is_last=True)
    since = (CORDON.name, StepAction.REVERT, 2, StepState.FAILED, now_s)
    told = decided_action(target, now_s + 1.0, DONE, before, since)
    not_reverted = Cause(CauseCode.NOT_REVERTED, {"step": CORDON.name, "text": "why"})
    assert told == CompleteOrder(succeeded=False, causes=(not_reverted,))
    back = (CORDON.name, StepAction.REVERT, 2, StepState.OK, now_s)
    green = ("return.verify.0.reachable", StepAction.CHECK, 1, StepState.OK, now_s + 1.0)
    assert decided_action(target, now_s + 2.0, DONE, before, back, green) == CompleteOrder(
        succeeded=True, causes=(Cause(CauseCode.RETURNED),)
    )


def test_run_without_isolation_stopped_in_time() -> None:
    target = replace(TARGET, phase=Phase.MAINTAINING)
    run = ("run.configure", StepAction.RUN, 1, StepState.INTENDED, 1.0)
    lost = (CORDON.name, StepAction.APPLY, 2, StepState.BUSY, 2.0)
    again = (CORDON.name, StepAction.APPLY, 3, StepState.BUSY, 3.0 - SET_BACK_S)
    at = 4.0 - SET_BACK_S + REISOLATE_TIMEOUT_S
    records = [
        StepRecord("R", "n1", 1, step, action, number, state, at=T0 + at, began_at=T0 + at, text="why")
        for step, action, number, state, at in (DONE, run, lost, again)
    ]
    ended = next_action(
        Situation(
            PLAN, target, records, T0 + at, elapsed_s=REISOLATE_TIMEOUT_S + 5.0, has_unfinished_run=False
        )
    )
    assert isinstance(ended, StopRun)
