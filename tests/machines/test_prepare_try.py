"""The states of a try of a prepare stage, as its row says them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from machines.model.decision import Prepare
from machines.model.preparation import Preparation, PreparationState
from machines.model.rollout import FailureCode
from machines.model.step_record import Failed, Ok
from machines.workflow import prepare_try
from machines.workflow.prepare_try import TryState, try_state
from tests.machines.builders import T0
from tests.sim.prepare_judge import NEXT_STATES

BEGUN = Preparation("R", "n1", "install", 1, PreparationState.RUNNING, "", T0, T0)
ACTING = replace(BEGUN, content="c1", handle="run", before={"boot-id": "a"})
LOST = Failed("no route", code=FailureCode.UNREACHABLE)


def next_try(row: Preparation) -> Preparation:
    return prepare_try.intent(Prepare("R", "n1", "install", row.attempt + 1), row, T0 + 60.0)


def test_running_row_without_content_only_ends_runs() -> None:
    assert try_state(BEGUN) is TryState.ENDING_RUNS
    assert try_state(ACTING) is TryState.ACTING
    assert (prepare_try.has_lost_run(ACTING), prepare_try.uncompared_snapshot(ACTING)) == (False, None)


def test_failed_try_leaves_run_and_snapshot_to_next() -> None:
    failed = prepare_try.ended(ACTING, LOST, T0)
    again = next_try(failed)
    assert (try_state(again), again.attempt) == (TryState.ENDING_RUNS, 2)
    assert prepare_try.has_lost_run(again)
    assert prepare_try.uncompared_snapshot(again) == {"boot-id": "a"}


def test_waiting_try_leaves_run_and_snapshot_to_next() -> None:
    waiting = prepare_try.waiting_for_files(ACTING, "waits for copy", T0)
    again = next_try(waiting)
    assert (again.text, again.handle, again.before) == ("waits for copy", "run", {"boot-id": "a"})


def test_try_after_its_end_starts_without_run_and_snapshot() -> None:
    again = next_try(prepare_try.ended(ACTING, Ok(), T0))
    assert not prepare_try.has_lost_run(again)
    assert prepare_try.uncompared_snapshot(again) is None


def test_try_under_way_is_the_same_after_restart() -> None:
    assert prepare_try.intent(Prepare("R", "n1", "install", 1), ACTING, T0 + 60.0) is ACTING


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ACTING, BEGUN),
        (replace(BEGUN, state=PreparationState.DONE), replace(BEGUN, state=PreparationState.DISTURBED)),
        (replace(BEGUN, state=PreparationState.WAITING), replace(BEGUN, state=PreparationState.WAITING)),
    ],
)
def test_table_lacks_transition(before: Preparation, after: Preparation) -> None:
    assert try_state(after) not in NEXT_STATES[try_state(before)]
