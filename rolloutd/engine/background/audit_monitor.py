"""Verification of the audit, and of the database against it.

A start and each hour compare the signed checkpoint, whose cost does not grow with the history.  The whole
audit is verified once a day, and where the checkpoint is not trusted; at a start, before the first driver.
Rows that the audit does not account for block what depends on them; a broken chain is only reported, so that
damage to one entry does not stop a fleet.
"""

from __future__ import annotations

import asyncio
import logging

from machines.model.rows import NOT_COMPARED
from rolloutd.engine.state import State
from rolloutd.errors import StoreFailed
from rolloutd.ports import AuditReport
from rolloutd.texts.reason_text import describe_differences, describe_mismatch

log = logging.getLogger(__name__)

INTERVAL_S = 3600.0
"""Interval of the checkpoint's comparisons: one takes half a second of CPU for 100,000 nodes."""

WHOLE_INTERVAL_S = 86_400.0
"""Interval of the whole verifications: one takes minutes of one core for ten million entries."""

RETRY_S = 60.0
"""Pause after a verification that could not read the database."""

CONDITION = "audit"
"""Key of the daemon's condition for a broken chain or a mismatch."""


class AuditMonitor:
    def __init__(self, state: State) -> None:
        self._state = state
        self._lock = asyncio.Lock()
        self._requests = 0
        self._answered_requests = 0
        self._report: AuditReport | None = None
        self._is_trusted = False
        """Whether the checkpoint's sums are right, so that they need not be computed from the rows."""
        self._verified_at = 0.0

    async def begin(self) -> bool:
        """Trust the checkpoint, else verify the whole audit; return whether the database could be read."""
        problem = await self._compare_checkpoint()
        if not problem:
            return True
        log.warning("audit: the checkpoint is not trusted: %s; the whole audit is verified first", problem)
        return await self.try_to_verify()

    async def check(self) -> bool:
        """Compare the checkpoint, and verify the whole audit if that is due or the checkpoint is wrong."""
        problem = await self._compare_checkpoint()
        if problem:
            log.error("audit: the checkpoint is not trusted: %s; the whole audit is verified", problem)
            return await self.try_to_verify()
        await self._sign()
        return await self.verify_if_due()

    async def verify_if_due(self) -> bool:
        """Verify the whole audit once a day; return whether the database could be read."""
        # abs(), because the clock may have been set back.
        if abs(self._state.now() - self._verified_at) < WHOLE_INTERVAL_S:
            return True
        return await self.try_to_verify(gently=True)

    async def _compare_checkpoint(self) -> str:
        """Return why the checkpoint is not trusted, the empty string if it is."""
        try:
            report = await self._state.store.verify_audit_checkpoint()
        except StoreFailed as error:
            return str(error)
        self._is_trusted, self._verified_at = not report.problem, report.verified_at
        if not report.problem:
            log.info("audit: the checkpoint of entry %d agrees with the rows", report.seq)
        return report.problem

    async def _sign(self, report: AuditReport | None = None) -> None:
        """Let the next start trust the rows, or none of them while one is in doubt."""
        store = self._state.store
        try:
            if report is None:
                await store.sign_audit_checkpoint()
            elif report.ok:
                self._verified_at = self._state.now()
                await store.sign_audit_checkpoint(self._verified_at, all_rows=not self._is_trusted)
                self._is_trusted = True
            else:
                self._is_trusted = False
                await store.drop_audit_checkpoint()
        except StoreFailed as error:
            log.warning("audit: the checkpoint is not signed: %s; the next start verifies the whole", error)

    async def try_to_verify(self, *, gently: bool = False) -> bool:
        """Verify and record the result; return whether the database could be read."""
        try:
            await self.verify(gently=gently)
        except StoreFailed as error:
            self._report_unverified(error)
            return False
        return True

    async def verify(self, *, gently: bool = False) -> AuditReport:
        """Verify the whole, record the result and return it; raises StoreFailed."""
        self._requests += 1
        request = self._requests
        # One at a time, each newer than the last: an old report must not block what a settlement released.
        async with self._lock:
            # A verification answers the requests before its start; a later one may follow a settlement.
            if self._report is None or self._answered_requests < request:
                before_start = self._requests
                self._report = await self._state.store.verify_audit(gently=gently)
                self._answered_requests = before_start
                self._record(self._report)
                await self._sign(self._report)
            return self._report

    def _report_unverified(self, error: StoreFailed) -> None:
        log.error("audit: not verified: %s", error)
        self._state.conditions[CONDITION] = f"the audit was not verified: {error}"
        # Later failures keep the last result: a disk that cannot be read must not release what is blocked.
        if self._report is None:
            self._state.index.record_mismatches((NOT_COMPARED,))

    def _record(self, report: AuditReport) -> None:
        """Block what depends on a mismatch, and report it."""
        state, chain = self._state, report.chain
        state.index.record_mismatches([row.mismatch for row in report.mismatches])
        state.conditions.pop(CONDITION, None)
        if report.ok:
            log.info("audit: verified: %s; head %s", chain.message, chain.head)
        else:
            state.conditions[CONDITION] = _describe(report)
            log.critical("%s", state.conditions[CONDITION], extra={"first_bad": chain.first_bad})
        for row in report.mismatches:
            found = row.mismatch
            log.error("%s", describe_mismatch(found.subject, found.kind, found.columns))
        state.wake_up()


def _describe(report: AuditReport) -> str:
    parts = []
    if not report.chain.ok:
        parts.append(
            f"the audit's chain is BROKEN ({report.chain.message}): the database was changed by hand or by"
            " its disk; keep a copy and see `rolloutctl audit verify`"
        )
    if report.mismatches or report.unreadable:
        differences = describe_differences(
            len(report.mismatches), len(report.unreadable), is_complete=report.is_complete
        )
        parts.append(f"{differences}: see `rolloutctl audit verify`, and settle them")
    return "; ".join(parts)
