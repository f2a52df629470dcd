"""Errors as outcomes of steps, failures as verdicts on contents, results without what others may not read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import TypeVar

from machines.model.configuration import new_verdict
from machines.model.events import Event, PhaseMoved, VerdictRecorded
from machines.model.plan import Capability, StepDef
from machines.model.rollout import FailureCode, Target
from rolloutd.engine.state import State
from rolloutd.errors import LeadershipLost, NodeUnreachable, RolloutdError, StoreFailed
from rolloutd.ports import Failed, Ok, StepResult, Unknown

log = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_MARGIN_S = 300.0
"""Time beyond a step's timeout that an adapter has: it may wait for its turn at a host or at an API."""


async def capture_errors(
    state: State, subject: str, awaitable: Awaitable[T], *, of: StepDef | None = None
) -> T | Failed | Unknown:
    """Await an action and return each error as an outcome; raises only StoreFailed.

    A daemon that may no longer lead acts no more: it raises LeadershipLost.  `subject` names the node in the
    log; `of` is the step whose adapter answers: its time is limited, as in answer_in_time().
    """
    try:
        state.require_leadership()
    except LeadershipLost:
        if isinstance(awaitable, Coroutine):
            awaitable.close()
        raise
    try:
        return await (awaitable if of is None else answer_in_time(of, awaitable))
    except TimeoutError as late:
        return Unknown(str(late) or "no answer in time")
    # An error of the daemon's own disk says nothing about the node.
    except StoreFailed:
        raise
    except RolloutdError as error:
        is_silent = isinstance(error, NodeUnreachable)
        code = FailureCode.UNREACHABLE if is_silent else FailureCode.UNKNOWN
        return Failed(str(error), code=code)
    except OSError as error:
        text = f"this machine could not do it: {error}; look at its disk and limits"
        return Failed(text, code=FailureCode.UNKNOWN)
    except Exception as error:
        log.exception("%s: unexpected error in a step", subject)
        return Failed(f"unexpected {type(error).__name__}: {error}", code=FailureCode.UNKNOWN)


async def answer_in_time(spec: StepDef, answer: Awaitable[T]) -> T:
    """Await the answer of a step's adapter; raises TimeoutError long after the step's timeout.

    Without a limit a package's adapter that never returns would keep its node and its slots for ever.  A step
    that starts a run has none here: it may wait long for its turn, and the run has a timeout.
    """
    limit_s = None if Capability.STARTS_RUN in spec.capabilities else spec.timeout_s + ANSWER_MARGIN_S
    try:
        async with asyncio.timeout(limit_s) as limit:
            return await answer
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"{spec.kind} has not answered within {limit_s:.0f} s") from None
        raise


def verdict_events(state: State, target: Target, moved: PhaseMoved) -> list[Event]:
    """Return the verdict of a transition of this target; empty when it says nothing of the content."""
    node, change = state.index.nodes.get(target.node), state.index.rollout(target.rollout).digest.change
    if node is None:
        return []
    verdict = new_verdict(target, moved, change, node.labels, state.settings.host_class)
    return [] if verdict is None else [VerdictRecorded(target.rollout, target.node, verdict)]


def redact_for_team(result: StepResult, team: str | None) -> StepResult:
    """Return the result with the text of a team's check moved to its output; no team, no change."""
    if team is None:
        return result
    match result:
        case Ok():
            output = _join_output(result.text, result.output)
            return Ok(f"the check of team {team} has passed", output, result.value)
        case Failed():
            text = f"the check of team {team} has not passed; its members see its output"
            return Failed(text, _join_output(result.text, result.output), result.code)
        case _:
            return result


def _join_output(text: str, output: str) -> str:
    return "\n".join(part for part in (text, output) if part)
