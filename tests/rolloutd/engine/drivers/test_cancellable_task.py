"""What is done can be ended in the middle, by whoever asks and by nobody else."""

from __future__ import annotations

import asyncio

import pytest

from machines.model.actions import CompleteOrder, StopRun, Transition
from machines.model.causes import Cause, CauseCode
from machines.model.rollout import Actor, ActorKind, NodeOrder, Target
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.states import Outcome, Phase
from machines.workflow.failing import next_stop_action
from rolloutd.engine.tasks import CancellableTask
from rolloutd.texts.cause_text import describe_causes

OLGA = Actor(ActorKind.PERSON, "olga", 1001)


async def test_what_is_done_to_its_end_says_so() -> None:
    done: list[int] = []

    async def acting() -> None:
        done.append(1)

    step = CancellableTask()
    step.cancel()
    assert await step.run(acting(), "act")
    assert done == [1], "a stop before it began is none"


async def test_a_stop_ends_it_and_the_next_one_runs() -> None:
    step, begun = CancellableTask(), asyncio.Event()

    async def forever() -> None:
        begun.set()
        await asyncio.Event().wait()

    running = asyncio.create_task(step.run(forever(), "act"))
    await begun.wait()
    step.cancel()
    step.cancel()
    assert await running is False
    assert await step.run(asyncio.sleep(0), "act")


async def test_a_cancellation_stays_one_and_leaves_nothing_behind() -> None:
    step, begun, ended = CancellableTask(), asyncio.Event(), asyncio.Event()

    async def forever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    running = asyncio.create_task(step.run(forever(), "act"))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()


async def test_an_error_is_the_callers() -> None:
    async def broken() -> None:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        await CancellableTask().run(broken(), "act")


def target(phase: Phase, outcome: Outcome | None = None) -> Target:
    """Return a target that is to be stopped."""
    return Target(
        *("r", "n1", "t", (), "fleet", 0),
        phase=phase,
        outcome=outcome,
        attempt=2,
        order=NodeOrder.STOP,
        order_by=OLGA,
    )


def run(state: StepState, attempt: int = 2) -> StepRecord:
    """Return the record of a run."""
    return StepRecord("r", "n1", attempt, "run.configure", StepAction.RUN, 1, state, 1.0, 1.0, handle="h")


def test_a_run_is_ended_before_its_node_fails() -> None:
    intended = run(StepState.INTENDED)
    action = next_stop_action(target(Phase.MAINTAINING), [run(StepState.OK, 1), intended])
    assert action == StopRun(intended, (Cause(CauseCode.STOPPED, {"phase": "maintaining", "by": "olga"}),))
    action = next_stop_action(target(Phase.MAINTAINING), [run(StepState.FAILED)])
    assert isinstance(action, Transition)
    assert (action.trigger, action.step) == ("failed", "run.configure")


def test_a_node_with_nothing_done_fails_where_it_stands() -> None:
    action = next_stop_action(target(Phase.ISOLATING), [])
    assert isinstance(action, Transition)
    assert (action.step, describe_causes(action.causes)) == (
        "isolating",
        "stopped while isolating by order of olga",
    )


def test_an_order_that_came_too_late_is_over() -> None:
    assert isinstance(next_stop_action(target(Phase.DONE, Outcome.CHANGED), []), CompleteOrder)
