"""The impact of a plan: what check mode would change on each of its targets, without opening a rollout.

Reports arrive as the nodes are checked.  When the client disconnects, no further check starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

from machines.model.compliance import ComplianceReport
from machines.scheduler.progress import is_out_of_service
from rolloutd.commands.submit import ResolvedPlan
from rolloutd.control import wire_plans
from rolloutd.control.routes import Services

HEARTBEAT_S = 15.0
"""Silence until a heartbeat is sent; clients give up after three missing ones."""

RUN_PREFIX = "impact"
"""Begins the names of the runs; a rollout's id ends in a hyphen and five characters."""


async def impact_lines(
    services: Services, draft: ResolvedPlan, tree: Path
) -> AsyncGenerator[wire_plans.ImpactLine, None]:
    """Yield one line for each target, in the order of the answers."""
    nodes = [target.node for target in draft.targets]
    async with asyncio.TaskGroup() as tasks:
        pending = {tasks.create_task(_check(services, draft, tree, node)) for node in nodes}
        try:
            while pending:
                done, pending = await asyncio.wait(
                    pending, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    yield {"kind": "heartbeat"}
                for each in done:
                    yield impact_line(each.result())
        finally:
            for task in pending:
                task.cancel()


async def _check(services: Services, draft: ResolvedPlan, tree: Path, node: str) -> ComplianceReport:
    state = services.state
    if is_out_of_service(state.index, node):
        return ComplianceReport(node, state.now(), problem=f"{node} is at work in another rollout")
    return await services.check_mode.check(node, tree, draft.plan.stages, run_prefix=RUN_PREFIX)


def impact_line(report: ComplianceReport) -> wire_plans.ImpactLine:
    return {
        "kind": "node",
        "node": report.node,
        "compliance": report.compliance.value,
        "changes": [{"task": each.task, "diff": each.diff or None} for each in report.changes],
        "problem": report.problem or None,
    }
