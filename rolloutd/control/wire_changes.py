"""JSON shapes of the matrix of changes and nodes."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

ChangeState = Literal["done", "drifted", "in-flight", "pending", "failed", "skipped", "never"]


class NodeChange(TypedDict):
    """A node and whether it has the change; `never`: no rollout brought it there or will."""

    node: str
    state: ChangeState


class GroupChange(TypedDict):
    """How far a change is in a pool, team, site or cluster; `total` counts all known nodes."""

    group: str
    total: int
    done: int
    percent: float


class Change(TypedDict):
    """A plan's name and the hash of what it does; `rollouts` are those that bring it, latest first."""

    plan: str
    change: str
    rollouts: list[str]
    percent: float
    nodes: list[NodeChange]
    groups: list[GroupChange]
    never: list[str]


class Changes(TypedDict):
    """All changes, latest first."""

    changes: list[Change]
