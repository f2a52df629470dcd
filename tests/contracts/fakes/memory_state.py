"""The rows of the store in memory: a dict for each kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from machines.facts.apply import new_rollout
from machines.model.configuration import NodeConfiguration
from machines.model.events import (
    ArtifactsBuilt,
    RolloutOpened,
    TeamRulesChanged,
    VerdictCleared,
    VoteWithdrawn,
)
from machines.model.node import Node, NodeKind
from machines.model.plan import Plan
from machines.model.preparation import Preparation, PreparationState
from machines.model.reboots import RebootApproval
from machines.model.rollout import Failure, GateOpening, Hold, PilotEvidence, Rollout, Target, Verdict, Vote
from machines.model.rows import (
    ConfigurationDocument,
    Delete,
    Expected,
    NodeConnection,
    NodeRemoval,
    PreparationSnapshot,
    RolloutPart,
    RolloutRecords,
    RolloutRow,
    UsedToken,
    Write,
    with_part,
)
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.model.train import Train
from machines.model.windows import Freeze
from machines.states import IN_FLIGHT_PHASES
from rolloutd.errors import Conflict, TokenAlreadyUsed
from rolloutd.ports import AuditBase, AuditEntry, BusyTime, KeptForecast, SourceAnswer, StepDuration

Key = tuple[Any, ...]
R = TypeVar("R")

_KEYS: Mapping[type[Any], Callable[[Any, str], Key]] = {
    RolloutOpened: lambda row, _: (row.rollout,),
    Target: lambda row, _: (row.rollout, row.node),
    Vote: lambda row, rollout: (rollout, row.id),
    GateOpening: lambda row, rollout: (rollout, row.gate, row.wave),
    Failure: lambda row, rollout: (rollout, row.id),
    PilotEvidence: lambda _, rollout: (rollout,),
    ArtifactsBuilt: lambda row, _: (row.rollout, row.stage),
    RolloutRow: lambda row, _: (row.id,),
    Preparation: lambda row, _: (row.rollout, row.node, row.stage),
    StepRecord: lambda row, _: (row.rollout, row.node, row.attempt, row.step, row.action, row.number),
    Node: lambda row, _: (row.name,),
    NodeConnection: lambda row, _: (row.name,),
    NodeConfiguration: lambda _, node: (node,),
    ConfigurationDocument: lambda row, _: (row.content,),
    PreparationSnapshot: lambda row, _: (row.rollout, row.node, row.stage),
    Hold: lambda row, _: (row.node, row.source, row.id),
    Freeze: lambda row, _: (row.id,),
    Train: lambda row, _: (row.name,),
    RebootApproval: lambda row, _: (row.id,),
    TeamRulesChanged: lambda row, _: (row.rules.team,),
    UsedToken: lambda row, _: (row.id,),
    Verdict: lambda row, _: (row.id,),
}


@dataclass(slots=True)
class MemoryState:
    """What survives a restart."""

    epoch: int = 0
    entries: list[AuditEntry] = field(default_factory=list)
    rows: dict[type[Any], dict[Key, Any]] = field(default_factory=lambda: {kind: {} for kind in _KEYS})
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    answers: dict[str, SourceAnswer] = field(default_factory=dict)
    forecasts: dict[tuple[str, float], KeptForecast] = field(default_factory=dict)
    audit_base: AuditBase = AuditBase()  # frozen
    redaction_key: str = ""
    machines: set[str] = field(default_factory=set)
    clusters: set[str] = field(default_factory=set)
    """The names of nodes that are or were clusters."""

    def copy(self) -> MemoryState:
        """Return a copy to write on; the values in it never change."""
        rows = {kind: table.copy() for kind, table in self.rows.items()}
        own = (self.rollouts.copy(), self.answers.copy(), self.forecasts.copy())
        shared = (self.audit_base, self.redaction_key, self.machines, self.clusters)
        return MemoryState(self.epoch, self.entries.copy(), rows, *own, *shared)

    def get(self, kind: type[R], *key: Any) -> R | None:
        return cast(R | None, self.rows[kind].get(key))

    def all(self, kind: type[R]) -> Iterable[R]:
        return self.rows[kind].values()

    def work_on_clusters(self) -> dict[str, float]:
        """Return when the latest work on each cluster ended."""
        ended = [t for t in self.all(Target) if t.attempt and t.phase not in IN_FLIGHT_PHASES]
        ended.sort(key=lambda target: target.since)
        return {target.node: target.since for target in ended if target.node in self.clusters}

    def verdicts_on(self, node: str) -> Iterable[Verdict]:
        return [each for each in self.all(Verdict) if each.node == node]

    def is_deleted(self, rollout: str) -> bool:
        row = self.get(RolloutRow, rollout)
        return row is not None and row.deleted_at is not None

    def opened(self, rollout: str) -> RolloutOpened:
        return cast(RolloutOpened, self.rows[RolloutOpened][rollout,])

    def step_durations(self) -> Sequence[StepDuration]:
        """Return the durations of the steps and prepare stages that succeeded, the latest first."""
        steps, stages = self.all(StepRecord), self.all(Preparation)
        ended: list[Any] = [(row, row.step, row.action) for row in steps if row.state is StepState.OK]
        ended += [(row, row.stage, StepAction.RUN) for row in stages if row.state is PreparationState.DONE]
        ended.sort(key=lambda item: -item[0].at)
        found = []
        for row, name, action in ended:
            place = (row.rollout, self.opened(row.rollout).name, row.node, name, action)
            seconds = row.at - row.began_at - getattr(row, "waited_s", 0.0)
            found.append(StepDuration(*place, seconds, row.at, row.handle != ""))
        return found

    def busy_times(self, limit: int) -> Iterable[BusyTime]:
        """Yield how long traffic kept nodes from starting, by so many of the latest changes of phase."""
        entries = (json.loads(entry.text) for entry in reversed(self.entries))
        for move in [entry for entry in entries if entry["event"] == "PhaseMoved"][:limit]:
            if (busy_s := move["fields"]["busy_s"]) is not None:
                yield BusyTime(move["rollout"], self.opened(move["rollout"]).name, move["node"], busy_s)

    def apply(self, write: Write | Delete, compile_plan: Callable[[Mapping[str, Any]], Plan]) -> None:
        """Write a row; raises Conflict when there is one where none is expected."""
        row = write.row
        if isinstance(write, Delete) and isinstance(row, RolloutRecords):
            self._delete_records(row)
            return
        if isinstance(write, Delete):
            self.rows[type(row)].pop(_KEYS[type(row)](row, write.owner), None)
            return
        if isinstance(row, RolloutOpened):
            self._put(row, write)
            self.rows[RolloutRow][row.rollout,] = RolloutRow(row.rollout)
            self.rollouts[row.rollout] = new_rollout(row, compile_plan(row.content))
        elif isinstance(row, VerdictCleared):
            del self.rows[Verdict][row.verdict,]
        elif isinstance(row, NodeRemoval):
            del self.rows[Node][row.name,]
        elif isinstance(row, VoteWithdrawn):
            cast_vote = self.rows[Vote][row.rollout, row.vote]
            self.rows[Vote][row.rollout, row.vote] = replace(cast_vote, withdrawn_at=row.at)
        else:
            self._put(row, write)
        if isinstance(row, RolloutPart):
            self.rollouts[write.owner] = with_part(self.rollouts[write.owner], row)

    def _delete_records(self, records: RolloutRecords) -> None:
        rollout, nodes = records.rollout, records.nodes
        for kind in (StepRecord, Preparation, PreparationSnapshot, Target):
            table = self.rows[kind]
            for key in [key for key in table if key[0] == rollout and (not nodes or key[1] in nodes)]:
                del table[key]
        for key, failure in [*self.rows[Failure].items()]:
            if key[0] == rollout and (not nodes or failure.node in nodes):
                del self.rows[Failure][key]
        if rollout in self.rollouts:
            kept = self.rollouts[rollout]
            failures = tuple(each for each in kept.failures if nodes and each.node not in nodes)
            self.rollouts[rollout] = replace(kept, failures=failures)
        if not nodes:
            self.rollouts.pop(rollout, None)
            for kind in (RolloutOpened, RolloutRow, Vote, GateOpening, PilotEvidence, ArtifactsBuilt):
                for key in [key for key in self.rows[kind] if key[0] == rollout]:
                    del self.rows[kind][key]

    def _put(self, row: Any, write: Write) -> None:
        table, key = self.rows[type(row)], _KEYS[type(row)](row, write.owner)
        if write.expected is Expected.ABSENT and key in table:
            conflict = TokenAlreadyUsed if isinstance(row, UsedToken) else Conflict
            raise conflict(f"there is a {type(row).__name__} {key} already")
        if isinstance(row, StepRecord) and (row.rollout, row.node) not in self.rows[Target]:
            raise Conflict(f"{row.node} is not a target of {row.rollout}")
        table[key] = row
        if isinstance(row, Node) and row.kind is NodeKind.CLUSTER:
            self.clusters.add(row.name)
