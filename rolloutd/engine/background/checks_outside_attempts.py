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
from machines.workflow.steps import StepPrefix, is_excused, step_id
from rolloutd.engine.check_mode import CheckMode
from rolloutd.engine.drivers.check_execution import RETRY_MAX_S, CheckExecution
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession, end_runs_on_node
from rolloutd.engine.drivers.step_journal import StepJournal
from rolloutd.engine.outcomes import redact_for_team, verdict_events
from rolloutd.engine.state import State
from rolloutd.errors import RolloutdError
from rolloutd.ports import Failed, Ok, StepResult, Unknown

RUN_INTERVAL_S = 300.0
"""Interval between runs of a check that is a run: each costs processes here and a login on the node."""

MIN_FAILED_CHECKS = 2
"""Failed checks in a row that count: one lost packet is not a regression."""

MAX_RECHECK_S = 60.0
"""A check with a `within` must fail for that long, at most this: a short overload is not a failure."""

MAX_NAMED_TASKS = 3
"""Tasks that the record of a needed change names; the rest is a number."""


async def check_outside_attempt(checks: CheckExecution, spec: StepDef) -> StepResult:
    """Check a node once; raises StoreFailed."""
    return await checks.session.capture_errors(_check_once(checks, spec))


async def _check_once(checks: CheckExecution, spec: StepDef) -> StepResult:
    """Check; a run that an earlier daemon started is found again, and a fresh pass of a run stays valid."""
    await checks.journal.load()
    step = step_id(StepPrefix.SOAK, spec.name)
    if Capability.STARTS_RUN not in spec.capabilities:
        return await checks.carry_out(RunCheck(spec, step, 1), is_recorded=False)
    session, journal = checks.session, checks.journal
    mine = [r for r in journal.records if r.step == step and r.attempt == session.target.attempt]
    latest = mine[-1] if mine else None
    age_s = 0.0 if latest is None else session.state.now() - latest.at
    if latest is not None and latest.state is StepState.OK and 0.0 <= age_s < RUN_INTERVAL_S:
        return Ok(latest.text)
    is_started = latest is not None and latest.state is StepState.INTENDED
    if journal.has_unfinished_run and not is_started:
        cleaned_up = await _clean_up_stale_runs(session, journal)
        if not isinstance(cleaned_up, Ok):
            return Unknown(f"an earlier run may be active: {cleaned_up.text}")
    return await checks.carry_out(
        RunCheck(spec, step, 1 if latest is None else latest.number + (not is_started))
    )


async def _clean_up_stale_runs(session: NodeSession, journal: StepJournal) -> StepResult:
    if is_at_work(session.state.index, session.node):
        return Unknown(f"{session.node} is at work in another rollout")
    earlier = [r.number for r in journal.records if r.action is StepAction.CLEAN_UP]
    record = journal.begin(CleanUpStaleRuns(1 + max(earlier, default=0)))
    await journal.write(record)
    ending = end_runs_on_node(session.state, session.adapters, session.node, STALE_RUN_TIMEOUT_S)
    result = await session.capture_errors(ending)
    await journal.finish(record, result)
    return result


async def check_soaking(state: State, adapters: AdapterSet, request: CheckSoaking) -> None:
    """Check a soaking node, and fail it by the first check that fails."""
    target = state.index.target(request.rollout, request.node)
    if target.outcome is not Outcome.CHANGED:
        return  # it moved before its turn came
    async with state.begin_work(WorkKind.CHECKS, target.node, target.rollout) as obstacle:
        if obstacle is not None:
            return  # the next round asks again
        session = NodeSession(state, adapters, target.rollout, target.node)
        checks = CheckExecution(session, StepJournal(session))
        for spec in state.index.plan_for(target).verify:
            result = await session.capture_errors(_repeat_check(checks, spec))
            ended = StepState.FAILED if isinstance(result, Failed) else StepState.UNKNOWN
            if not isinstance(result, Ok) and not is_excused(spec, ended, checks.journal.records):
                await _fail_node(state, target, spec, result)
                return


async def _repeat_check(checks: CheckExecution, spec: StepDef) -> StepResult:
    """Repeat a check until it passes, or has failed often and long enough to count."""
    return await checks.repeat(
        spec,
        lambda: check_outside_attempt(checks, spec),
        min(float(spec.params.get("within", 0)), MAX_RECHECK_S),
        min_tries=MIN_FAILED_CHECKS,
        pause_s=RETRY_MAX_S,  # more requests do not help an overloaded node
    )


async def _fail_node(state: State, target: Target, spec: StepDef, result: StepResult) -> None:
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
    checks = CheckExecution(session, StepJournal(session))
    for spec in plan.verify:
        result = await check_outside_attempt(checks, spec)
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
