"""One check of a node outside its attempts: of a pending node, or of a canary that soaks.

Only a check that is a run is recorded, so that a restarted daemon finds it and no second run meets it.
"""

from __future__ import annotations

from machines.model.actions import STALE_RUN_TIMEOUT_S, CleanUpStaleRuns, RunCheck
from machines.model.plan import Capability, StepDef
from machines.model.step_record import StepAction, StepState
from machines.scheduler.checks import is_at_work
from machines.workflow.steps import StepPrefix, baseline_record, step_id
from rolloutd.engine.drivers.node_session import NodeSession, end_runs_on_node
from rolloutd.engine.drivers.step_journal import StepJournal
from rolloutd.errors import RolloutdError, StoreFailed
from rolloutd.ports import Failed, Ok, StepContext, Unknown
from rolloutd.ports.guards import adapter_errors, validate_result

RUN_INTERVAL_S = 300.0
"""Interval between runs of a check that is a run: each costs processes here and a login on the node."""


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
        response = await session.adapters.checks[spec.kind].check(ctx)
    return validate_result(f"check {spec.kind}", response, Ok, Failed, Unknown)
