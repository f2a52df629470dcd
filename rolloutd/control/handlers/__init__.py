"""All routes: what the server serves and what the OpenAPI document lists."""

from __future__ import annotations

from rolloutd.control.handlers import (
    audit,
    changes,
    commands,
    configuration,
    forecasts,
    handover,
    leadership,
    node_reports,
    plans,
    preparation,
    queries,
    reboots,
    streams,
    teams,
    trains,
)
from rolloutd.control.routes import Route

ROUTES: tuple[Route, ...] = (
    *queries.routes,
    *streams.routes,
    *plans.routes,
    *commands.routes,
    *node_reports.routes,
    *teams.routes,
    *trains.routes,
    *reboots.routes,
    *changes.routes,
    *configuration.routes,
    *preparation.routes,
    *audit.routes,
    *handover.routes,
    *leadership.routes,
    *forecasts.routes,
)
