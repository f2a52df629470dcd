"""How long a plan takes that is not submitted: a forecast with few draws and a short limit."""

from __future__ import annotations

import asyncio
import logging

from machines.model.timefmt import format_duration
from rolloutd.control.plans import wire_plans
from rolloutd.engine.forecasts import Forecaster
from rolloutd.errors import RolloutdError
from rolloutd.forecast.request import Draft

log = logging.getLogger("rolloutd.control.plan_duration")

DRAWS = 50
"""Draws of a preview: they cost less than the walk, and its p90 is off by some 4 % of the draws."""

TIME_LIMIT_S = 10.0
"""Time that a preview waits for its forecast; 2,000 nodes take a second or two of an idle core."""

MONTH_S = 30 * 86_400.0


async def plan_duration(forecaster: Forecaster, draft: Draft) -> wire_plans.PlanDuration | None:
    """Return how long a plan takes as if it were submitted now; None where no forecast is ready in time."""
    try:
        async with asyncio.timeout(TIME_LIMIT_S):
            (answer,) = await forecaster.ask(forecaster.request(draft=draft, draws=DRAWS, seed=1))
    except (TimeoutError, RolloutdError) as error:
        log.info("preview: no forecast: %s", error or f"not ready within {TIME_LIMIT_S:.0f} s")
        return None
    found: wire_plans.PlanDuration = {
        "ends_at": answer["ends_at"],
        "work_s": answer["work_s"],
        "bottleneck": answer["bottleneck"],
        "train": answer["train"],
        "assumptions": answer["assumptions"],
        "warning": None,
    }
    found["warning"] = _warning(found)
    return found


def _warning(found: wire_plans.PlanDuration) -> str | None:
    """Return why a month is too short for the plan, None if it is not."""
    took_s, bottleneck = found["work_s"]["p50"], found["bottleneck"]
    if took_s is None:
        return "duration: as it is the plan never ends; see rolloutctl forecast"
    if took_s <= MONTH_S:
        return None
    cause = "" if bottleneck is None else f" at {bottleneck['kind']} {bottleneck['name']}"
    took = format_duration(took_s - took_s % 3600.0)
    return f"duration: it takes {took}, longer than a month; widen the windows or allow more at once{cause}"
