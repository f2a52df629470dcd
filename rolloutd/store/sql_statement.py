"""What a transaction writes: SQL with the number of rows that it must change, or a change of one target."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from machines.model.events import TargetEvent
from machines.model.node import Conflict as NodeConflict
from machines.model.rollout import Actor
from rolloutd.audit_chain import canonical_json
from rolloutd.errors import Conflict


@dataclass(frozen=True, slots=True)
class Statement:
    """SQL with its rows; `conflict` is raised unless `expected_changes` rows change (None: any number)."""

    sql: str
    rows: Sequence[Sequence[Any]]
    expected_changes: int | None = None
    conflict_message: str = ""
    conflict: type[Conflict] = Conflict


@dataclass(frozen=True, slots=True)
class TargetChange:
    """An event that changes one target: the writer applies it to the row that it reads."""

    rollout: str
    node: str
    event: TargetEvent


def encode_actor(actor: Actor | None) -> str | None:
    return (
        None if actor is None else canonical_json({"kind": actor.kind, "name": actor.name, "uid": actor.uid})
    )


def encode_list(values: Iterable[str]) -> str:
    return canonical_json(list(values))


def encode_conflicts(conflicts: Iterable[NodeConflict]) -> str:
    return canonical_json(
        [
            {"kind": each.kind, "about": each.about, "values": dict(each.values), "since": each.since}
            for each in conflicts
        ]
    )
