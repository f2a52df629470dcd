"""Handler of the matrix of changes and nodes."""

from __future__ import annotations

from rolloutd.control import requests, wire_fleet
from rolloutd.control.changes import change_matrix
from rolloutd.control.routes import Request, RouteTable, Services

routes = RouteTable()


@routes.add("GET", "/v1/changes")
async def changes(services: Services, request: Request[requests.ChangesQuery]) -> wire_fleet.Changes:
    """Show which node has which change, across rollouts."""
    query = request.input
    return await change_matrix(services.state, query.plan)
