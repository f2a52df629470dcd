"""Verification of the audit, and of the database against it, at the start and every hour.

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
from rolloutd.reason_text import describe_differences, describe_mismatch

log = logging.getLogger("rolloutd.engine.audit_monitor")

INTERVAL_S = 3600.0
"""Interval of the verifications: one reads the whole audit, and takes some time of one core."""

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

    async def try_to_verify(self) -> bool:
        """Verify and record the result; return whether the database could be read."""
        try:
            await self.verify()
        except StoreFailed as error:
            self._report_unverified(error)
            return False
        return True

    async def verify(self) -> AuditReport:
        """Verify, record the result and return it; raises StoreFailed."""
        self._requests += 1
        request = self._requests
        # One at a time, each newer than the last: an old report must not block what a settlement released.
        async with self._lock:
            # A verification answers the requests before its start; a later one may follow a settlement.
            if self._report is None or self._answered_requests < request:
                before_start = self._requests
                self._report = await self._state.store.verify_audit()
                self._answered_requests = before_start
                self._record(self._report)
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
