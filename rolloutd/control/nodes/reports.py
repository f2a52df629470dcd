"""Results of nodes as a stream, one line for each node when it is done: drift, cleaning, and a plan's impact.

When the client disconnects, no further node begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any, TypeVar, cast

from machines.model.configuration import ComplianceReport
from rolloutd.commands.resolve import resolve_rollout
from rolloutd.control import requests, rights
from rolloutd.control.nodes import wire_nodes
from rolloutd.control.nodes.streams import HEARTBEAT_S
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.engine.background.node_cleaning import CleanReport
from rolloutd.errors import NotFound, Refused

routes = RouteTable()


@routes.add("POST", "/v1/rollouts/{r}/drift", access=rights.PLAN_OWNER)
async def check_drift(
    services: Services, request: Request[requests.EmptyBody]
) -> AsyncGenerator[wire_nodes.ImpactLine, None]:
    """Stream what check mode would change again on the done nodes of a rollout, and record it."""
    resolved = await resolve_rollout(services.state, request.path_params["r"])
    actor, plan = request.identity.actor, resolved.rollout.plan
    return report_lines(
        services.drift.check(plan, target, actor, "drift checked on demand")
        for target in services.drift.targets(resolved.index, resolved.rollout.id)
    )


@routes.add("POST", "/v1/clean/{s}", access=rights.CLEANER, is_heavy=True)
async def clean(
    services: Services, request: Request[requests.CleanBody]
) -> AsyncGenerator[wire_nodes.CleanLine, None]:
    """Stream what is removed from a node, or from each node of a rollout, that ended rollouts left there."""
    body = request.input
    state, cleaner, subject = services.state, services.cleaner, request.path_params["s"]
    nodes = [subject]
    if subject not in state.index.nodes:
        try:
            resolved = await resolve_rollout(state, subject)
        except NotFound:
            problem = "no such node or rollout; see rolloutctl inventory and rolloutctl rollouts"
            raise NotFound(f"{subject}: {problem}") from None
        if not resolved.rollout.closed:
            raise Refused("not-over", f"{resolved.rollout.id}: not over; wait, or cancel it")
        nodes = [target.node for target in resolved.index.targets(resolved.rollout.id)]
    actor, cause = request.identity.actor, f"clean: {body.reason}"
    return result_lines(
        (cleaner.clean(node, dry_run=body.dry_run, actor=actor, cause=cause) for node in nodes),
        lambda report: _line(report, dry_run=body.dry_run),
    )


def _line(report: CleanReport, *, dry_run: bool) -> wire_nodes.CleanLine:
    files: list[wire_nodes.LeftFile] = [
        {
            "node": report.node,
            "what": each.what,
            "path": each.path,
            "result": "kept" if each.reason else "found" if dry_run else "removed",
            "reason": each.reason or None,
        }
        for each in report.files
    ]
    if report.problem:
        files.append(
            {"node": report.node, "what": "node", "path": "", "result": "kept", "reason": report.problem}
        )
    return {"kind": "node", "node": report.node, "files": files}


T = TypeVar("T")

L = TypeVar("L")


async def result_lines(
    jobs: Iterable[Coroutine[Any, Any, T]], line_of: Callable[[T], L]
) -> AsyncGenerator[L, None]:
    """Yield the line of each job's result, in the order of their ends, and heartbeats."""
    # No TaskGroup: in a generator it would make a group of the error of one job, or of the end of the reader.
    tasks = [asyncio.create_task(job) for job in jobs]
    pending = set(tasks)
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
        # The client has gone, or a job failed: nothing further may begin.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def report_lines(
    checks: Iterable[Coroutine[Any, Any, ComplianceReport]],
) -> AsyncGenerator[wire_nodes.ImpactLine, None]:
    return result_lines(checks, _report_line)


def _report_line(report: ComplianceReport) -> wire_nodes.ImpactLine:
    return {
        "kind": "node",
        "node": report.node,
        "compliance": report.compliance.value,
        "changes": [{"task": each.task, "diff": each.diff or None} for each in report.changes],
        "problem": report.problem or None,
    }
