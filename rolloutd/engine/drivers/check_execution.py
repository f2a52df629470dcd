"""Checks of one node: retries until one passes, what the isolator saw before, the record of a run.

The driver checks a node within its attempt, `checks_outside_attempts.py` one that is pending or soaks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from machines.model.actions import RunCheck
from machines.model.plan import Capability, StepDef
from machines.states import Outcome
from machines.workflow.steps import baseline_record
from rolloutd.engine.drivers.node_session import NodeSession
from rolloutd.engine.drivers.step_journal import StepJournal
from rolloutd.engine.outcomes import redact_for_team
from rolloutd.ports import Check, Failed, Ok, StepContext, StepResult, Unknown
from rolloutd.ports.guards import validate_result

TIMEOUT_S = 60.0
"""Time limit of one try of a check whose parameters name none."""

RETRY_S = 1.0
"""First pause between two tries of a check that has a `within`."""

RETRY_MAX_S = 5.0
"""Longest such pause: a node that has recovered is noticed within five seconds."""


class CheckExecution:
    """Carries out checks of one node."""

    def __init__(self, session: NodeSession, journal: StepJournal) -> None:
        self.session = session
        self.journal = journal

    async def carry_out(
        self, action: RunCheck, *, within_s: float = 0.0, is_recorded: bool = True
    ) -> StepResult:
        """Check until the check passes or this time is over; a check that is a run is always recorded."""
        spec, session, journal = action.spec, self.session, self.journal
        check, record = session.adapters.checks[spec.kind], journal.begin(action)
        before = baseline_record(spec, journal.records)
        ctx = await session.step_context(
            spec,
            step=action.step,
            number=action.number,
            prior=journal.prior_of_kind(spec.kind),
            is_baseline=action.is_baseline,
            baseline=None if before is None else before.prior,
        )
        # A check changes nothing, so it needs no recorded intent: after a crash it is repeated.  A check that
        # is a run is recorded with its handle, so that a user can stop it and no other run meets it.
        if Capability.STARTS_RUN in spec.capabilities:
            recorded = journal.recorded_version(record).handle
            ctx = session.with_run_id(ctx, recorded, ctx.idempotency_key)
            record = replace(record, handle=ctx.run_id)
            await journal.write(record)
        checking = self.repeat(spec, lambda: self._ask(spec, check, ctx), within_s)
        result = await session.capture_errors(checking)
        if is_recorded or record.handle:
            await journal.finish(record, result)
        if record.handle:
            await journal.update_unfinished_run()
        return result

    async def repeat(
        self,
        spec: StepDef,
        check_once: Callable[[], Awaitable[StepResult]],
        within_s: float,
        *,
        min_tries: int = 1,
        pause_s: float = RETRY_S,
    ) -> StepResult:
        """Check until the check passes, or has failed this often and for this time (seconds)."""
        state, now, tries = self.session.state, self.session.state.now(), 0
        until = now + within_s
        while True:
            result, tries = await check_once(), tries + 1
            seen_at, now = now, state.now()
            until -= max(0.0, seen_at - now)  # a clock that was set back must not extend the retries
            left_s = until - now
            is_over = left_s <= 0 and tries >= min_tries
            if isinstance(result, Ok) or is_over or self.session.target.outcome is Outcome.LEFT:
                return result
            if (progress := self.session.published_progress) is not None:
                progress.failing_check = redact_for_team(result, spec.team).text
                progress.failing_check_until = until
            await state.clock.sleep(min(pause_s, left_s) if left_s > 0 else pause_s)
            pause_s = min(pause_s * 2, RETRY_MAX_S)

    async def _ask(self, spec: StepDef, check: Check, ctx: StepContext) -> StepResult:
        """Return the answer to one try, or its error; raises StoreFailed."""
        timeout_s = float(ctx.params.get("timeout", TIMEOUT_S))
        ctx = replace(ctx, deadline=min(ctx.deadline, self.session.state.now() + timeout_s))
        result = await self.session.capture_errors(check.check(ctx), of=spec)
        return validate_result(f"check {spec.kind}", result, Ok, Failed, Unknown)
