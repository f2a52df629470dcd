"""Handler of cleaning: remove from nodes what ended rollouts left there."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from rolloutd.control import requests, rights, wire_fleet
from rolloutd.control.node_reports import result_lines
from rolloutd.control.resolve import resolve_rollout
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.engine.background.node_cleaning import CleanReport
from rolloutd.errors import Refused

routes = RouteTable()


@routes.add("POST", "/v1/clean/{s}", access=rights.CLEANER, is_heavy=True)
async def clean(
    services: Services, request: Request[requests.CleanBody]
) -> AsyncGenerator[wire_fleet.CleanLine, None]:
    """Stream what is removed from a node, or from each node of a rollout, that ended rollouts left there."""
    body = request.input
    state, cleaner, subject = services.state, services.cleaner, request.path_params["s"]
    if cleaner is None:
        raise Refused("not-available", "this daemon cannot clean nodes; upgrade it")
    nodes = [subject]
    if subject not in state.index.nodes:
        resolved = await resolve_rollout(state, subject)
        if not resolved.rollout.closed:
            raise Refused("not-over", f"{resolved.rollout.id}: not over; wait, or cancel it")
        nodes = [target.node for target in resolved.index.targets(resolved.rollout.id)]
    actor, cause = request.identity.actor, f"clean: {body.reason}"
    return result_lines(
        (cleaner.clean(node, dry_run=body.dry_run, actor=actor, cause=cause) for node in nodes),
        lambda report: _line(report, dry_run=body.dry_run),
    )


def _line(report: CleanReport, *, dry_run: bool) -> wire_fleet.CleanLine:
    files: list[wire_fleet.LeftFile] = [
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
