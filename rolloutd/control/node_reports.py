"""Reports of check mode as a stream: one line for each node, as the nodes are checked.

When the client disconnects, no further check starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable
from typing import Any

from machines.model.compliance import ComplianceReport
from rolloutd.control import wire_plans

HEARTBEAT_S = 15.0
"""Silence until a heartbeat is sent; clients give up after three missing ones."""


async def report_lines(
    checks: Iterable[Coroutine[Any, Any, ComplianceReport]],
) -> AsyncGenerator[wire_plans.ImpactLine, None]:
    """Yield the line of each check, in the order of their ends."""
    async with asyncio.TaskGroup() as tasks:
        pending = {tasks.create_task(check) for check in checks}
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    yield {"kind": "heartbeat"}
                for each in done:
                    yield _report_line(each.result())
        finally:
            for task in pending:
                task.cancel()


def _report_line(report: ComplianceReport) -> wire_plans.ImpactLine:
    return {
        "kind": "node",
        "node": report.node,
        "compliance": report.compliance.value,
        "changes": [{"task": each.task, "diff": each.diff or None} for each in report.changes],
        "problem": report.problem or None,
    }
