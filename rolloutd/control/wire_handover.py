"""JSON shapes of the comparison with canaries and of the handover."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from rolloutd.control.wire import AuditEntry, Reason, RolloutState


class ComparedNode(TypedDict):
    """A node against the canaries: its seconds so far, its changed tasks, and what is unlike them.

    `time` is `slower` or `faster` than all canaries by half or more; `changed_tasks` is null without a log.
    `extra_tasks` changed on no canary, `missing_tasks` on every canary and not here.
    """

    node: str
    wave: str
    phase: str
    seconds: float
    time: Literal["usual", "slower", "faster"]
    changed_tasks: list[str] | None
    extra_tasks: list[str]
    missing_tasks: list[str]


class Comparison(TypedDict):
    """The canaries' times and changed tasks, and the nodes of now against them, outliers first."""

    rollout: str
    canary_wave: str
    canaries: list[ComparedNode]
    low_s: float | None
    high_s: float | None
    nodes: list[ComparedNode]
    omitted: int


class MissingVotes(TypedDict):
    """A gate that waits, and the votes it still needs."""

    gate: str
    wave: str | None
    missing: str


class HandoverRollout(TypedDict):
    """A rollout that changed since an instant, or waits: what happened, and what it waits for.

    `changed` counts the nodes that were changed since then; `failed` are those that failed and still are.
    """

    rollout: str
    plan: str
    state: RolloutState
    percent: float
    opened: bool
    ended: bool
    changed: int
    failed: list[str]
    reason: Reason | None
    gates: list[MissingVotes]


class Handover(TypedDict):
    """What happened since an instant, who decided, and what waits; `omitted`: some decisions are left out."""

    since: str
    until: str
    rollouts: list[HandoverRollout]
    decisions: list[AuditEntry]
    omitted: bool
