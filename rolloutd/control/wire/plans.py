"""Plans: their mistakes, what they would do, what was submitted."""

from __future__ import annotations

from typing import Any, TypedDict

from rolloutd.control.wire.rollouts import Reason, RolloutState


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


class Hashes(TypedDict):
    """The hashes of a plan's three parts, and of the whole: the digest."""

    change: str
    scope: str
    policy: str
    whole: str


class PlanContent(TypedDict):
    """A rollout's plan in its canonical form, what was pinned for it, and its hashes."""

    content: dict[str, Any]
    source: dict[str, str]
    digest: str
    hashes: Hashes


class PreviewTarget(TypedDict):
    """A node that the plan would change; `cannot_start` says why it could not now."""

    node: str
    team: str | None
    pools: list[str]
    wave: str
    position: int
    cannot_start: Reason | None


class PreviewWave(TypedDict):
    """A wave and its nodes, in order."""

    wave: str
    nodes: list[str]
    max_parallel: int | None
    soak_s: float
    gate: str | None


class PreviewPool(TypedDict):
    """A pool that targets of the plan are in; `members` counts all known nodes."""

    pool: str
    targets: int
    members: int
    max_unavailable: int


class Answerers(TypedDict):
    """Who may answer at a gate: the owners, and the members of each team that owns a target."""

    owner: list[str]
    teams: dict[str, list[str]]


class PreviewNeeds(TypedDict):
    """How many votes a gate wants."""

    owner: int
    each_team: int
    four_eyes: bool


class PreviewGate(TypedDict):
    """A gate and who may answer it."""

    gate: str
    needs: PreviewNeeds
    answerable_by: Answerers


class Preview(TypedDict):
    """What a plan would do, without opening a rollout."""

    targets: list[PreviewTarget]
    waves: list[PreviewWave]
    pools: list[PreviewPool]
    gates: list[PreviewGate]
    looked_at: list[str]
    not_looked_at: list[str]
    digest: str
    hashes: Hashes
    warnings: list[str]


class Upload(TypedDict):
    """The content hash of an uploaded tree."""

    upload: str
