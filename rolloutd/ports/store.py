"""Values that the store takes and returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from machines.model.configuration import NodeConfiguration
from machines.model.plan import Digest
from machines.model.rollout import Actor, Interruption
from machines.model.rows import AuditMismatch
from machines.model.step_record import StepAction
from rolloutd.audit.audit_chain import GENESIS_HASH, ChainVerification
from rolloutd.ports.nodes import DiscoveredNode
from rolloutd.ports.types import JSON


class PostgresqlAddress(Protocol):
    """A database on PostgreSQL; the DSN has no password, `lease_s` is how long a silent leader leads."""

    @property
    def dsn(self) -> str: ...
    @property
    def password_file(self) -> Path | None: ...
    @property
    def lease_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One line of the audit: `text` is the canonical JSON that was hashed.

    Its keys: `actor {kind,name,uid}`, `at`, `cause`, `digest`, `event` (name of the event's class), `fields`
    (the event's own), `node`, `rollout`, `seq`.  `digest`, `node` and `rollout` may be null.
    """

    seq: int
    text: str
    hash: str


@dataclass(frozen=True, slots=True)
class AuditBase:
    """The last audit entry that was exported, after which the database's audit begins.

    `origin`: the hash of the very first entry; `made_at`: epoch seconds.  The defaults: nothing was exported.
    """

    seq: int = 0
    head: str = GENESIS_HASH
    origin: str = ""
    made_at: float = 0.0


@dataclass(frozen=True, slots=True)
class ClosedRollout:
    """The header of a rollout that load_snapshot() omits.

    `counts` counts its targets: done ones by outcome, the others by phase.
    """

    id: str
    name: str
    digest: Digest
    submitted_by: Actor
    submitted_at: float
    cancelled: Interruption | None
    ended_at: float | None
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """A rollout of the past or present, for retention.

    `ended_at` is None while a target is in progress, failed, isolated or ordered to return; `source` is its
    pin.
    """

    id: str
    source: Mapping[str, str]
    ended_at: float | None
    deleted: bool


@dataclass(frozen=True, slots=True)
class ApprovedRollout:
    """A rollout that was approved and changed nodes: its canonical plan and its pinned source."""

    id: str
    content: Mapping[str, JSON]
    source: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class StoredVolume:
    """How much the database holds; instants are epoch seconds.

    `free_bytes` are of the file, and no row needs them.  `entries_a_day` is of the last week.
    `exported_entries` are in segments.
    """

    entries: int = 0
    first_entry_at: float | None = None
    entries_a_day: float = 0.0
    closed_rollouts: int = 0
    oldest_end_at: float | None = None
    file_bytes: int = 0
    free_bytes: int = 0
    exported_entries: int = 0

    @property
    def bytes_a_day(self) -> float:
        """Return about how many bytes the file grows by, with the rows that come with an entry."""
        return self.entries_a_day * (self.file_bytes - self.free_bytes) / max(1, self.entries)


@dataclass(frozen=True, slots=True)
class SourceAnswer:
    """What an inventory source last reported, at an instant (epoch seconds); variables without secrets."""

    source: str
    answered_at: float
    nodes: tuple[DiscoveredNode, ...]


@dataclass(frozen=True, slots=True)
class StepDuration:
    """How long a step took that succeeded, until `ended_at`; of a prepare stage, `step` is its name.

    `seconds` does not include the wait of a run for a slot of the runner.
    """

    rollout: str
    plan: str
    node: str
    step: str
    action: StepAction
    seconds: float
    ended_at: float
    is_run: bool


@dataclass(frozen=True, slots=True)
class BusyTime:
    """How long traffic kept a node from being admitted, 0.0 if it was idle when it was first probed."""

    rollout: str
    plan: str
    node: str
    seconds: float


@dataclass(frozen=True, slots=True)
class KeptForecast:
    """A forecast that people have seen; `answer` is its JSON, `is_missed`: its p90 was said to be over."""

    rollout: str
    made_at: float
    occasion: str
    answer: Mapping[str, JSON]
    is_missed: bool = False


@dataclass(frozen=True, slots=True)
class RowMismatch:
    """A row of a table that the audit does not account for; None where there is no row.

    `expected` and `found` hold hashes in place of values that the audit does not have; `is_restorable` says
    whether the audit has all that the row needs.
    """

    mismatch: AuditMismatch
    table: str
    key: Mapping[str, JSON]
    expected: Mapping[str, JSON] | None
    found: Mapping[str, JSON] | None
    is_restorable: bool


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The audit's verification: its chain, and the rows that differ from it.

    `unreadable`: entries that this version cannot decode.  `is_complete`: no mismatch is left out.
    `compared`: False for a file of an older version, of which only the chain was verified.
    `anchor_problem`: how it differs from what is kept outside, "" for not at all.  `seq`: the last entry that
    was read.
    """

    chain: ChainVerification
    mismatches: tuple[RowMismatch, ...] = ()
    unreadable: tuple[int, ...] = ()
    is_complete: bool = True
    compared: bool = True
    anchor_problem: str = ""
    seq: int = 0

    @property
    def ok(self) -> bool:
        return self.chain.ok and not self.mismatches and not self.unreadable and not self.anchor_problem


@dataclass(frozen=True, slots=True)
class AuditCheckpointReport:
    """How the database differs from its signed checkpoint, "" for not at all.

    `seq`: the entry that was signed; `verified_at`: when the whole audit was last verified (epoch seconds).
    """

    problem: str = ""
    seq: int = 0
    verified_at: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeConfigurations:
    """Records by node, the documents that they name by content, and the changes of their rollouts."""

    records: Mapping[str, NodeConfiguration]
    documents: Mapping[str, Mapping[str, JSON]]
    changes: Mapping[str, str]
