"""Results of nodes as a stream: one line for each node, as the nodes are done.

When the client disconnects, no further node begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any, TypeVar, cast

from machines.model.compliance import ComplianceReport
from rolloutd.control import wire_plans

HEARTBEAT_S = 15.0
"""Silence until a heartbeat is sent; clients give up after three missing ones."""

T = TypeVar("T")
L = TypeVar("L")


async def result_lines(
    jobs: Iterable[Coroutine[Any, Any, T]], line_of: Callable[[T], L]
) -> AsyncGenerator[L, None]:
    """Yield the line of each job's result, in the order of their ends, and heartbeats."""
    async with asyncio.TaskGroup() as tasks:
        pending = {tasks.create_task(job) for job in jobs}
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    yield cast(L, {"kind": "heartbeat"})
                for each in done:
                    yield line_of(each.result())
        finally:
            for task in pending:
                task.cancel()


def report_lines(
    checks: Iterable[Coroutine[Any, Any, ComplianceReport]],
) -> AsyncGenerator[wire_plans.ImpactLine, None]:
    """Yield the line of each check."""
    return result_lines(checks, _report_line)


def _report_line(report: ComplianceReport) -> wire_plans.ImpactLine:
    return {
        "kind": "node",
        "node": report.node,
        "compliance": report.compliance.value,
        "changes": [{"task": each.task, "diff": each.diff or None} for each in report.changes],
        "problem": report.problem or None,
    }
