"""Handler of drift: check mode again on the nodes that a rollout changed."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from rolloutd.control import requests, rights, wire_plans
from rolloutd.control.node_reports import report_lines
from rolloutd.control.resolve import resolve_rollout
from rolloutd.control.routes import Request, RouteTable, Services

routes = RouteTable()


@routes.add("POST", "/v1/rollouts/{r}/drift", access=rights.PLAN_OWNER)
async def check_drift(
    services: Services, request: Request[requests.EmptyBody]
) -> AsyncGenerator[wire_plans.ImpactLine, None]:
    """Stream what check mode would change again on the done nodes of a rollout, and record it."""
    resolved = await resolve_rollout(services.state, request.path_params["r"])
    actor, plan = request.identity.actor, resolved.rollout.plan
    return report_lines(
        services.drift.check(plan, target, actor, "drift checked on demand")
        for target in services.drift.targets(resolved.index, resolved.rollout.id)
    )
