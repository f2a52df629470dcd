"""What becomes of a run whose node is not found isolated: before it there is time, under it there is not."""

from __future__ import annotations

from dataclasses import replace

from machines.actions import Halt, Isolate, Move, Run, Wait
from machines.events import StepAction, StepRecord, StepState
from machines.guard import REGAIN_S
from machines.plan import StepSpec
from machines.reconcile import BUSY_RETRY_S, next_action
from machines.records import waiting
from machines.rollout import Target
from machines.states import Phase, Trigger
from tests.machines.worlds import T0, plan_of

CORDON = StepSpec("isolate.0.kubernetes", "kubernetes")
PLAN = plan_of(isolate=(CORDON,), isolate_timeout_s=600.0)
AT_WORK = Target("R", "n1", "t1", (), "fleet", 1, phase=Phase.MAINTAINING, attempt=1, since=T0)

FIRST = (CORDON.name, StepAction.DO, 1, StepState.OK, 0.0)


def record(step: str, action: StepAction, number: int, state: StepState, after_s: float) -> StepRecord:
    at = T0 + after_s
    return StepRecord("R", "n1", 1, step, action, number, state, at=at, began_at=at, text="why")


def asked(after_s: float, *steps: tuple[str, StepAction, int, StepState, float]) -> object:
    """Return what comes next, so long after the phase began."""
    records = [record(*FIRST), *(record(*step) for step in steps)]
    return next_action(PLAN, AT_WORK, records, T0 + after_s, elapsed_s=after_s, unclean=False)


RUNNING = ("run.configure", StepAction.RUN, 1, StepState.INTENDED, 1.0)
NOT_SEEN = (CORDON.name, StepAction.LOOK, 2, StepState.BUSY, 2.0)
NOT_HAD = (CORDON.name, StepAction.DO, 2, StepState.BUSY, 2.0)


def test_where_isolation_stands_the_playbook_runs() -> None:
    assert asked(1.0) == Run(PLAN.stages[0], 1, begun=False)
    assert asked(1.0, RUNNING) == Run(PLAN.stages[0], 1, begun=True)


def test_before_a_run_what_cannot_be_told_is_waited_for_and_asked_again() -> None:
    assert asked(3.0, NOT_SEEN) == Wait(T0 + 2.0 + BUSY_RETRY_S, CORDON.name)
    assert asked(40.0, NOT_SEEN) == Isolate(CORDON, 3, prior_known=True)
    again = (CORDON.name, StepAction.DO, 3, StepState.OK, 41.0)
    assert asked(42.0, NOT_SEEN, again) == Run(PLAN.stages[0], 1, begun=False)


def test_before_a_run_it_is_waited_for_as_long_as_a_node_may_take_to_be_isolated() -> None:
    late = asked(603.0, NOT_SEEN, (CORDON.name, StepAction.LOOK, 3, StepState.BUSY, 590.0))
    assert isinstance(late, Move)
    assert late.trigger is Trigger.FAILED
    assert late.text == "n1 is no longer isolated and could not be again: why; no playbook was begun"


def test_a_node_that_turned_red_in_service_and_cannot_be_isolated_again_fails_all_the_same() -> None:
    check = StepSpec("verify.0", "reachable", in_service=True)
    plan = plan_of(isolate=(CORDON,), verify=(check,))
    target = Target("R", "n1", "t1", (), "fleet", 1, phase=Phase.VERIFYING, attempt=1, since=T0)
    back = (CORDON.name, StepAction.UNDO, 1, StepState.OK, 1.0)
    red = (check.name, StepAction.CHECK, 1, StepState.FAILED, 2.0)
    for action, state in ((StepAction.LOOK, StepState.BUSY), (StepAction.DO, StepState.BUSY)):
        told = [record(*step) for step in (FIRST, back, red)]
        again = next_action(plan, target, told, T0 + 3.0, elapsed_s=3.0, unclean=False)
        assert isinstance(again, Isolate)
        assert again.gentle
        told.append(record(CORDON.name, action, again.number, state, 4.0))
        failed = next_action(plan, target, told, T0 + 5.0, elapsed_s=5.0, unclean=False)
        assert isinstance(failed, Move)
        assert (failed.trigger, failed.step) == (Trigger.FAILED, check.name)
        assert failed.text == "why; and it could not be isolated again: why"


def test_what_a_node_waits_for_is_what_its_isolator_said_last() -> None:
    def said(*steps: tuple[str, StepAction, int, StepState, float]) -> float | None:
        found = waiting([record(*step) for step in steps], AT_WORK)
        return None if found is None else found.at - T0

    busy = [(CORDON.name, StepAction.LOOK, n, StepState.BUSY, 10.0 * n) for n in (2, 3)]
    assert said() is None
    assert said(FIRST) is None
    assert said(FIRST, *busy) == 20.0
    assert said(FIRST, *busy, (CORDON.name, StepAction.DO, 4, StepState.INTENDED, 40.0)) == 20.0
    assert said(*busy, (CORDON.name, StepAction.DO, 4, StepState.OK, 40.0)) is None
    assert waiting([record(*step) for step in busy], replace(AT_WORK, attempt=2)) is None


def test_who_waits_to_be_isolated_waits_no_longer_than_to_the_deadline() -> None:
    records = (record(CORDON.name, StepAction.LOOK, 1, StepState.BUSY, 0.0),)
    target = Target("r", "n1", "a", ("team/a",), "fleet", 0, phase=Phase.ISOLATING, attempt=1, since=T0)
    waits = next_action(PLAN, target, records, T0 + 590.0, elapsed_s=590.0, unclean=False)
    assert isinstance(waits, Isolate)
    records = (record(CORDON.name, StepAction.LOOK, 1, StepState.BUSY, 585.0),)
    waits = next_action(PLAN, target, records, T0 + 590.0, elapsed_s=590.0, unclean=False)
    assert waits == Wait(T0 + 600.0, CORDON.name)


def test_the_time_without_a_daemon_is_not_counted() -> None:
    records = [record(*FIRST), record(*NOT_SEEN)]
    soon = next_action(PLAN, AT_WORK, records, T0 + 9000.0, elapsed_s=5.0, unclean=False)
    assert isinstance(soon, Isolate)


def test_under_a_run_lost_isolation_is_had_again_soon_or_the_run_is_ended() -> None:
    assert isinstance(asked(3.0, RUNNING, NOT_HAD), Wait)
    again = (CORDON.name, StepAction.DO, 3, StepState.BUSY, 2.0 + REGAIN_S + 1)
    ended = asked(40.0, RUNNING, NOT_HAD, again)
    assert isinstance(ended, Halt)
    assert ended.record.step == "run.configure"
    assert ended.text == "n1 is no longer isolated and could not be again: why; its playbook was ended"


def test_under_a_run_what_cannot_be_had_at_all_ends_it_at_once() -> None:
    assert isinstance(asked(3.0, RUNNING, (CORDON.name, StepAction.DO, 2, StepState.FAILED, 2.0)), Halt)


def test_a_run_whose_isolation_could_not_be_looked_at_is_not_ended_for_that() -> None:
    assert isinstance(asked(40.0, RUNNING, NOT_SEEN), Isolate)


def test_an_ended_run_fails_its_node() -> None:
    over = asked(50.0, ("run.configure", StepAction.RUN, 1, StepState.FAILED, 45.0), NOT_HAD)
    assert over == Move(Trigger.FAILED, step="run.configure", text="why")
