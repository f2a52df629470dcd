"""Isolation with traffic probes: cordon, probe again, then drain or abort."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machines.facts.apply import apply_to_target
from machines.model.actions import Action, Isolate, Probe, Revert, Transition, Wait
from machines.model.causes import Cause, CauseCode, said
from machines.model.plan import Plan, StepDef
from machines.model.rollout import Target
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.states import Outcome, Phase, Trigger
from machines.workflow.isolation_plan import PROBE_MAX_AGE_S, REPROBE_S
from machines.workflow.next_action import next_action
from machines.workflow.phase_transitions import transition
from machines.workflow.situation import Situation
from machines.workflow.steps import UNKNOWN_RETRY_S, backoff_s
from rolloutd.texts.cause_text import describe_causes
from tests.machines.builders import CORDONS, T0, plan_of

CORDON = StepDef("isolate.0.kubernetes", "kubernetes", capabilities=CORDONS)
COMMAND = StepDef("isolate.1.command", "command")
JOBS = StepDef("traffic.0.kubernetes", "kubernetes")
CONNECTIONS = StepDef("traffic.1.ssh", "ssh")
PLAN = plan_of(isolate=(CORDON,), traffic=(JOBS,), isolate_timeout_s=600.0)
ISOLATING = Target("R", "w3", "t1", (), "fleet", 1, phase=Phase.ISOLATING, attempt=1, since=T0)
BUSY = "w3 is busy: pod batch/train-7 (Job train) runs there"

Step = tuple[StepDef, StepAction, int, StepState, float]
DO, UNDO, LOOK = StepAction.APPLY, StepAction.REVERT, StepAction.INSPECT
OK, INTENDED = StepState.OK, StepState.INTENDED

CORDONED_ONLY: Step = (CORDON, DO, 1, OK, 1.0)
IDLE: Step = (JOBS, LOOK, 1, OK, 2.0)


def record(step: Step, attempt: int = 1) -> StepRecord:
    spec, action, number, state, after_s = step
    at = T0 + after_s
    text = BUSY if state is StepState.BUSY else "why"
    return StepRecord("R", "w3", attempt, spec.name, action, number, state, at=at, began_at=at, text=text)


def decided_action(after_s: float, *steps: Step, plan: Plan = PLAN, target: Target = ISOLATING) -> Action:
    """Return what comes next, so long after the phase began."""
    records = [record(step) for step in steps]
    return next_action(
        Situation(plan, target, records, T0 + after_s, elapsed_s=after_s, has_unfinished_run=False)
    )


def test_cordon_probe_drain_then_isolated() -> None:
    assert decided_action(0.0) == Isolate(CORDON, 1, cordon_only=True)
    assert decided_action(1.0, CORDONED_ONLY) == Probe(JOBS, 1)
    assert decided_action(2.0, CORDONED_ONLY, IDLE) == Isolate(CORDON, 2, is_prior_known=True)
    drained: Step = (CORDON, DO, 2, OK, 3.0)
    assert decided_action(3.0, CORDONED_ONLY, IDLE, drained) == Probe(JOBS, 2)
    done = decided_action(4.0, CORDONED_ONLY, IDLE, drained, (JOBS, LOOK, 2, OK, 4.0))
    assert isinstance(done, Transition)
    assert done.trigger is Trigger.ISOLATED


def test_traffic_after_isolation_aborts_before_playbook() -> None:
    drained: Step = (CORDON, DO, 2, OK, 3.0)
    found: Step = (JOBS, LOOK, 2, StepState.BUSY, 4.0)
    assert decided_action(4.0, CORDONED_ONLY, IDLE, drained, found) == Revert(
        CORDON, 2, None, True, said(BUSY)
    )
    back = decided_action(5.0, CORDONED_ONLY, IDLE, drained, found, (CORDON, UNDO, 2, OK, 5.0))
    assert isinstance(back, Transition)
    assert (back.trigger, describe_causes(back.causes)) == (Trigger.ISOLATION_ABORTED, BUSY)


def test_traffic_found_aborts_isolation_with_reason() -> None:
    found: Step = (JOBS, LOOK, 1, StepState.BUSY, 2.0)
    assert decided_action(2.0, CORDONED_ONLY, found) == Revert(CORDON, 1, None, True, said(BUSY))
    undone: Step = (CORDON, UNDO, 1, OK, 3.0)
    back = decided_action(3.0, CORDONED_ONLY, found, undone)
    assert back == Transition(
        Trigger.ISOLATION_ABORTED, causes=said(BUSY), not_before=T0 + 3.0 + backoff_s(0)
    )


def test_restarted_daemon_continues_with_cordon() -> None:
    assert decided_action(9.0, (CORDON, DO, 1, INTENDED, 1.0)) == Isolate(
        CORDON, 1, is_prior_known=True, cordon_only=True
    )
    killed: Step = (CORDON, DO, 2, INTENDED, 3.0)
    assert decided_action(4.0, CORDONED_ONLY, IDLE, killed) == Isolate(CORDON, 2, is_prior_known=True)
    found: Step = (JOBS, LOOK, 1, StepState.BUSY, 2.0)
    undoing: Step = (CORDON, UNDO, 1, INTENDED, 3.0)
    assert decided_action(900.0, CORDONED_ONLY, found, undoing) == Revert(CORDON, 1, None, True, said(BUSY))


def test_probe_result_valid_for_next_step_only() -> None:
    assert isinstance(decided_action(2.0 + PROBE_MAX_AGE_S - 1, CORDONED_ONLY, IDLE), Isolate)
    assert decided_action(2.0 + PROBE_MAX_AGE_S, CORDONED_ONLY, IDLE) == Probe(JOBS, 2)
    killed: Step = (CORDON, DO, 2, INTENDED, 3.0)
    assert decided_action(599.0, CORDONED_ONLY, IDLE, killed) == Probe(JOBS, 2)
    assert decided_action(1.0, CORDONED_ONLY, IDLE) == Probe(JOBS, 2), "the clock was set back"


def test_running_drain_not_probed_again() -> None:
    draining: Step = (CORDON, DO, 2, StepState.BUSY, 3.0)
    assert decided_action(100.0, CORDONED_ONLY, IDLE, draining) == Isolate(CORDON, 3, is_prior_known=True)


def test_unknown_probe_repeated_then_busy() -> None:
    looks: list[Step] = [(JOBS, LOOK, number, StepState.UNKNOWN, number * 10.0) for number in (1, 2, 3)]
    assert decided_action(10.0, CORDONED_ONLY, *looks[:1]) == Wait(T0 + 10.0 + UNKNOWN_RETRY_S, JOBS.name)
    assert decided_action(20.0, CORDONED_ONLY, *looks[:1]) == Probe(JOBS, 2)
    assert decided_action(30.0, CORDONED_ONLY, *looks) == Revert(CORDON, 1, None, True, said("why"))
    # An error of a probe is no better than its silence.
    failed: Step = (JOBS, LOOK, 3, StepState.FAILED, 30.0)
    assert decided_action(30.0, CORDONED_ONLY, *looks[:2], failed) == Revert(
        CORDON, 1, None, True, said("why")
    )


def test_isolator_without_cordon_probed_first() -> None:
    plain = replace(PLAN, isolate=(COMMAND,))
    assert decided_action(0.0, plan=plain) == Probe(JOBS, 1)
    assert decided_action(2.0, IDLE, plan=plain) == Isolate(COMMAND, 1)
    # It has not been done as far as anybody knows, so traffic may have come meanwhile.
    tried: Step = (COMMAND, DO, 1, StepState.BUSY, 3.0)
    assert decided_action(60.0, IDLE, tried, plan=plain) == Probe(JOBS, 2)


def test_cordon_first_then_probe_then_other_isolator() -> None:
    both = replace(PLAN, isolate=(replace(COMMAND, name="isolate.0.command"), CORDON))
    command = both.isolate[0]
    assert decided_action(0.0, plan=both) == Isolate(CORDON, 1, cordon_only=True)
    assert decided_action(2.0, CORDONED_ONLY, IDLE, plan=both) == Isolate(command, 1)
    slow: Step = (command, DO, 1, OK, 60.0)
    assert decided_action(60.0, CORDONED_ONLY, IDLE, slow, plan=both) == Probe(JOBS, 2)
    again: Step = (JOBS, LOOK, 2, OK, 61.0)
    assert decided_action(61.0, CORDONED_ONLY, IDLE, slow, again, plan=both) == Isolate(
        CORDON, 2, is_prior_known=True
    )


def test_without_isolator_playbook_probed_first() -> None:
    bare = replace(PLAN, isolate=())
    assert decided_action(0.0, plan=bare) == Probe(JOBS, 1)
    moved = decided_action(2.0, IDLE, plan=bare)
    assert isinstance(moved, Transition)
    assert moved.trigger is Trigger.ISOLATED
    busy = decided_action(2.0, (JOBS, LOOK, 1, StepState.BUSY, 2.0), plan=bare)
    assert isinstance(busy, Transition)
    assert (busy.trigger, busy.causes) == (Trigger.ISOLATION_ABORTED, said(BUSY))


def test_every_probe_must_report_idle() -> None:
    two = replace(PLAN, traffic=(JOBS, CONNECTIONS))
    assert decided_action(2.0, CORDONED_ONLY, IDLE, plan=two) == Probe(CONNECTIONS, 1)
    both: Step = (CONNECTIONS, LOOK, 1, OK, 3.0)
    assert decided_action(3.0, CORDONED_ONLY, IDLE, both, plan=two) == Isolate(CORDON, 2, is_prior_known=True)


def test_failed_node_with_traffic_stays_isolated() -> None:
    target = replace(ISOLATING, attempt=2)
    records = [record((CORDON, DO, 1, OK, -100.0)), record(CORDONED_ONLY, 2)]
    records.append(record((JOBS, LOOK, 1, StepState.BUSY, 2.0), 2))
    waits = next_action(Situation(PLAN, target, records, T0 + 3.0, elapsed_s=3.0, has_unfinished_run=False))
    assert waits == Wait(T0 + 2.0 + REPROBE_S, JOBS.name)
    later = next_action(Situation(PLAN, target, records, T0 + 40.0, elapsed_s=40.0, has_unfinished_run=False))
    assert later == Probe(JOBS, 2)
    late = next_action(
        Situation(PLAN, target, records, T0 + 601.0, elapsed_s=601.0, has_unfinished_run=False)
    )
    assert isinstance(late, Transition)
    assert late.trigger is Trigger.FAILED
    assert BUSY in describe_causes(late.causes)


@pytest.mark.parametrize("target", [replace(ISOLATING, rolling_back=True), ISOLATING])
def test_rollback_and_plan_without_probes_probe_nothing(target: Target) -> None:
    plan = PLAN if target.rolling_back else replace(PLAN, traffic=())
    assert decided_action(0.0, plan=plan, target=target) == Isolate(CORDON, 1)
    moved = decided_action(1.0, CORDONED_ONLY, plan=plan, target=target)
    assert isinstance(moved, Transition)
    assert moved.trigger is Trigger.ISOLATED


def test_resumed_abort_has_no_invented_reason() -> None:
    undoing: Step = (CORDON, UNDO, 1, INTENDED, 2.0)
    assert decided_action(3.0, CORDONED_ONLY, undoing) == Revert(CORDON, 1, None, True)
    back = decided_action(3.0, CORDONED_ONLY, (CORDON, UNDO, 1, OK, 3.0))
    assert isinstance(back, Transition)
    assert (back.trigger, back.causes) == (Trigger.ISOLATION_ABORTED, (Cause(CauseCode.ABORT_CONTINUED),))
    late = decided_action(601.0, CORDONED_ONLY, (CORDON, UNDO, 1, OK, 600.5))
    assert isinstance(late, Transition)
    assert describe_causes(late.causes) == "not isolated within 600 s"


def test_late_isolation_names_its_last_answer_also_a_lost_one() -> None:
    for state, answer in ((StepState.BUSY, BUSY), (StepState.UNKNOWN, "why")):
        lost: Step = (CORDON, DO, 1, state, 600.0)
        back = decided_action(601.0, lost)
        assert isinstance(back, Revert)
        assert describe_causes(back.causes) == f"not isolated within 600 s: {answer}"
        late = decided_action(602.0, lost, (CORDON, UNDO, 1, OK, 601.5))
        assert isinstance(late, Transition)
        assert describe_causes(late.causes) == f"not isolated within 600 s: {answer}"


def test_aborted_rollback_probed_as_usual() -> None:
    """Nobody stands beside it when its turn comes again: it must be idle then."""
    done = replace(ISOLATING, phase=Phase.DONE, outcome=Outcome.CHANGED, aborted_isolations=3)
    ordered = apply_to_target(done, transition(done, Trigger.ROLLBACK_ORDERED, T0))
    assert decided_action(0.0, target=replace(ordered, attempt=1)) == Isolate(CORDON, 1)
    aborted = transition(
        ordered, Trigger.ISOLATION_ABORTED, T0, outcome=Outcome.CHANGED, not_before=T0 + 60.0
    )
    back = apply_to_target(ordered, aborted)
    again = apply_to_target(back, transition(back, Trigger.ROLLBACK_ORDERED, T0))
    assert again.rolling_back
    assert decided_action(0.0, target=replace(again, attempt=1)) == Isolate(CORDON, 1, cordon_only=True)
    assert decided_action(1.0, CORDONED_ONLY, target=replace(again, attempt=1)) == Probe(JOBS, 1)


@pytest.mark.parametrize("failed_before", [False, True])
def test_aborted_rollback_returns_changed_node_only(failed_before: bool) -> None:
    target = replace(ISOLATING, rolling_back=True)
    late = next_action(
        Situation(
            PLAN,
            target,
            [],
            T0 + 601.0,
            elapsed_s=601.0,
            has_unfinished_run=False,
            failed_before=failed_before,
        )
    )
    assert isinstance(late, Transition)
    aborted = (Trigger.FAILED, None) if failed_before else (Trigger.ISOLATION_ABORTED, Outcome.CHANGED)
    assert (late.trigger, late.outcome) == aborted
    assert describe_causes(late.causes) == "not isolated within 600 s"
