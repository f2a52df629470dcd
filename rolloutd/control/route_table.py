"""All routes: what the server serves and what the OpenAPI document lists."""

from __future__ import annotations

from rolloutd.concurrency import threads
from rolloutd.control import openapi
from rolloutd.control.audit import handlers as audit
from rolloutd.control.daemons import handlers as daemons
from rolloutd.control.daemons import wire_daemons
from rolloutd.control.fleet import changes, handover
from rolloutd.control.fleet import handlers as fleet
from rolloutd.control.forecasts import handlers as forecasts
from rolloutd.control.nodes import comparison, preparation, reports, streams
from rolloutd.control.nodes import handlers as nodes
from rolloutd.control.plans import configuration
from rolloutd.control.plans import handlers as plans
from rolloutd.control.rollouts import handlers as rollouts
from rolloutd.control.routes import Request, Route, RouteTable, Services
from rolloutd.control.trains import handlers as trains
from rolloutd.control.votes import handlers as votes

routes = RouteTable()


@routes.add("GET", "/v1/openapi.json", on_standby=True)
async def document(services: Services, request: Request) -> wire_daemons.OpenApi:
    """Return this API's OpenAPI document."""
    return await threads.COMPUTATIONS.run(openapi.openapi_document, ROUTES, services.version)


ROUTES: tuple[Route, ...] = (
    *daemons.routes,
    *rollouts.routes,
    *nodes.routes,
    *streams.routes,
    *plans.routes,
    *votes.routes,
    *fleet.routes,
    *reports.routes,
    *trains.routes,
    *changes.routes,
    *configuration.routes,
    *preparation.routes,
    *audit.routes,
    *handover.routes,
    *comparison.routes,
    *forecasts.routes,
    *routes,
)
