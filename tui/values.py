"""What the model keeps: nodes, pools and rollouts, and how answers become them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from rolloutd.control import wire
from tui import slices

BUSY = frozenset({"isolating", "maintaining", "verifying"})
"""Phases in which a node takes its slots because of us."""

CLOSED = frozenset({"done", "cancelled"})

KEPT_ENDS = 512
"""Ends of nodes kept per rollout to say how many an hour: more than ten minutes of most fleets."""


def instant(text: str | None) -> float | None:
    """Return the epoch seconds of an instant of the wire."""
    return None if text is None else datetime.fromisoformat(text).timestamp()


@dataclass(slots=True)
class NodeState:
    """A node of a rollout, as the last answer and the events after it have it."""

    node: str
    team: str | None
    pools: tuple[str, ...]
    wave: str
    phase: str
    outcome: str | None = None
    attempt: int = 0
    isolated: bool = False
    since: float | None = None
    admitted_at: float | None = None
    reason: wire.Reason | None = None
    failure: str = ""


@dataclass(slots=True)
class Work:
    """A node in flight and what it does this moment."""

    node: str
    pools: tuple[str, ...]
    phase: str
    since: float
    step: str = ""
    percent: float | None = None
    task: str = ""
    began: float | None = None


@dataclass(slots=True)
class PoolState:
    """One pool of a rollout; `nodes` are its targets, in their order, once they are known."""

    pool: str
    total: int
    done: int
    failed: int
    in_flight: int
    down: int
    max_unavailable: int
    nodes: list[NodeState] = field(default_factory=list)
    version: int = 0


@dataclass(slots=True)
class RolloutState:
    """A rollout: the daemon's last word on it, and the counts that events have moved since."""

    id: str
    status: wire.Rollout
    seq: int
    counts: dict[str, int] = field(default_factory=dict)
    in_flight: dict[str, Work] = field(default_factory=dict)
    pools: dict[str, PoolState] = field(default_factory=dict)
    nodes: dict[str, NodeState] | None = None
    nodes_seq: int = -1
    ends: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_ENDS))
    version: int = 0

    @property
    def state(self) -> str:
        """The daemon's word for how it stands."""
        return self.status["state"]

    @property
    def is_closed(self) -> bool:
        """Whether nothing more will happen in it."""
        return self.status["state"] in CLOSED

    @property
    def percent(self) -> float:
        """How far it has come, 0 to 100, counted as the daemon counts."""
        wanted = self.counts["total"] - self.counts["skipped"]
        if wanted > 0:
            return 100.0 * self.counts["done"] / wanted
        return 100.0 if self.state == "done" else 0.0


@dataclass(frozen=True, slots=True)
class NodesAnswer:
    """The nodes of a rollout, ready to be kept; the model changes them from then on."""

    nodes: dict[str, NodeState]
    seq: int


def nodes_of(text: str) -> NodesAnswer:
    """Return the nodes of an answer, which is wire.Nodes, as they are kept."""
    seen: dict[Any, Any] = {}
    answer = slices.decoded(text, "nodes", lambda each: _node_of(each, seen))
    return NodesAnswer({each.node: each for each in answer["nodes"]}, answer["seq"])


def _node_of(each: wire.Node, seen: dict[Any, Any]) -> NodeState:
    """Return a node; `seen` are pools and reasons that nodes share, of which one is kept for all."""
    pools, reason = tuple(each["pools"]), each["reason"]
    if reason is not None:
        reason = seen.setdefault(tuple(reason.values()), reason)
    return NodeState(
        node=each["node"],
        team=each["team"],
        pools=seen.setdefault(pools, pools),
        wave=each["wave"],
        phase=each["phase"],
        outcome=each["outcome"],
        attempt=each["attempt"],
        isolated=each["isolated"],
        since=instant(each["since"]),
        admitted_at=instant(each["admitted_at"]),
        reason=reason,
        failure=_failure(each["node"], reason["text"]) if reason and each["phase"] == "failed" else "",
    )


def _failure(node: str, text: str) -> str:
    """Return how a node failed, without saying again which node it is."""
    return text.removeprefix(f"{node} failed in ")


def pool_of(told: wire.Pool) -> PoolState:
    """Make a pool of what the daemon told; a newer one may tell more than we know of."""
    return PoolState(
        told["pool"],
        told["total"],
        told["done"],
        told["failed"],
        told["in_flight"],
        told["down"],
        told["max_unavailable"],
    )


def work_of(each: Mapping[str, Any]) -> Work:
    return Work(
        node=each["node"],
        pools=tuple(each["pools"]),
        phase=each["phase"],
        since=instant(each["since"]) or 0.0,
        step=each["step"] or "",
        percent=each["percent"],
        task=each["task"] or "",
    )
