"""All routes: what the server serves and what the OpenAPI document lists."""

from __future__ import annotations

from rolloutd.control.handlers import (
    audit,
    changes,
    cleaning,
    commands,
    configuration,
    drift,
    plans,
    preparation,
    queries,
    streams,
    teams,
    verdicts,
)
from rolloutd.control.routes import Route

ROUTES: tuple[Route, ...] = (
    *queries.routes,
    *streams.routes,
    *plans.routes,
    *commands.routes,
    *drift.routes,
    *cleaning.routes,
    *teams.routes,
    *changes.routes,
    *configuration.routes,
    *preparation.routes,
    *verdicts.routes,
    *audit.routes,
)
