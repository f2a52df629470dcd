"""The nodes of a rollout: where each stands, why, and what was done to it."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from rolloutd.control.wire.rollouts import Reason


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
    admitted_at: str | None


class Nodes(TypedDict):
    """The nodes of a rollout, in their order, as they are after audit entry `seq`."""

    nodes: list[Node]
    seq: int


class Failure(TypedDict):
    """How a node failed."""

    id: str
    attempt: int
    step: str
    message: str
    at: str


class Step(TypedDict):
    """One step of one attempt; `output` is null where it is another team's."""

    attempt: int
    step: str
    action: str
    number: int
    state: str
    began_at: str
    at: str
    text: str
    output: str | None


class NodeDetail(Node):
    """A node of a rollout with everything that was done to it."""

    steps: list[Step]
    failure: Failure | None


class Why(TypedDict):
    """Why a node does not move; null when it does, or has arrived."""

    node: str
    phase: str
    reason: Reason | None


class LogLine(TypedDict):
    """One line of a node's log; `offset` is where the next one begins."""

    offset: int
    at: str
    kind: str
    text: str
    attempt: NotRequired[int]
    step: NotRequired[str]
    fields: NotRequired[dict[str, Any]]
