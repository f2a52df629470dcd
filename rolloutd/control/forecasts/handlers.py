"""Handlers of forecasts: of open rollouts, of plan files, and how good they were."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from datetime import datetime
from typing import cast

from machines.model.rollout import Target
from machines.states import CARRIES_CHANGE, Phase
from rolloutd.commands import submit
from rolloutd.commands.resolve import resolve_for_reading
from rolloutd.control import requests, rights
from rolloutd.control.forecasts import wire_forecasts
from rolloutd.control.formats import format_timestamp
from rolloutd.control.plans.handlers import read_plan
from rolloutd.control.plans.preview import DRAFT_ROLLOUT_ID, forecast_draft
from rolloutd.control.routes import Request, RouteTable, Services
from rolloutd.engine.tasks import compute, compute_over
from rolloutd.errors import NotFound, Refused
from rolloutd.forecast.request import Draft, ForecastRequest, WhatIf
from rolloutd.forecast.settings_changes import changed_limits, split_changes
from rolloutd.ports import KeptForecast

routes = RouteTable()


@routes.add("POST", "/v1/forecasts", access=rights.ANY_TEAM_MEMBER, is_heavy=True)
async def forecast_all(
    services: Services, request: Request[requests.ForecastOptions]
) -> wire_forecasts.Forecasts:
    """Forecast all open rollouts."""
    answers = await services.forecaster.ask(_request(services, request.input))
    return {"forecasts": [cast("wire_forecasts.Forecast", each) for each in answers]}


@routes.add("POST", "/v1/rollouts/{r}/forecast", access=rights.ANY_TEAM_MEMBER, is_heavy=True)
async def forecast_rollout(
    services: Services, request: Request[requests.ForecastOptions]
) -> wire_forecasts.Forecast:
    """Forecast a rollout: when each node starts and is back, and when each gate asks."""
    rollout = (await resolve_for_reading(services.state, request.path_params["r"])).rollout.id
    question = _request(services, request.input, rollouts=(rollout,))
    (answer,) = await services.forecaster.ask(question)
    if request.input.publish is not None:
        await services.forecaster.keep(answer, request.input.publish, question.now)
    return cast("wire_forecasts.Forecast", answer)


@routes.add("GET", "/v1/rollouts/{r}/forecast", is_shared=True)
async def latest_forecast(services: Services, request: Request) -> wire_forecasts.Forecast:
    """Show the latest forecast that the daemon has made of an open rollout."""
    rollout = (await resolve_for_reading(services.state, request.path_params["r"])).rollout.id
    answer = services.state.forecasts.get(rollout)
    if answer is None:
        failure = services.state.conditions.get("job forecast")
        raise Refused("no-forecast", f"{rollout}: no {failure or 'forecast yet; ask again in a minute'}")
    return cast("wire_forecasts.Forecast", answer)


@routes.add("POST", "/v1/plans/forecast", access=rights.ANY_TEAM_MEMBER, is_heavy=True)
async def forecast_plan(
    services: Services, request: Request[requests.PlanForecast]
) -> wire_forecasts.Forecast:
    """Forecast a plan as if it were submitted now."""
    body = request.input
    plan_file = await read_plan(body)
    resolved = await submit.resolve_plan(services.state, services.sources, plan_file, body.upload)
    draft = await compute(forecast_draft, resolved, request.identity, plan_file.content, services.state.now())
    (answer,) = await services.forecaster.ask(_request(services, body, draft=draft))
    assert draft.rollout.id == DRAFT_ROLLOUT_ID
    return cast("wire_forecasts.Forecast", answer)


@routes.add("GET", "/v1/forecasts/score")
async def score(services: Services, request: Request[requests.ScoreQuery]) -> wire_forecasts.Score:
    """Show how good the kept forecasts were."""
    state, rollout = services.state, request.input.rollout
    if rollout is not None:
        rollout = (await resolve_for_reading(state, rollout)).rollout.id
    scores: list[wire_forecasts.RolloutScore] = []
    every: list[tuple[float, bool]] = []
    targets: dict[str, Mapping[str, Target]] = {}
    for kept in await state.store.load_forecasts(rollout):
        if kept.rollout not in targets:
            targets[kept.rollout] = await _targets(services, kept.rollout)
        errors = await compute_over(len(kept.answer["nodes"]), _errors, kept, targets[kept.rollout])
        every += errors
        scores.append(
            {
                "rollout": kept.rollout,
                "made_at": format_timestamp(kept.made_at),
                "occasion": kept.occasion,
                "missed": kept.is_missed,
                **_figures(errors),
            }
        )
    return {"forecasts": scores, **_figures(every)}


def _request(
    services: Services,
    body: requests.ForecastOptions | requests.PlanForecast,
    rollouts: tuple[str, ...] = (),
    draft: Draft | None = None,
) -> ForecastRequest:
    state = services.state
    plan_changes, settings_changes = split_changes(body.sets)
    limits = None
    if settings_changes:
        limits = changed_limits(state.settings, settings_changes, state.index)
    what_if = WhatIf(
        limits,
        plan_changes,
        tuple(body.freezes),
        tuple(body.without),
        tuple(body.with_failure),
        None if body.at is None else body.at.timestamp(),
    )
    return services.forecaster.request(
        rollouts=rollouts,
        draft=draft,
        draws=body.draws,
        seed=body.seed,
        approve_after_s=None if body.approve_after_s == "never" else body.approve_after_s,
        failure_rate=body.failure_rate,
        what_if=what_if,
    )


async def _targets(services: Services, rollout: str) -> Mapping[str, Target]:
    index = services.state.index
    if rollout in index.rollouts:
        return {target.node: target for target in index.targets(rollout)}
    try:
        return {target.node: target for target in await services.state.store.load_targets(rollout)}
    except NotFound:
        return {}


def _errors(kept: KeptForecast, targets: Mapping[str, Target]) -> list[tuple[float, bool]]:
    """Return, of each forecast node that is back, its distance from p50 in seconds and if it came by p90."""
    errors = []
    for node in kept.answer["nodes"]:
        target = targets.get(node["node"])
        if target is None or target.phase is not Phase.DONE or target.outcome not in CARRIES_CHANGE:
            continue
        if target.since <= kept.made_at or node["ends_at"]["p50"] is None:
            continue
        p90 = node["ends_at"]["p90"]
        # Instants in answers are whole seconds.
        is_within = p90 is None or target.since < _instant(p90) + 1.0
        errors.append((abs(target.since - _instant(node["ends_at"]["p50"])), is_within))
    return errors


def _instant(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _figures(errors: list[tuple[float, bool]]) -> wire_forecasts.ScoreFigures:
    if not errors:
        return {"nodes": 0, "within_p90": None, "median_error_s": None}
    return {
        "nodes": len(errors),
        "within_p90": round(sum(is_within for _, is_within in errors) / len(errors), 4),
        "median_error_s": round(statistics.median(seconds for seconds, _ in errors), 1),
    }
