"""Rows: what events write, as values; the facts in memory and each store keep the same ones.

Most rows are values of the model or, where an event is itself the record of what happened, the event.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Any, Protocol, TypeVar

from machines.model import events
from machines.model.configuration import NodeConfiguration
from machines.model.node import Node
from machines.model.preparation import Preparation
from machines.model.reboots import RebootApproval
from machines.model.rollout import (
    Failure,
    GateOpening,
    Hold,
    Interruption,
    PilotEvidence,
    Rollout,
    Target,
    Verdict,
    Vote,
)
from machines.model.step_record import StepRecord
from machines.model.train import Train
from machines.model.windows import Freeze


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """What changes of a rollout after its submit, apart from its votes, gates and failures."""

    id: str
    amendments: int = 0
    paused: Interruption | None = None
    cancelled: Interruption | None = None
    ended_at: float | None = None
    deleted_at: float | None = None

    @property
    def closed(self) -> bool:
        return self.cancelled is not None or self.ended_at is not None


@dataclass(frozen=True, slots=True)
class NodeConnection:
    """A node's variables, without secrets."""

    name: str
    connection: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class NodeRemoval:
    """The end of a node's place in the inventory; stores keep its connection."""

    name: str
    gone_at: float


@dataclass(frozen=True, slots=True)
class PreparationSnapshot:
    """A node before a prepare stage; large, so that stores keep it apart from the stage's row."""

    rollout: str
    node: str
    stage: str
    before: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ConfigurationDocument:
    """What a run gives to a node, without secrets, by its hash."""

    content: str
    document: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class UsedToken:
    """A vote token of a service; it counts once."""

    id: str
    used_at: float


@dataclass(frozen=True, slots=True)
class RolloutRecords:
    """All rows of these nodes in a rollout; without nodes, all other rows of it."""

    rollout: str
    nodes: tuple[str, ...]


RolloutAddition = Vote | GateOpening | Failure | PilotEvidence | events.ArtifactsBuilt
"""Rows that a rollout gets after its submit, one by one."""

RolloutPart = RolloutAddition | events.VoteWithdrawn | RolloutRow
"""Rows that are part of a rollout's value: see with_part() and find_part()."""

StoreRow = (
    StepRecord
    | PreparationSnapshot
    | NodeConnection
    | NodeConfiguration
    | ConfigurationDocument
    | UsedToken
    | Verdict
    | events.VerdictCleared
    | RolloutRecords
)
"""Rows that no decision reads: stores keep them, the facts in memory do not."""

Row = (
    events.RolloutOpened
    | RolloutPart
    | Target
    | Preparation
    | Node
    | NodeRemoval
    | Hold
    | Freeze
    | Train
    | RebootApproval
    | events.TeamRulesChanged
    | StoreRow
)


class Expected(Enum):
    """Whether a row must be there before a write; what is in it was read in the same transaction."""

    ABSENT = "absent"
    PRESENT = "present"
    ANY = "any"


@dataclass(frozen=True, slots=True)
class Write:
    """A row that is written.

    `owner` is the rollout of its part, or the node of its configurations: not all of these rows name it.
    """

    row: Row
    expected: Expected = Expected.ABSENT
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Delete:
    """A row that is removed, if it is there; `owner` as for Write."""

    row: Hold | Freeze | Train | RebootApproval | StoreRow
    owner: str = ""


R = TypeVar("R")


class RowReader(Protocol):
    """Where an event finds the rows that it changes: the facts in memory, or the transaction of a store."""

    def get(self, kind: type[R], *key: Any) -> R | None:
        """Return a row by its key; None when there is none, or this reader does not keep the kind."""

    def verdicts_on(self, node: str) -> Iterable[Verdict]:
        """Return the verdicts on a node that are not cleared."""


def with_part(rollout: Rollout, row: RolloutPart) -> Rollout:
    match row:
        case Failure():
            return replace(rollout, failures=(*rollout.failures, row))
        case RolloutRow():
            return replace(
                rollout,
                amendments=row.amendments,
                paused=row.paused,
                cancelled=row.cancelled,
                ended_at=row.ended_at,
            )
        case Vote():
            return replace(rollout, votes=(*rollout.votes, row))
        case events.VoteWithdrawn():
            votes = (replace(v, withdrawn_at=row.at) if v.id == row.vote else v for v in rollout.votes)
            return replace(rollout, votes=tuple(votes))
        case GateOpening():
            return replace(rollout, opened=(*rollout.opened, row))
        case PilotEvidence():
            return replace(rollout, pilot_evidence=row)
        case events.ArtifactsBuilt():
            return replace(rollout, built={**rollout.built, row.stage: row.manifest})


def find_part(rollout: Rollout, kind: type[Any], *key: Any) -> RolloutPart | None:
    """Return a part of a rollout by its key in it, of the kinds that an event changes."""
    # Made from the value, because nothing but the value is kept: a second copy could differ from it.
    if kind is RolloutRow:
        return RolloutRow(rollout.id, rollout.amendments, rollout.paused, rollout.cancelled, rollout.ended_at)
    return next((vote for vote in rollout.votes if vote.id == key[0]), None) if kind is Vote else None


# -- rows that the audit does not account for ----------------------------------------


class MismatchKind(StrEnum):
    NOT_COMPARED = "not-compared"
    """The audit was not compared with the tables yet since the start."""
    EXTRA = "extra"
    """The table has a row that no entry made."""
    MISSING = "missing"
    """The table lacks a row that an entry made."""
    ALTERED = "altered"
    """The row differs from what the entries made of it."""


@dataclass(frozen=True, slots=True)
class AuditMismatch:
    """One such row; `subject` names it, `columns` those that differ.

    `scope` is what must not start: `all`, `rollout/ID`, `node/NAME` or `team/NAME`.  `node` is the node of
    that rollout whose own records are doubtful: its driver waits too.
    """

    subject: str
    kind: MismatchKind
    scope: str
    columns: tuple[str, ...] = ()
    node: str | None = None


NOT_COMPARED = AuditMismatch("audit", MismatchKind.NOT_COMPARED, "all")
"""In effect from a daemon's start until its first comparison."""
