"""Checks of a node outside its attempts: of a pending node, and of a canary that soaks.

Only a check that is a run is recorded, so that a restarted daemon finds it and no second run meets it.
"""

from __future__ import annotations

from collections.abc import Sequence

from machines.facts.node_work import WorkKind
from machines.model.actions import STALE_RUN_TIMEOUT_S, CleanUpStaleRuns, RunCheck
from machines.model.configuration import Compliance, ComplianceReport
from machines.model.decision import CheckIfCurrent, CheckSoaking
from machines.model.events import ChangeNeeded
from machines.model.plan import Capability, StepDef
from machines.model.rollout import FailureCode, Target
from machines.model.step_record import StepAction, StepState
from machines.scheduler.checks import can_fail_soak, is_at_work
from machines.scheduler.membership import target_changes
from machines.states import Outcome, Phase, Trigger
from machines.workflow.phase_transitions import transition
from machines.workflow.steps import StepPrefix, baseline_record, is_excused, step_id
from rolloutd.engine.check_mode import CheckMode
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession, answer_in_time, end_runs_on_node
from rolloutd.engine.drivers.step_journal import StepJournal
from rolloutd.engine.outcomes import redact_for_team, verdict_events
from rolloutd.engine.state import State
from rolloutd.errors import RolloutdError, StoreFailed
from rolloutd.ports import Failed, Ok, StepContext, Unknown
from rolloutd.ports.guards import adapter_errors, validate_result

RUN_INTERVAL_S = 300.0
"""Interval between runs of a check that is a run: each costs processes here and a login on the node."""

MIN_FAILED_CHECKS = 2
"""Failed checks in a row that count: one lost packet is not a regression."""

MAX_RECHECK_S = 60.0
"""A check with a `within` must fail for that long, at most this: a short overload is not a failure."""

RECHECK_S = 5.0
"""Pause between two tries of such a check: more requests do not help an overloaded node."""

MAX_NAMED_TASKS = 3
"""Tasks that the record of a needed change names; the rest is a number."""


async def check_outside_attempt(session: NodeSession, spec: StepDef) -> Ok | Failed | Unknown:
    """Check a node once; raises StoreFailed."""
    step = step_id(StepPrefix.SOAK, spec.name)
    try:
        if Capability.STARTS_RUN in spec.capabilities:
            return await _run_recorded(session, spec, step)
        return session.without_hidden(await _check(session, spec, await _context(session, spec, step, 1)))
    except StoreFailed:
        raise  # an error of the daemon's disk is not a result of the node
    except (RolloutdError, TimeoutError) as error:
        return session.without_hidden(Unknown(str(error) or "no answer in time"))


async def _run_recorded(session: NodeSession, spec: StepDef, step: str) -> Ok | Failed | Unknown:
    """Run a check that is a run, or find the run that an earlier daemon started; a fresh pass stays valid."""
    journal, target = StepJournal(session), session.target
    await journal.load()
    mine = [r for r in journal.records if r.step == step and r.attempt == target.attempt]
    latest = mine[-1] if mine else None
    age_s = 0.0 if latest is None else session.state.now() - latest.at
    if latest is not None and latest.state is StepState.OK and 0.0 <= age_s < RUN_INTERVAL_S:
        return Ok(latest.text)
    is_started = latest is not None and latest.state is StepState.INTENDED
    if journal.has_unfinished_run and not is_started:
        cleaned_up = await _clean_up_stale_runs(session, journal)
        if not isinstance(cleaned_up, Ok):
            return Unknown(f"an earlier run may be active: {cleaned_up.text}")
    number = 1 if latest is None else latest.number + (not is_started)
    recorded = latest.handle if latest is not None and is_started else ""
    ctx = await _context(session, spec, step, number)
    ctx = session.with_run_id(ctx, recorded, ctx.idempotency_key)
    record = journal.begin(RunCheck(spec, step, number), handle=ctx.run_id)
    await journal.write(record)
    result = session.without_hidden(await _check(session, spec, ctx))
    await journal.finish(record, result)
    return result


