"""A rollout as it stands, and what of it is in flight."""

from __future__ import annotations

from typing import Literal, TypedDict

from rolloutd.control.wire.gates import Gate

RolloutState = Literal["awaiting-approval", "running", "soaking", "paused", "done", "cancelled"]


class Reason(TypedDict):
    """Why something does not move."""

    code: str
    text: str
    since: str | None
    lifted_by: str | None


class InFlight(TypedDict):
    """A node that rolloutd is working on."""

    node: str
    pools: list[str]
    phase: str
    step: str | None
    percent: float | None
    task: str | None
    since: str


class Pool(TypedDict):
    """One pool of a rollout; `down` counts all its nodes, targets or not; `unseen`, not looked at lately."""

    pool: str
    total: int
    done: int
    failed: int
    in_flight: int
    down: int
    unseen: int
    max_unavailable: int


class Rollout(TypedDict):
    """A rollout as `status` shows it; `expected_s` is how long a node of it usually takes."""

    rollout: str
    plan: str
    digest: str
    state: RolloutState
    wave: str | None
    percent: float
    total: int
    done: int
    failed: int
    skipped: int
    pending: int
    in_flight: list[InFlight]
    pools: list[Pool]
    gates: list[Gate]
    reason: Reason | None
    eta: str | None
    submitted_by: str
    submitted_at: str
    looked_at: list[str]
    not_looked_at: list[str]
    owner: str
    expected_s: float


class Status(TypedDict):
    """All rollouts, and what holds the whole daemon back if anything does.

    `seq` is the audit entry up to which this is told: the event stream goes on after it.
    """

    rollouts: list[Rollout]
    trouble: str | None
    seq: int


class RolloutLine(TypedDict):
    """A rollout in a list."""

    rollout: str
    plan: str
    digest: str
    state: RolloutState
    percent: float
    submitted_by: str
    submitted_at: str
    ended_at: str | None


class Rollouts(TypedDict):
    """All rollouts, the latest first."""

    rollouts: list[RolloutLine]


class Deleted(TypedDict):
    """A closed rollout that is no longer listed."""

    rollout: str
