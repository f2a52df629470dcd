"""A clock that is set back makes nobody wait who has waited, and nobody's word is taken for an older one."""

from __future__ import annotations

from dataclasses import replace

from machines.actions import Halt, Isolate, Probe, Settle, Undo, Verify
from machines.events import StepAction, StepRecord, StepState
from machines.guard import REGAIN_S
from machines.plan import StepSpec
from machines.reconcile import next_action
from machines.rollout import Order, Target
from machines.states import Phase
from tests.machines.worlds import T0, plan_of

CORDON = StepSpec("isolate.0.kubernetes", "kubernetes")
ALIVE = StepSpec("verify.0.reachable", "reachable")
PLAN = plan_of(isolate=(CORDON,), verify=(ALIVE,), isolate_timeout_s=600.0)
TARGET = Target("R", "n1", "t1", (), "fleet", 1, phase=Phase.ISOLATING, attempt=1, since=T0)
BACK_S = 3600.0
"""How far the clock was set back after the records were written."""

DONE = (CORDON.name, StepAction.DO, 1, StepState.OK, 0.0)
Told = tuple[str, StepAction, int, StepState, float]


def asked(target: Target, after_s: float, *steps: Told) -> object:
    """Return what comes next so long after T0, of records made at such times after T0."""
    records = [
        StepRecord("R", "n1", 1, step, action, number, state, at=T0 + at, began_at=T0 + at, text="why")
        for step, action, number, state, at in steps
    ]
    return next_action(PLAN, target, records, T0 + after_s, elapsed_s=after_s, unclean=False)


def test_who_was_not_isolated_is_asked_again() -> None:
    for state in (StepState.BUSY, StepState.UNKNOWN):
        assert asked(TARGET, -BACK_S, (CORDON.name, StepAction.LOOK, 1, state, 5.0)) == Isolate(CORDON, 2)


def test_who_was_busy_with_traffic_is_looked_at_again() -> None:
    probe = StepSpec("traffic.0", "ssh")
    plan = plan_of(isolate=(), traffic=(probe,))
    look = StepRecord(
        "R", "n1", 1, probe.name, StepAction.LOOK, 1, StepState.UNKNOWN, at=T0 + 5.0, began_at=T0
    )
    again = next_action(plan, TARGET, [look], T0 - BACK_S, elapsed_s=0.0, unclean=False)
    assert again == Probe(probe, 2)


def test_a_person_who_asks_again_for_a_return_is_not_answered_with_what_was_tried_before() -> None:
    target = replace(
        TARGET, phase=Phase.FAILED, isolated=True, order=Order.RETURN, ordered_at=T0 + 20.0 - BACK_S
    )
    undone = (CORDON.name, StepAction.UNDO, 1, StepState.FAILED, 10.0)
    assert asked(target, 21.0 - BACK_S, DONE, undone) == Undo(CORDON, 2, None, last=True)
    back = (CORDON.name, StepAction.UNDO, 1, StepState.OK, 5.0)
    red = ("return.verify.0.reachable", StepAction.CHECK, 1, StepState.FAILED, 10.0)
    assert asked(target, 21.0 - BACK_S, DONE, back, red) == Verify(ALIVE, red[0], 2)


def test_what_was_tried_after_an_order_and_the_clock_is_not_tried_without_end() -> None:
    target = replace(TARGET, phase=Phase.FAILED, isolated=True, order=Order.RETURN, ordered_at=T0 + 20.0)
    before, now_s = (CORDON.name, StepAction.UNDO, 1, StepState.FAILED, 10.0), 21.0 - BACK_S
    assert asked(target, now_s, DONE, before) == Undo(CORDON, 2, None, last=True)
    since = (CORDON.name, StepAction.UNDO, 2, StepState.FAILED, now_s)
    told = asked(target, now_s + 1.0, DONE, before, since)
    assert told == Settle(done=False, text=f"{CORDON.name} could not be undone: why")
    back = (CORDON.name, StepAction.UNDO, 2, StepState.OK, now_s)
    green = ("return.verify.0.reachable", StepAction.CHECK, 1, StepState.OK, now_s + 1.0)
    assert asked(target, now_s + 2.0, DONE, before, back, green) == Settle(done=True, text="returned")


def test_a_run_without_isolation_is_ended_no_later() -> None:
    target = replace(TARGET, phase=Phase.MAINTAINING)
    run = ("run.configure", StepAction.RUN, 1, StepState.INTENDED, 1.0)
    lost = (CORDON.name, StepAction.DO, 2, StepState.BUSY, 2.0)
    again = (CORDON.name, StepAction.DO, 3, StepState.BUSY, 3.0 - BACK_S)
    at = 4.0 - BACK_S + REGAIN_S
    records = [
        StepRecord("R", "n1", 1, step, action, number, state, at=T0 + at, began_at=T0 + at, text="why")
        for step, action, number, state, at in (DONE, run, lost, again)
    ]
    ended = next_action(PLAN, target, records, T0 + at, elapsed_s=REGAIN_S + 5.0, unclean=False)
    assert isinstance(ended, Halt)
