"""The table of all routes: what the server serves and what the OpenAPI document lists."""

from __future__ import annotations

from rolloutd.control.handlers import ordering, plans, reading, streams, teams
from rolloutd.control.routes import Route

ROUTES: tuple[Route, ...] = (
    *reading.ROUTES,
    *streams.ROUTES,
    *plans.ROUTES,
    *ordering.ROUTES,
    *teams.ROUTES,
)
