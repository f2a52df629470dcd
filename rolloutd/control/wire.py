"""The shapes of the API's JSON, as types.

Instants are RFC 3339 UTC strings, percent is a number from 0 to 100, absent is
null.  Nothing but the standard library is imported here: the command line and
the console read these shapes and must start quickly.  The OpenAPI document is
generated from these same types by the server.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

RolloutState = Literal["awaiting-approval", "running", "soaking", "paused", "done", "cancelled"]
GateState = Literal["not-asked", "waiting", "open", "rejected"]


class Reason(TypedDict):
    """Why something does not move."""

    code: str
    text: str
    since: str | None
    lifted_by: str


class Need(TypedDict):
    """How many votes are wanted and there."""

    want: int
    have: int


class TeamNeed(TypedDict):
    """How many votes of one team are wanted and there."""

    team: str
    want: int
    have: int


class Needs(TypedDict):
    """What a gate still needs."""

    owner: Need
    teams: list[TeamNeed]


class Vote(TypedDict):
    """One person's yes or no."""

    id: str
    by: str
    uid: int | None
    yes: bool
    teams: list[str]
    reason: str
    at: str
    digest: str
    withdrawn: str | None
    counts: bool


class Gate(TypedDict):
    """A gate as it stands."""

    gate: str
    wave: str
    team: str | None
    state: GateState
    needs: Needs
    votes: list[Vote]
    missing: str


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
    """One pool of a rollout; `down` counts all its nodes, targets or not."""

    pool: str
    total: int
    done: int
    failed: int
    in_flight: int
    down: int
    max_unavailable: int


class Rollout(TypedDict):
    """A rollout as `status` shows it."""

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
    not_looked_at: list[str]


class Status(TypedDict):
    """All rollouts, and what holds the whole daemon back if anything does."""

    rollouts: list[Rollout]
    trouble: str | None


class Node(TypedDict):
    """A node of a rollout, as `nodes` shows it."""

    node: str
    team: str | None
    pools: list[str]
    phase: str
    wave: str
    outcome: str | None
    attempt: int
    isolated: bool
    since: str | None
    step: str | None
    percent: float | None
    reason: Reason | None


class Mistake(TypedDict):
    """One mistake in a plan."""

    file: str
    line: int
    column: int
    path: str
    found: str
    allowed: str
    message: str


class Validation(TypedDict):
    """What `plan validate` says."""

    valid: bool
    errors: list[Mistake]


class Submission(TypedDict):
    """What `plan submit` says; `existing` when the same digest was there already."""

    rollout: str
    digest: str
    state: RolloutState
    existing: bool


class Lock(TypedDict):
    """One holder of one pool's slot, or an empty pool."""

    pool: str
    max_unavailable: int
    members: int
    down: int
    holders: list[dict[str, Any]]


class AuditEntry(TypedDict):
    """One audit entry; `entry` is what was hashed, parsed."""

    seq: int
    hash: str
    entry: dict[str, Any]


class Error(TypedDict):
    """Why a request was not carried out."""

    error: str
    code: str
    errors: list[Mistake]
