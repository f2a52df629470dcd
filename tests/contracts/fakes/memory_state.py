"""The rows of the store in memory, and what events of the fleet do to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, assert_never

from machines.model.configuration import NodeConfiguration
from machines.model.events import (
    DaemonStarted,
    FreezeLifted,
    FreezeStarted,
    HoldReleased,
    HoldTaken,
    MismatchSettled,
    NodesDiscovered,
    NodesRemoved,
    RecordOnlyEvent,
    RolloutOpened,
    StepRecord,
    TeamRulesChanged,
)
from machines.model.limits import TeamRules
from machines.model.node import Node
from machines.model.preparation import Preparation
from machines.model.rollout import Hold, Rollout, Target
from machines.model.verdict import Verdict
from machines.model.windows import Freeze
from rolloutd.errors import Conflict
from rolloutd.ports import JSON, AuditEntry, SourceAnswer


@dataclass(slots=True)
class MemoryState:
    """What survives a restart."""

    epoch: int = 0
    entries: list[AuditEntry] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    connections: dict[str, Mapping[str, JSON]] = field(default_factory=dict)
    opened_events: dict[str, RolloutOpened] = field(default_factory=dict)
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    targets: dict[tuple[str, str], Target] = field(default_factory=dict)
    steps: dict[tuple[Any, ...], StepRecord] = field(default_factory=dict)
    holds: dict[tuple[str, str, str], Hold] = field(default_factory=dict)
    freezes: dict[str, Freeze] = field(default_factory=dict)
    team_rules: dict[str, TeamRules] = field(default_factory=dict)
    used_tokens: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)
    preparations: dict[tuple[str, str, str], Preparation] = field(default_factory=dict)
    answers: dict[str, SourceAnswer] = field(default_factory=dict)
    configurations: dict[str, NodeConfiguration] = field(default_factory=dict)
    documents: dict[str, Mapping[str, JSON]] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    def copy(self) -> MemoryState:
        """Return a copy to write on; the values in it never change."""
        copied = {name: getattr(self, name).copy() for name in self.__slots__ if name != "epoch"}
        return MemoryState(self.epoch, **copied)


def apply_to_fleet(
    memory: MemoryState,
    event: NodesDiscovered
    | NodesRemoved
    | HoldTaken
    | HoldReleased
    | FreezeStarted
    | FreezeLifted
    | TeamRulesChanged
    | DaemonStarted
    | RecordOnlyEvent,
) -> None:
    match event:
        case NodesDiscovered():
            for node in event.nodes:
                memory.nodes[node.name] = node
                before = memory.connections.get(node.name, {})
                memory.connections[node.name] = event.connections.get(node.name, before)
        case NodesRemoved():
            for name in event.names:
                memory.nodes.pop(name, None)
        case HoldTaken():
            hold = event.hold
            memory.holds[hold.node, hold.source, hold.id] = hold
        case HoldReleased():
            key = (event.node, event.source, event.id)
            require(key not in memory.holds, f"there is no hold {event.id}")
            del memory.holds[key]
        case FreezeStarted():
            require(event.freeze.id in memory.freezes, f"there is a freeze {event.freeze.id} already")
            memory.freezes[event.freeze.id] = event.freeze
        case FreezeLifted():
            require(event.freeze not in memory.freezes, f"there is no freeze {event.freeze}")
            del memory.freezes[event.freeze]
        case TeamRulesChanged():
            memory.team_rules[event.rules.team] = event.rules
        case MismatchSettled():
            pass
        case _ if isinstance(event, DaemonStarted | RecordOnlyEvent):
            pass
        case _:
            assert_never(event)


def require(wrong: bool, text: str) -> None:
    if wrong:
        raise Conflict(text)
