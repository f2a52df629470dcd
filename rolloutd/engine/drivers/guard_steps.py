"""The guard of one node: arm, keep it from restoring while the node can be heard, disarm, restore.

The node decides whether its change is confirmed or restored; this file records the answer.  What follows from
it, the core decides from the records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from machines.model import actions
from machines.model.plan import Guard, StepDef
from machines.model.step_record import StepAction, StepRecord
from machines.workflow.failing import may_be_armed
from rolloutd import ports
from rolloutd.engine.drivers.node_session import NodeSession
from rolloutd.engine.drivers.step_journal import StepJournal
from rolloutd.errors import NodeUnreachable

RENEWALS = 4
"""Renewals within the guard's `after`: a node may miss some of them."""

MIN_RENEWAL_TIMEOUT_S = 5.0
"""Limit of one renewal, or the interval if that is longer: a new connection to a busy node."""

ARM_RETRY_S = 2.0
"""Pause before a node is asked again whether its guard is armed, so that its run may begin."""

MAX_LISTED_PATHS = 5

_CAUSES = {"timer": "the daemon was silent", "boot": "it rebooted", "daemon": "the change had failed"}

Operation = Callable[[ports.NodeGuard, ports.StepContext], Awaitable[ports.GuardReport]]


class GuardSteps:
    """The guard of one node in one rollout; a plan without a guard needs none of it."""

    def __init__(self, session: NodeSession, journal: StepJournal) -> None:
        self._session = session
        self._state = session.state
        self._journal = journal

    async def carry_out(self, use: actions.UseGuard) -> None:
        """Arm, disarm or restore, and record what the node says."""
        match use.action:
            case StepAction.ARM:
                order = await self._state.fence_token()
                await self._record(use, lambda g, ctx: g.arm(ctx, order=order), _armed)
            case StepAction.DISARM:
                await self._record(use, lambda g, ctx: g.disarm(ctx), _confirmed)
            case _:
                await self._record(use, lambda g, ctx: g.restore(ctx), _restored)

    async def wait_until_heard(self) -> bool:
        """Return whether the node's guard is armed, so that a run may begin; its end is recorded."""
        guard = self._armed_guard()
        if guard is None:
            return True
        until = self._state.now() + guard.after_s
        while not isinstance(report := await self.renew(), ports.GuardReport):
            if self._state.now() >= until:
                text = f"{self._session.node} was not heard; no playbook was started"
                await self._record_disarm(guard.step, ports.Failed(text))
                return False
            await self._state.clock.sleep(ARM_RETRY_S)
        return not await self.record_end(report)

    async def keep_armed(self) -> ports.GuardReport:
        """Renew the guard while the node can be heard; return once it has ended on the node."""
        guard = self._armed_guard()
        if guard is None:
            # Without a guard there is no end to wait for; the caller cancels this.
            await asyncio.Event().wait()
            raise AssertionError("unreachable")
        while True:
            report = await self.renew()
            if isinstance(report, ports.GuardReport) and report.state is not ports.GuardState.ARMED:
                return report
            await self._state.clock.sleep(guard.after_s / RENEWALS)

    async def renew(self) -> ports.GuardReport | ports.Failed | ports.Unknown | None:
        """Let the guard's time begin again; None without a guard."""
        guard = self._armed_guard()
        if guard is None:
            return None
        timeout_s = max(MIN_RENEWAL_TIMEOUT_S, guard.after_s / RENEWALS)
        return await self._ask(guard.step, lambda adapter, ctx: adapter.renew(ctx), timeout_s)

    async def record_end(self, report: ports.GuardReport) -> bool:
        """Return whether the guard has ended before it was disarmed; that is recorded."""
        guard = self._armed_guard()
        if guard is None or report.state is ports.GuardState.ARMED:
            return False
        await self._record_disarm(guard.step, ports.Failed(_describe(self._session.node, report)))
        return True

    async def _record_disarm(self, spec: StepDef, result: ports.StepResult) -> None:
        """Record an end of the guard that was not the answer to a disarm."""
        numbers = [r.number for r in self._journal.records if r.action is StepAction.DISARM]
        record = self._journal.begin(actions.UseGuard(spec, 1 + max(numbers, default=0), StepAction.DISARM))
        await self._journal.finish(record, result)

    def _armed_guard(self) -> Guard | None:
        return self._session.plan.guard if may_be_armed(self._attempt_records()) else None

    def _attempt_records(self) -> list[StepRecord]:
        attempt = self._session.target.attempt
        return [record for record in self._journal.records if record.attempt == attempt]

    async def _record(
        self,
        use: actions.UseGuard,
        operation: Operation,
        result_of: Callable[[str, ports.GuardReport], ports.StepResult],
    ) -> None:
        spec, kind = use.spec, use.action
        # Not captured: without its package a node must not move, least of all be recorded as armed.
        self._session.adapters.guards[spec.kind]
        was_begun = any(r.action is kind and r.number == use.number for r in self._attempt_records())
        record = self._journal.begin(use)
        await self._journal.write(record)
        answer = await self._ask(spec, operation, spec.timeout_s)
        if isinstance(answer, ports.GuardReport):
            if kind is StepAction.RESTORE and answer.state is ports.GuardState.CONFIRMED:
                # The answer to an earlier disarm was lost.
                await self._record_disarm(spec, _confirmed(self._session.node, answer))
            result = result_of(self._session.node, answer)
        else:
            # The node confirms or restores whatever the daemon sees, so no error is the last word on that.
            # An arm whose answer another daemon lost may have armed it, whatever this one is answered.
            is_refused = kind is StepAction.ARM and not was_begun
            result = answer if is_refused else ports.Unknown(answer.text)
        await self._journal.finish(record, result)

    async def _ask(
        self, spec: StepDef, operation: Operation, timeout_s: float
    ) -> ports.GuardReport | ports.Failed | ports.Unknown:
        return await self._session.capture_errors(self._ask_node(spec, operation, timeout_s), of=spec)

    async def _ask_node(
        self, spec: StepDef, operation: Operation, timeout_s: float
    ) -> ports.GuardReport | ports.Failed | ports.Unknown:
        guard = self._session.adapters.guards[spec.kind]
        ctx = await self._session.step_context(spec)
        try:
            return await operation(guard, replace(ctx, deadline=self._state.now() + timeout_s))
        except NodeUnreachable as error:
            return ports.Unknown(str(error))


