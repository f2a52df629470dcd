"""Answers about forecasts."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict

from rolloutd.control.rollouts import wire


class NodeForecast(TypedDict):
    """When a node starts and is back in service; `waits` are seconds by reason code before it starts."""

    node: str
    team: str | None
    starts_at: wire.Instants
    ends_at: wire.Instants
    waits: dict[str, float]


class GroupForecast(TypedDict):
    """When the first node of a pool, a team or a wave starts and the last one is back."""

    name: str
    nodes: int
    starts_at: wire.Instants
    ends_at: wire.Instants


class GateForecast(TypedDict):
    """When a gate asks for votes."""

    gate: str
    wave: str | None
    asked_at: wire.Instants


class ForecastDifference(TypedDict):
    """How many seconds later the changed forecast ends; negative is earlier."""

    ends_at_s: wire.Seconds


class ForecastBody(TypedDict):
    """What lies ahead of a rollout: `nodes` has those that are not done, in their order.

    `draws` and `seed` make it repeatable.  `work_s` is from `made_at` to `ends_at`.  `stays_open`: it does
    not end then, because its plan keeps checking for drift.
    """

    rollout: str
    made_at: str
    draws: int
    seed: int
    assumptions: list[wire.AssumptionText]
    ends_at: wire.Instants
    work_s: wire.Seconds
    stays_open: bool
    nodes: list[NodeForecast]
    pools: list[GroupForecast]
    teams: list[GroupForecast]
    waves: list[GroupForecast]
    gates: list[GateForecast]
    waits: dict[str, float]
    bottleneck: wire.Bottleneck | None
    train: wire.TrainForecast | None
    vote_deadline: wire.VoteDeadline | None


class Forecast(ForecastBody):
    """A forecast, and with what-if the same with the changes."""

    changed: NotRequired[ForecastBody]
    difference: NotRequired[ForecastDifference]


class Forecasts(TypedDict):
    """The forecasts of all open rollouts."""

    forecasts: list[Forecast]


class ScoreFigures(TypedDict):
    """How good forecasts were, over the nodes that have come back since; null without any.

    `within_p90` is their share; `median_error_s` is of the distance from p50 to what came.
    """

    nodes: int
    within_p90: float | None
    median_error_s: float | None


class RolloutScore(ScoreFigures):
    """How good a kept forecast was; `missed`: the daemon has reported that its p90 is over."""

    rollout: str
    made_at: str
    occasion: str
    missed: bool


class Score(ScoreFigures):
    """How good the kept forecasts were, each by itself and all together."""

    forecasts: list[RolloutScore]
