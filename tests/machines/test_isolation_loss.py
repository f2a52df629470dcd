"""Lost isolation: retried before a run, urgent during a run."""

from __future__ import annotations

from dataclasses import replace

from machines.model.actions import Isolate, RunPlaybook, StopRun, Transition, Wait
from machines.model.causes import said
from machines.model.plan import Capability, StepDef
from machines.model.rollout import Target
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.states import Phase, Trigger
from machines.workflow.failing import REISOLATE_TIMEOUT_S
from machines.workflow.next_action import next_action
from machines.workflow.records import repeated_try
from machines.workflow.situation import Situation
from machines.workflow.steps import NOT_ISOLATED_RETRY_S
from rolloutd.texts.cause_text import describe_causes
from tests.machines.builders import CORDONS, T0, plan_of

CORDON = StepDef("isolate.0.kubernetes", "kubernetes", capabilities=CORDONS)
PLAN = plan_of(isolate=(CORDON,), isolate_timeout_s=600.0)
MAINTAINING = Target("R", "n1", "t1", (), "fleet", 1, phase=Phase.MAINTAINING, attempt=1, since=T0)

FIRST = (CORDON.name, StepAction.APPLY, 1, StepState.OK, 0.0)


def record(step: str, action: StepAction, number: int, state: StepState, after_s: float) -> StepRecord:
    at = T0 + after_s
    return StepRecord("R", "n1", 1, step, action, number, state, at=at, began_at=at, text="why")


def on_loss(after_s: float, *steps: tuple[str, StepAction, int, StepState, float]) -> object:
    """Return what comes next, so long after the phase began."""
    records = [record(*FIRST), *(record(*step) for step in steps)]
    return next_action(
        Situation(PLAN, MAINTAINING, records, T0 + after_s, elapsed_s=after_s, has_unfinished_run=False)
    )


RUNNING = ("run.configure", StepAction.RUN, 1, StepState.INTENDED, 1.0)
NOT_INSPECTED = (CORDON.name, StepAction.INSPECT, 2, StepState.BUSY, 2.0)
NOT_REISOLATED = (CORDON.name, StepAction.APPLY, 2, StepState.BUSY, 2.0)


def test_isolated_node_runs_playbook() -> None:
    assert on_loss(1.0) == RunPlaybook(PLAN.stages[0], 1, is_started=False)
    assert on_loss(1.0, RUNNING) == RunPlaybook(PLAN.stages[0], 1, is_started=True)


def test_before_run_unknown_isolation_inspected_again() -> None:
    assert on_loss(3.0, NOT_INSPECTED) == Wait(T0 + 2.0 + NOT_ISOLATED_RETRY_S, CORDON.name)
    assert on_loss(40.0, NOT_INSPECTED) == Isolate(CORDON, 3, is_prior_known=True)
    again = (CORDON.name, StepAction.APPLY, 3, StepState.OK, 41.0)
    assert on_loss(42.0, NOT_INSPECTED, again) == RunPlaybook(PLAN.stages[0], 1, is_started=False)


def test_before_run_waits_for_isolation_timeout() -> None:
    late = on_loss(603.0, NOT_INSPECTED, (CORDON.name, StepAction.INSPECT, 3, StepState.BUSY, 590.0))
    assert isinstance(late, Transition)
    assert late.trigger is Trigger.FAILED
    assert (
        describe_causes(late.causes)
        == "n1 lost its isolation and could not be isolated again: why; no playbook was started"
    )


def test_failed_in_service_without_isolation_fails() -> None:
    check = StepDef("verify.0", "reachable", in_service=True, capabilities=frozenset(Capability))
    plan = plan_of(isolate=(CORDON,), verify=(check,))
    target = Target("R", "n1", "t1", (), "fleet", 1, phase=Phase.VERIFYING, attempt=1, since=T0)
    back = (CORDON.name, StepAction.REVERT, 1, StepState.OK, 1.0)
    red = (check.name, StepAction.CHECK, 1, StepState.FAILED, 2.0)
    for action, state in ((StepAction.INSPECT, StepState.BUSY), (StepAction.APPLY, StepState.BUSY)):
        told = [record(*step) for step in (FIRST, back, red)]
        again = next_action(Situation(plan, target, told, T0 + 3.0, elapsed_s=3.0, has_unfinished_run=False))
        assert isinstance(again, Isolate)
        assert again.cordon_only
        told.append(record(CORDON.name, action, again.number, state, 4.0))
        failed = next_action(Situation(plan, target, told, T0 + 5.0, elapsed_s=5.0, has_unfinished_run=False))
        assert isinstance(failed, Transition)
        assert (failed.trigger, failed.step) == (Trigger.FAILED, check.name)
        assert describe_causes(failed.causes) == "why; and it could not be isolated again: why"


