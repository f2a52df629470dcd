"""One try of a prepare stage on a node: its states, the rows that make them, and when it is tried again.

A row keeps what outlives a try.  The states are these; only the first two have the stored word `running`:

- `ending-runs`: the stage is recorded as begun, so that nothing else begins on the node, and only ends what
  runs of earlier tries left there.  Its row has no `content` yet.
- `acting`: the row has the digest of what the stage does on this node, and the node's snapshot before it.
- `waiting`: files differ on the node that are staged, or that an install reads; the stage is due again.
- `failed`: it is due again after a backoff.
- `done`, `skipped`: the node has it, by this try or by the checkpoint of an earlier one.
- `disturbed`: the stage changed what serves on the node, and the node has failed with it.

A waiting or failed row also says what its next try does first: end the run whose `handle` it keeps
(`has_lost_run`), and compare the node with the snapshot that it keeps (`uncompared_snapshot`).  A restarted
daemon needs nothing else.  This file does not know whether a try may begin: the scheduler decides that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum

from machines.model.decision import Prepare
from machines.model.preparation import TRIED_AGAIN, Preparation, PreparationState
from machines.model.step_record import Ok, StepResult
from machines.workflow.steps import backoff_s


class TryState(StrEnum):
    ENDING_RUNS = "ending-runs"
    ACTING = "acting"
    WAITING = "waiting"
    FAILED = "failed"
    DONE = "done"
    SKIPPED = "skipped"
    DISTURBED = "disturbed"


def try_state(row: Preparation) -> TryState:
    if row.state is PreparationState.RUNNING:
        return TryState.ACTING if row.content else TryState.ENDING_RUNS
    return TryState(row.state.value)


def is_acting(row: Preparation | None) -> bool:
    return row is not None and try_state(row) is TryState.ACTING


def has_lost_run(row: Preparation) -> bool:
    """Return whether a run of an earlier try may be on the node; one that acts has the handle of its own."""
    return bool(row.handle) and not is_acting(row)


def uncompared_snapshot(row: Preparation) -> Mapping[str, str] | None:
    """Return the node's snapshot before an earlier try that may have disturbed it."""
    return None if is_acting(row) else row.before


def intent(wanted: Prepare, earlier: Preparation | None, at: float) -> Preparation:
    """Return the row of a try that is about to begin, or that is under way already."""
    is_same_try = earlier is not None and earlier.attempt == wanted.attempt
    if earlier is not None and is_same_try and earlier.state is PreparationState.RUNNING:
        return earlier
    key = (wanted.rollout, wanted.node, wanted.stage)
    row = Preparation(*key, wanted.attempt, PreparationState.RUNNING, content="", at=at, began_at=at)
    if earlier is not None and earlier.state in TRIED_AGAIN:
        # What an earlier try may have disturbed is compared with its own snapshot.
        row = replace(row, before=earlier.before, handle=earlier.handle)
    if earlier is not None and earlier.state is PreparationState.WAITING:
        row = replace(row, text=earlier.text)
    return row


def ended(row: Preparation, result: StepResult, at: float) -> Preparation:
    """Return the row of a try that ended like this; one that failed is due again later."""
    if isinstance(result, Ok):
        return replace(row, state=PreparationState.DONE, text=row.text or result.text, at=at)
    not_before = at + backoff_s(row.attempt - 1)
    return replace(row, state=PreparationState.FAILED, text=result.text, at=at, not_before=not_before)


def done_before(row: Preparation, at: float, by: str) -> Preparation:
    """Return the row of a stage that the node has already; `by` is which rollout did it, "" for this one."""
    state = PreparationState.SKIPPED if by else PreparationState.DONE
    return replace(row, state=state, text=by, before=None, at=at)


def disturbed(row: Preparation, text: str, at: float) -> Preparation:
    return replace(row, state=PreparationState.DISTURBED, text=text, before=None, at=at)


def due_again(row: Preparation, problem: str, at: float) -> Preparation:
    """Return the row of a stage whose files differ on the node."""
    # At once for the first time: what differs again and again may be a disk that fails.
    delay_s = backoff_s(row.attempt - 2) if row.attempt > 1 else 0.0
    return replace(row, state=PreparationState.WAITING, text=problem, at=at, not_before=at + delay_s)


def waiting_for_files(row: Preparation, text: str, at: float) -> Preparation:
    """Return the row of a try that waits until other stages have staged again what it reads."""
    return replace(row, state=PreparationState.WAITING, content="", text=text, at=at)