def _armed(node: str, report: ports.GuardReport) -> ports.StepResult:
    if report.state is ports.GuardState.ARMED:
        return ports.Ok(f"{node} restores itself unless the change is confirmed")
    return ports.Failed(_describe(node, report))


def _confirmed(node: str, report: ports.GuardReport) -> ports.StepResult:
    if report.state is ports.GuardState.CONFIRMED:
        return ports.Ok(f"{node}: the change is confirmed")
    return ports.Failed(_describe(node, report))


def _restored(node: str, report: ports.GuardReport) -> ports.StepResult:
    match report.state:
        case ports.GuardState.RESTORED:
            paths, problems = list(report.restored), list(report.problems)
            value = {"by": report.by, "restored": paths, "problems": problems}
            return ports.Ok(_describe(node, report), value=value)
        case ports.GuardState.NONE:
            return ports.Ok()
        case ports.GuardState.CONFIRMED:
            return ports.Failed(_describe(node, report))
        case ports.GuardState.ARMED | ports.GuardState.RESTORING:
            return ports.Busy(f"{node} restores itself now")


def _describe(node: str, report: ports.GuardReport) -> str:
    match report.state:
        case ports.GuardState.RESTORED:
            listed = ", ".join(report.restored[:MAX_LISTED_PATHS]) or "no path had changed"
            more = len(report.restored) - MAX_LISTED_PATHS
            listed += f" and {more} more" if more > 0 else ""
            cause = f" because {_CAUSES[report.by]}" if report.by in _CAUSES else ""
            return "; ".join((f"{node} restored itself{cause}: {listed}", *report.problems))
        case ports.GuardState.CONFIRMED:
            return f"{node}: the change was confirmed already, so it stays"
        case ports.GuardState.RESTORING | ports.GuardState.ARMED:
            return f"{node} restores itself"
        case ports.GuardState.NONE:
            return f"{node} has no guard of this attempt; inspect it"