def test_wait_reason_is_last_isolator_message() -> None:
    def said(*steps: tuple[str, StepAction, int, StepState, float]) -> tuple[float, int] | None:
        found = repeated_try([record(*step) for step in steps], MAINTAINING)
        return None if found is None else (found.since - T0, found.tries)

    busy = [(CORDON.name, StepAction.INSPECT, n, StepState.BUSY, 10.0 * n) for n in (2, 3)]
    assert said() is None
    assert said(FIRST) is None
    assert said(FIRST, *busy) == (20.0, 2)
    assert said(FIRST, *busy, (CORDON.name, StepAction.APPLY, 4, StepState.INTENDED, 40.0)) == (20.0, 2)
    assert said(FIRST, *busy, (CORDON.name, StepAction.APPLY, 4, StepState.UNKNOWN, 40.0)) == (20.0, 3)
    assert said(*busy, (CORDON.name, StepAction.APPLY, 4, StepState.OK, 40.0)) is None
    returning = [(CORDON.name, StepAction.REVERT, n, StepState.BUSY, 10.0 * n) for n in (4, 5)]
    assert said(*busy, *returning) == (40.0, 2)
    assert said(*busy, *returning, (CORDON.name, StepAction.REVERT, 6, StepState.OK, 60.0)) is None
    assert repeated_try([record(*step) for step in busy], replace(MAINTAINING, attempt=2)) is None


def test_isolation_wait_ends_at_deadline() -> None:
    records = (record(CORDON.name, StepAction.INSPECT, 1, StepState.BUSY, 0.0),)
    target = Target("r", "n1", "a", ("team/a",), "fleet", 0, phase=Phase.ISOLATING, attempt=1, since=T0)
    waits = next_action(
        Situation(PLAN, target, records, T0 + 590.0, elapsed_s=590.0, has_unfinished_run=False)
    )
    assert isinstance(waits, Isolate)
    records = (record(CORDON.name, StepAction.INSPECT, 1, StepState.BUSY, 585.0),)
    waits = next_action(
        Situation(PLAN, target, records, T0 + 590.0, elapsed_s=590.0, has_unfinished_run=False)
    )
    assert waits == Wait(T0 + 600.0, CORDON.name)


def test_downtime_of_daemon_not_counted() -> None:
    records = [record(*FIRST), record(*NOT_INSPECTED)]
    soon = next_action(
        Situation(PLAN, MAINTAINING, records, T0 + 9000.0, elapsed_s=5.0, has_unfinished_run=False)
    )
    assert isinstance(soon, Isolate)


def test_during_run_isolation_restored_or_run_stopped() -> None:
    assert isinstance(on_loss(3.0, RUNNING, NOT_REISOLATED), Wait)
    again = (CORDON.name, StepAction.APPLY, 3, StepState.BUSY, 2.0 + REISOLATE_TIMEOUT_S + 1)
    ended = on_loss(40.0, RUNNING, NOT_REISOLATED, again)
    assert isinstance(ended, StopRun)
    assert ended.record.step == "run.configure"
    assert (
        describe_causes(ended.causes)
        == "n1 lost its isolation and could not be isolated again: why; its playbook was stopped"
    )


def test_during_run_impossible_isolation_stops_run() -> None:
    assert isinstance(
        on_loss(3.0, RUNNING, (CORDON.name, StepAction.APPLY, 2, StepState.FAILED, 2.0)), StopRun
    )


def test_unknown_isolation_does_not_end_run() -> None:
    assert isinstance(on_loss(40.0, RUNNING, NOT_INSPECTED), Isolate)


def test_failed_run_fails_node() -> None:
    over = on_loss(50.0, ("run.configure", StepAction.RUN, 1, StepState.FAILED, 45.0), NOT_REISOLATED)
    assert over == Transition(Trigger.FAILED, step="run.configure", causes=said("why"))
