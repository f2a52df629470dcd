"""Nodes, pools and rollouts as the model keeps them, and how responses are parsed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime

from rolloutd.control.nodes import wire_nodes
from rolloutd.control.rollouts import wire

BUSY_PHASES = frozenset({"isolating", "maintaining", "verifying"})

CLOSED_STATES = frozenset({"done", "cancelled"})

COUNTER_BY_OUTCOME = {
    "changed": "done",
    "already-current": "done",
    "skipped": "skipped",
    "rolled-back": "skipped",
}
"""The counter of a done node by outcome; a node that left is in none."""

MAX_RECENT_COMPLETIONS = 512
"""Completions kept per rollout for the hourly rate: more than ten minutes of most fleets."""


def parse_timestamp(text: str | None) -> float | None:
    """Return the epoch seconds of an RFC 3339 timestamp."""
    return None if text is None else datetime.fromisoformat(text).timestamp()


@dataclass(slots=True)
class NodeState:
    """A node of a rollout, from the response after audit entry `seq`."""

    node: str
    seq: int
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
    waiting_key: str = ""
    failure: str = ""


@dataclass(slots=True)
class PoolState:
    """A pool of a rollout; `nodes` are its targets in order, empty until they are fetched.

    `other_down` counts slots that other causes use: holds, other rollouts, unhealthy nodes.
    """

    pool: str
    total: int
    done: int
    failed: int
    skipped: int
    in_flight: int
    other_down: int
    max_unavailable: int
    nodes: list[NodeState] = field(default_factory=list)
    version: int = 0

    @property
    def wanted(self) -> int:
        """The nodes that are to get the change."""
        return self.total - self.skipped

    @property
    def used(self) -> int:
        """The slots in use, by this rollout or by other causes."""
        return self.in_flight + self.failed + self.other_down


@dataclass(slots=True)
class RolloutState:
    """A rollout: its status after audit entry `seq`, and its nodes after `nodes_seq` if they are tracked.

    `version` changes with the nodes.
    """

    id: str
    status: wire.Rollout
    seq: int
    in_flight: dict[str, wire.InFlight] = field(default_factory=dict)
    pools: dict[str, PoolState] = field(default_factory=dict)
    nodes: dict[str, NodeState] | None = None
    nodes_seq: int = -1
    node_deadlines: frozenset[float] = frozenset()
    recent_completions: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_RECENT_COMPLETIONS))
    version: int = 0

    @property
    def state(self) -> str:
        return self.status["state"]

    @property
    def is_closed(self) -> bool:
        return self.state in CLOSED_STATES

    @property
    def wanted(self) -> int:
        """The nodes that are to get the change: they count towards 100 percent."""
        return self.status["total"] - self.status["skipped"]


@dataclass(frozen=True, slots=True)
class NodesSnapshot:
    """The parsed nodes of a rollout after audit entry `seq` or later; the model takes them."""

    nodes: dict[str, NodeState]
    seq: int
    deadlines: frozenset[float]
    """When time ends the reasons of its nodes, in epoch seconds."""


def parse_nodes(pages: Iterable[wire_nodes.Nodes], delay: Callable[[], float] = lambda: 0.0) -> NodesSnapshot:
    """Parse the pages of a rollout's nodes; before each node, sleep for the delay."""
    # Thousands of nodes share few pools and reasons; one copy of each saves tens of MiB.
    pools: dict[tuple[str, ...], tuple[str, ...]] = {}
    reasons: dict[tuple[str | None, ...], tuple[wire.Reason, str]] = {}
    nodes: dict[str, NodeState] = {}
    first_seq: int | None = None
    for page in pages:
        first_seq = page["seq"] if first_seq is None else first_seq
        for each in page["nodes"]:
            if pause := delay():
                time.sleep(pause)
            nodes[each["node"]] = _parse_node(each, page["seq"], pools, reasons)
    ends = (parse_timestamp(remedy_deadline(reason)) for reason, _ in reasons.values())
    return NodesSnapshot(nodes, first_seq or 0, frozenset(at for at in ends if at is not None))


def _parse_node(
    each: wire_nodes.Node,
    seq: int,
    shared_pools: dict[tuple[str, ...], tuple[str, ...]],
    shared_reasons: dict[tuple[str | None, ...], tuple[wire.Reason, str]],
) -> NodeState:
    pools, reason, waiting_key = tuple(each["pools"]), each["reason"], ""
    if reason is not None:
        identity = (reason["code"], reason["text"], reason["since"], reason["lifted_by"])
        if identity not in shared_reasons:
            shared_reasons[identity] = (reason, reason_key(reason))
        reason, waiting_key = shared_reasons[identity]
    return NodeState(
        node=each["node"],
        seq=seq,
        team=each["team"],
        pools=shared_pools.setdefault(pools, pools),
        wave=each["wave"],
        phase=each["phase"],
        outcome=each["outcome"],
        attempt=each["attempt"],
        isolated=each["isolated"],
        since=parse_timestamp(each["since"]),
        admitted_at=parse_timestamp(each.get("admitted_at")),
        reason=reason,
        waiting_key=waiting_key,
        failure=_failure_text(reason) if reason and reason["code"] == "failed" else "",
    )


def _failure_text(reason: wire.Reason) -> str:
    """Return how a node failed, without its name."""
    params = reason["params"]
    return f"{params['step']}: {params['message']}" if params else reason["text"]


def reason_key(reason: wire.Reason) -> str:
    return f"{reason['code']} {reason['subject']} {reason['params']!r}"


def remedy_deadline(reason: wire.Reason) -> str | None:
    """Return when time ends a reason at the latest, in RFC 3339."""
    remedy = reason["remedy"]
    return None if remedy is None else remedy["until"]


def parse_pool(pool: wire.Pool) -> PoolState:
    own = pool["in_flight"] + pool["failed"]
    return PoolState(
        pool=pool["pool"],
        total=pool["total"],
        done=pool["done"],
        failed=pool["failed"],
        skipped=pool["skipped"],
        in_flight=pool["in_flight"],
        # An unobserved node may be up: it uses no slot yet.
        other_down=max(0, pool["down"] - pool["unobserved"] - own),
        max_unavailable=pool["max_unavailable"],
    )
