"""Checks of a wave's finished nodes while it soaks.

A check that fails during the soak moves the node from done to failed, with the verdict on its configuration
in the same commit.  What follows is as after any failure: no further node starts, and `on_failure` decides.
"""

from __future__ import annotations

from machines.facts.node_work import WorkKind
from machines.model.decision import CheckSoaking
from machines.model.plan import StepDef
from machines.model.rollout import FailureCode, Target
from machines.model.step_record import StepState
from machines.scheduler.checks import can_fail_soak
from machines.scheduler.membership import target_changes
from machines.states import Outcome, Trigger
from machines.workflow.phase_transitions import transition
from machines.workflow.steps import StepPrefix, is_excused, step_id
from rolloutd.engine.background.checks_outside_attempts import check_outside_attempt
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession
from rolloutd.engine.outcomes import verdict_events
from rolloutd.engine.redaction import redact_for_team
from rolloutd.engine.state import State
from rolloutd.ports import Failed, Ok, Unknown

MIN_FAILED_CHECKS = 2
"""Failed checks in a row that count: one lost packet is not a regression."""

MAX_RECHECK_S = 60.0
"""A check with a `within` must fail for that long, at most this: a short overload is not a failure."""

RECHECK_S = 5.0
"""Pause between two tries of such a check: more requests do not help an overloaded node."""


async def check_soaking(state: State, adapters: AdapterSet, request: CheckSoaking) -> None:
    """Check a soaking node, and fail it by the first check that fails."""
    target = state.index.target(request.rollout, request.node)
    if target.outcome is not Outcome.CHANGED:
        return  # it moved before its turn came
    async with state.begin_work(WorkKind.CHECKS, target.node, target.rollout) as obstacle:
        if obstacle is not None:
            return  # the next round asks again
        session = NodeSession(state, adapters, target.rollout, target.node)
        for spec in state.index.plan_for(target).verify:
            result = await _repeat_check(session, spec)
            if not isinstance(result, Ok) and not await _is_excused(session, spec, result):
                await _fail_node(state, target, spec, result)
                return


async def _is_excused(session: NodeSession, spec: StepDef, result: Failed | Unknown) -> bool:
    """Return whether the check failed before the change too, or may stay unknown."""
    if not spec.baseline and not spec.accepts_unknown:
        return False
    step = StepState.FAILED if isinstance(result, Failed) else StepState.UNKNOWN
    return is_excused(spec, step, await session.state.store.load_steps(session.rollout, session.node))


async def _repeat_check(session: NodeSession, spec: StepDef) -> Ok | Failed | Unknown:
    """Repeat a check until it passes, or has failed often and long enough to count."""
    state = session.state
    recheck_s = min(float(spec.params.get("within", 0) or 0), MAX_RECHECK_S)
    until, checks_made = state.now() + recheck_s, 0
    while True:
        result = await check_outside_attempt(session, spec)
        checks_made += 1
        if isinstance(result, Ok) or (checks_made >= MIN_FAILED_CHECKS and state.now() >= until):
            return result
        if recheck_s:
            await state.clock.sleep(RECHECK_S)


async def _fail_node(state: State, target: Target, spec: StepDef, result: Failed | Unknown) -> None:
    text = redact_for_team(result, spec.team).text
    code = result.code if isinstance(result, Failed) else FailureCode.UNKNOWN
    async with state.exclusive_commit() as commit:
        if not can_fail_soak(state.index, target):
            return
        step, now = step_id(StepPrefix.SOAK, spec.name), state.now()
        moved = transition(target, Trigger.SOAK_CHECK_FAILED, now, step=step, text=text, code=code)
        current = state.index.target(target.rollout, target.node)
        # A done target does not follow its node: a retry must not start it by the votes of its old team.
        changed = target_changes(state.index, current, now)
        verdict = verdict_events(state, current, moved)
        await commit([moved, *changed, *verdict], f"{spec.name} failed during the soak: {text}")
