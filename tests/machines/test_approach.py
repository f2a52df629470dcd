"""Where traffic is looked at, a node is closed gently, looked at again, and then isolated or put back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machines.actions import Action, Isolate, Move, Probe, Undo, Wait
from machines.approach import AGAIN_S, SOON_S, UNKNOWN_RETRY_S
from machines.changes import target_after
from machines.events import StepAction, StepRecord, StepState
from machines.moves import move
from machines.plan import Plan, StepSpec
from machines.reconcile import TURNED, backoff_s, next_action
from machines.rollout import Target
from machines.states import Phase, Trigger
from tests.machines.worlds import T0, plan_of

CORDON = StepSpec("isolate.0.kubernetes", "kubernetes")
COMMAND = StepSpec("isolate.1.command", "command")
JOBS = StepSpec("traffic.0.kubernetes", "kubernetes")
CONNECTIONS = StepSpec("traffic.1.ssh", "ssh")
PLAN = plan_of(isolate=(CORDON,), traffic=(JOBS,), isolate_timeout_s=600.0)
ISOLATING = Target("R", "w3", "t1", (), "fleet", 1, phase=Phase.ISOLATING, attempt=1, since=T0)
BUSY = "w3 is busy: pod batch/train-7 (Job train) runs there"

Step = tuple[StepSpec, StepAction, int, StepState, float]
DO, UNDO, LOOK = StepAction.DO, StepAction.UNDO, StepAction.LOOK
OK, INTENDED = StepState.OK, StepState.INTENDED

GENTLE: Step = (CORDON, DO, 1, OK, 1.0)
IDLE: Step = (JOBS, LOOK, 1, OK, 2.0)


def record(step: Step, attempt: int = 1) -> StepRecord:
    spec, action, number, state, after_s = step
    at = T0 + after_s
    text = BUSY if state is StepState.BUSY else "why"
    return StepRecord("R", "w3", attempt, spec.name, action, number, state, at=at, began_at=at, text=text)


def asked(after_s: float, *steps: Step, plan: Plan = PLAN, target: Target = ISOLATING) -> Action:
    """Return what comes next, so long after the phase began."""
    records = [record(step) for step in steps]
    return next_action(plan, target, records, T0 + after_s, elapsed_s=after_s, unclean=False)


def test_gently_first_then_a_look_then_fully_then_on() -> None:
    assert asked(0.0) == Isolate(CORDON, 1, gentle=True)
    assert asked(1.0, GENTLE) == Probe(JOBS, 1)
    assert asked(2.0, GENTLE, IDLE) == Isolate(CORDON, 2, prior_known=True)
    done = asked(3.0, GENTLE, IDLE, (CORDON, DO, 2, OK, 3.0))
    assert isinstance(done, Move)
    assert done.trigger is Trigger.ISOLATED


def test_what_the_look_finds_puts_the_node_back_and_is_the_reason() -> None:
    found: Step = (JOBS, LOOK, 1, StepState.BUSY, 2.0)
    assert asked(2.0, GENTLE, found) == Undo(CORDON, 1, None, True)
    undone: Step = (CORDON, UNDO, 1, OK, 3.0)
    back = asked(3.0, GENTLE, found, undone)
    assert back == Move(Trigger.PUT_BACK, text=BUSY, not_before=T0 + 3.0 + backoff_s(0))


def test_a_daemon_killed_anywhere_goes_on_as_gently() -> None:
    assert asked(9.0, (CORDON, DO, 1, INTENDED, 1.0)) == Isolate(CORDON, 1, prior_known=True, gentle=True)
    killed: Step = (CORDON, DO, 2, INTENDED, 3.0)
    assert asked(4.0, GENTLE, IDLE, killed) == Isolate(CORDON, 2, prior_known=True)
    found: Step = (JOBS, LOOK, 1, StepState.BUSY, 2.0)
    undoing: Step = (CORDON, UNDO, 1, INTENDED, 3.0)
    assert asked(900.0, GENTLE, found, undoing) == Undo(CORDON, 1, None, True)


def test_a_look_is_believed_for_the_next_step_and_no_longer() -> None:
    assert isinstance(asked(2.0 + SOON_S - 1, GENTLE, IDLE), Isolate)
    assert asked(2.0 + SOON_S, GENTLE, IDLE) == Probe(JOBS, 2)
    killed: Step = (CORDON, DO, 2, INTENDED, 3.0)
    assert asked(599.0, GENTLE, IDLE, killed) == Probe(JOBS, 2)
    assert asked(1.0, GENTLE, IDLE) == Probe(JOBS, 2), "the clock was set back"


def test_a_drain_that_is_under_way_is_not_looked_at_again() -> None:
    draining: Step = (CORDON, DO, 2, StepState.BUSY, 3.0)
    assert asked(100.0, GENTLE, IDLE, draining) == Isolate(CORDON, 3, prior_known=True)


def test_a_look_that_tells_nothing_is_made_again_and_then_is_busy() -> None:
    looks: list[Step] = [(JOBS, LOOK, number, StepState.UNKNOWN, number * 10.0) for number in (1, 2, 3)]
    assert asked(10.0, GENTLE, *looks[:1]) == Wait(T0 + 10.0 + UNKNOWN_RETRY_S, JOBS.name)
    assert asked(20.0, GENTLE, *looks[:1]) == Probe(JOBS, 2)
    assert asked(30.0, GENTLE, *looks) == Undo(CORDON, 1, None, True)
    # An error of a probe is no better than its silence.
    failed: Step = (JOBS, LOOK, 3, StepState.FAILED, 30.0)
    assert asked(30.0, GENTLE, *looks[:2], failed) == Undo(CORDON, 1, None, True)


def test_an_isolator_that_knows_no_gentle_way_is_preceded_by_a_look() -> None:
    plain = replace(PLAN, isolate=(COMMAND,))
    assert asked(0.0, plan=plain) == Probe(JOBS, 1)
    assert asked(2.0, IDLE, plan=plain) == Isolate(COMMAND, 1)
    # It has not been done as far as anybody knows, so traffic may have come meanwhile.
    tried: Step = (COMMAND, DO, 1, StepState.BUSY, 3.0)
    assert asked(60.0, IDLE, tried, plan=plain) == Probe(JOBS, 2)


def test_of_two_isolators_the_gentle_one_goes_first_and_the_other_is_preceded_by_its_own_look() -> None:
    both = replace(PLAN, isolate=(replace(COMMAND, name="isolate.0.command"), CORDON))
    command = both.isolate[0]
    assert asked(0.0, plan=both) == Isolate(CORDON, 1, gentle=True)
    assert asked(2.0, GENTLE, IDLE, plan=both) == Isolate(command, 1)
    slow: Step = (command, DO, 1, OK, 60.0)
    assert asked(60.0, GENTLE, IDLE, slow, plan=both) == Probe(JOBS, 2)
    again: Step = (JOBS, LOOK, 2, OK, 61.0)
    assert asked(61.0, GENTLE, IDLE, slow, again, plan=both) == Isolate(CORDON, 2, prior_known=True)


def test_without_an_isolator_the_playbook_is_preceded_by_a_look() -> None:
    bare = replace(PLAN, isolate=())
    assert asked(0.0, plan=bare) == Probe(JOBS, 1)
    moved = asked(2.0, IDLE, plan=bare)
    assert isinstance(moved, Move)
    assert moved.trigger is Trigger.ISOLATED
    busy = asked(2.0, (JOBS, LOOK, 1, StepState.BUSY, 2.0), plan=bare)
    assert isinstance(busy, Move)
    assert (busy.trigger, busy.text) == (Trigger.PUT_BACK, BUSY)


def test_all_probes_must_say_that_it_is_idle() -> None:
    two = replace(PLAN, traffic=(JOBS, CONNECTIONS))
    assert asked(2.0, GENTLE, IDLE, plan=two) == Probe(CONNECTIONS, 1)
    both: Step = (CONNECTIONS, LOOK, 1, OK, 3.0)
    assert asked(3.0, GENTLE, IDLE, both, plan=two) == Isolate(CORDON, 2, prior_known=True)


def test_a_node_that_failed_before_is_not_put_in_service_for_its_traffic_but_waited_for() -> None:
    target = replace(ISOLATING, attempt=2)
    records = [record((CORDON, DO, 1, OK, -100.0)), record(GENTLE, 2)]
    records.append(record((JOBS, LOOK, 1, StepState.BUSY, 2.0), 2))
    waits = next_action(PLAN, target, records, T0 + 3.0, elapsed_s=3.0, unclean=False)
    assert waits == Wait(T0 + 2.0 + AGAIN_S, JOBS.name)
    later = next_action(PLAN, target, records, T0 + 40.0, elapsed_s=40.0, unclean=False)
    assert later == Probe(JOBS, 2)
    late = next_action(PLAN, target, records, T0 + 601.0, elapsed_s=601.0, unclean=False)
    assert isinstance(late, Move)
    assert late.trigger is Trigger.FAILED
    assert BUSY in late.text


@pytest.mark.parametrize("target", [replace(ISOLATING, rolling_back=True), ISOLATING])
def test_a_rollback_and_a_plan_without_probes_ask_none(target: Target) -> None:
    plan = PLAN if target.rolling_back else replace(PLAN, traffic=())
    assert asked(0.0, plan=plan, target=target) == Isolate(CORDON, 1)
    moved = asked(1.0, GENTLE, plan=plan, target=target)
    assert isinstance(moved, Move)
    assert moved.trigger is Trigger.ISOLATED


def test_a_put_back_that_another_life_began_does_not_make_up_its_reason() -> None:
    undoing: Step = (CORDON, UNDO, 1, INTENDED, 2.0)
    assert asked(3.0, GENTLE, undoing) == Undo(CORDON, 1, None, True)
    back = asked(3.0, GENTLE, (CORDON, UNDO, 1, OK, 3.0))
    assert isinstance(back, Move)
    assert (back.trigger, back.text) == (Trigger.PUT_BACK, TURNED)
    late = asked(601.0, GENTLE, (CORDON, UNDO, 1, OK, 600.5))
    assert isinstance(late, Move)
    assert late.text == "not isolated within 600 s"


def test_a_rollback_that_was_put_back_is_looked_at_as_any() -> None:
    """Nobody stands beside it when its turn comes again: it must be idle then."""
    failed = replace(ISOLATING, phase=Phase.FAILED, put_backs=3)
    ordered = target_after(failed, move(failed, Trigger.ROLLBACK_ORDERED, T0))
    assert asked(0.0, target=replace(ordered, attempt=1)) == Isolate(CORDON, 1)
    back = target_after(ordered, move(ordered, Trigger.PUT_BACK, T0))
    again = target_after(back, move(back, Trigger.ADMITTED, T0))
    assert again.rolling_back
    assert asked(0.0, target=replace(again, attempt=1)) == Isolate(CORDON, 1, gentle=True)
    assert asked(1.0, GENTLE, target=replace(again, attempt=1)) == Probe(JOBS, 1)
