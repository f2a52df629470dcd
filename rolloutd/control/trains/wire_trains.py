"""Models of the API's responses about trains."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

TrainState = Literal["waiting", "active", "ended"]


class Train(TypedDict):
    """Rollouts that share the outage of a node, in the order of their changes.

    `missing` are those whose owners have not approved it; `outages_saved` counts the nodes that got a
    change in the outage of another, `outages_ahead` those that still may.
    """

    name: str
    rollouts: list[str]
    approved: bool
    missing: list[str]
    nodes_shared: int
    outages_saved: int
    outages_ahead: int
    state: TrainState
    wait_s: float
    by: str
    at: str


class Trains(TypedDict):
    trains: list[Train]


class RolloutTrain(TypedDict):
    """The train of a rollout; `rollouts` in order, `outages_saved` of this rollout alone.

    `missing` are those whose owners have not approved it.
    """

    name: str
    rollouts: list[str]
    state: TrainState
    missing: list[str]
    outages_saved: int