async def _clean_up_stale_runs(session: NodeSession, journal: StepJournal) -> Ok | Failed | Unknown:
    if is_at_work(session.state.index, session.node):
        return Unknown(f"{session.node} is at work in another rollout")
    earlier = [r.number for r in journal.records if r.action is StepAction.CLEAN_UP]
    record = journal.begin(CleanUpStaleRuns(1 + max(earlier, default=0)))
    await journal.write(record)
    with adapter_errors("runner"):
        result = await end_runs_on_node(session.state, session.adapters, session.node, STALE_RUN_TIMEOUT_S)
    await journal.finish(record, result)
    return result


async def _context(session: NodeSession, spec: StepDef, step: str, number: int) -> StepContext:
    before = None
    if spec.baseline:
        before = baseline_record(spec, await session.state.store.load_steps(session.rollout, session.node))
    baseline = None if before is None else before.prior
    return await session.step_context(spec, step=step, number=number, baseline=baseline)


async def _check(session: NodeSession, spec: StepDef, ctx: StepContext) -> Ok | Failed | Unknown:
    with adapter_errors(f"check {spec.kind}"):
        response = await answer_in_time(spec, session.adapters.checks[spec.kind].check(ctx))
    return validate_result(f"check {spec.kind}", response, Ok, Failed, Unknown)


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


async def check_if_current(
    state: State, adapters: AdapterSet, check_mode: CheckMode, request: CheckIfCurrent
) -> None:
    """Check whether a pending node needs the change, and record the answer."""
    rollout, node = request.rollout, request.node
    # Compared at the end: a rollout that worked on the node meanwhile makes the result worthless.
    before = tuple(state.index.targets_on(node))
    async with state.begin_work(WorkKind.CHECKS, node, rollout) as obstacle:
        if obstacle is not None:
            return  # the next decision asks again once that has ended
        problem = await _why_change_is_needed(NodeSession(state, adapters, rollout, node), check_mode)
    await _record(state, request, before, problem)


async def _why_change_is_needed(session: NodeSession, check_mode: CheckMode) -> str:
    """Return what the node needs or cannot say; empty if it needs nothing."""
    plan = session.state.index.plan_for(session.target)
    if plan.skip_compliant:
        try:
            source = await session.adapters.source(session.rollout)
        except RolloutdError as error:
            return str(error)
        report = await check_mode.check(session.node, source, plan, rollout=session.rollout)
        if report.compliance is not Compliance.COMPLIANT:
            return describe_report(report)
    for spec in plan.verify:
        result = await check_outside_attempt(session, spec)
        if not isinstance(result, Ok):
            return f"{spec.name}: {redact_for_team(result, spec.team).text}"
    return ""


async def _record(state: State, request: CheckIfCurrent, before: Sequence[Target], problem: str) -> None:
    async with state.exclusive_commit() as commit:
        index, now = state.index, state.now()
        rollout = index.rollouts.get(request.rollout)
        if rollout is None or rollout.closed:
            return  # the rollout was cancelled or deleted during the check
        target = index.target(request.rollout, request.node)
        if target.phase is not Phase.PENDING:
            return
        if tuple(index.targets_on(target.node)) != tuple(before) or is_at_work(index, target.node):
            return  # a rollout worked on the node meanwhile; the next decision asks again
        if problem:
            needed = ChangeNeeded(target.rollout, target.node, now, problem)
            await commit([needed], f"needs the change: {problem}")
            return
        why = "all checks pass without the change"
        if rollout.plan.skip_compliant:
            why = "check mode would change nothing, and all checks pass"
        current = transition(target, Trigger.FOUND_CURRENT, now, outcome=Outcome.ALREADY_CURRENT, text=why)
        await commit([current], "already current")


def describe_report(report: ComplianceReport) -> str:
    """Return in a few words what check mode would change, or why it cannot say."""
    if not report.changes:
        return f"check mode cannot say: {report.problem}"
    named = ", ".join(change.task for change in report.changes[:MAX_NAMED_TASKS])
    more = len(report.changes) - MAX_NAMED_TASKS
    return f"check mode would change: {named}" + (f" and {more} more" if more > 0 else "")
