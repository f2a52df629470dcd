"""Handlers of verdicts: list them, and clear one."""

from __future__ import annotations

from rolloutd.commands import verdicts
from rolloutd.control import requests, rights, serializers, wire_plans
from rolloutd.control.routes import Request, RouteTable, Services

routes = RouteTable()


@routes.add("GET", "/v1/verdicts")
async def list_verdicts(services: Services, request: Request[requests.NoParams]) -> wire_plans.Verdicts:
    """List the contents that failed on a class of hosts, with the evidence."""
    return {"verdicts": [serializers.verdict(each) for each in await services.state.store.load_verdicts()]}


@routes.add("POST", "/v1/verdicts/{v}/clear", access=rights.VERDICT_ADMIN)
async def clear_verdict(
    services: Services, request: Request[requests.ReasonBody]
) -> wire_plans.ClearedVerdict:
    """Clear a verdict, so that its content may be submitted again."""
    state, verdict, reason = services.state, request.path_params["v"], request.input.reason
    events = await verdicts.clear(state, request.identity, verdict, reason)
    await state.commit(events, actor=request.identity.actor, cause=f"verdict cleared: {reason}")
    return {"id": verdict}
