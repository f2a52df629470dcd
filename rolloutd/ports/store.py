"""Port of the database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from machines.facts.fleet_facts import FactsSnapshot
from machines.model.configuration import NodeConfiguration
from machines.model.events import Event
from machines.model.plan import Digest
from machines.model.preparation import Preparation
from machines.model.rollout import Actor, Interruption, Rollout, Target, Verdict
from machines.model.rows import AuditMismatch
from machines.model.step_record import StepAction, StepRecord
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


class Store(Protocol):
    """Rollouts, targets, steps, votes, holds and their audit.

    Every method raises StoreFailed if the database cannot be read or written.
    """

    async def load_snapshot(self) -> FactsSnapshot:
        """Return all facts for the core's decisions.

        It omits deleted rollouts and nodes that are no longer in the inventory.  It also omits rollouts that
        have ended or were cancelled and have no node in flight, failed, isolated or ordered to return: see
        list_closed_rollouts().
        """

    async def commit(
        self, events: Sequence[Event], *, actor: Actor, cause: str, at: float
    ) -> tuple[AuditEntry, ...]:
        """Write the events and their audit entries in one transaction and return the entries in order.

        There is at least one entry per event.  Raises Conflict if a row differs from an event's precondition,
        and StoreFailed also if this daemon's term has ended.  A cancellation of the caller does not split the
        events.
        """

    async def read_audit(
        self,
        *,
        after: int = 0,
        before: int | None = None,
        limit: int = 1000,
        rollout: str | None = None,
        node: str | None = None,
        event: str | None = None,
    ) -> Sequence[AuditEntry]:
        """Return entries after the sequence number `after`, oldest first; `event` is a class name.

        They are the first `limit` of them, or with `before` the last `limit` before that number.
        """

    async def load_connections(self) -> Mapping[str, Mapping[str, JSON]]:
        """Return the connection of each node, also of nodes no longer in the inventory."""

    async def save_source_answer(self, answer: SourceAnswer, removed: Sequence[str] = ()) -> None:
        """Store the new and changed nodes of a source's answer, and drop the `removed` ones.

        The audit has no entry of it: it has the nodes that are made of all answers.
        """

    async def load_source_answers(self) -> Sequence[SourceAnswer]:
        """Return the last answer of each source, also of sources that the settings no longer name."""

    async def load_plan(self, rollout: str) -> tuple[Mapping[str, JSON], Mapping[str, str]]:
        """Return a rollout's canonical plan and its pinned source; raises NotFound."""

    async def load_rollout(self, rollout: str) -> Rollout:
        """Return one rollout, also a closed one; raises NotFound."""

    async def load_preparations(self, rollout: str) -> Sequence[Preparation]:
        """Return the prepare stages of one rollout, also of a closed one."""

    async def load_targets(self, rollout: str) -> Sequence[Target]:
        """Return the targets of one rollout, also of a closed one, in order."""

    async def list_closed_rollouts(self, limit: int = 100) -> Sequence[ClosedRollout]:
        """Return the rollouts that load_snapshot() omits and that are not deleted, latest first."""

    async def list_rollout_records(self) -> Sequence[RolloutRecord]:
        """Return all rollouts, including deleted ones."""

    async def list_uncleaned_nodes(self, ended_after: float, ended_before: float) -> Sequence[str]:
        """Return the nodes whose last rollout ended in this period, and that were not cleaned since.

        It omits nodes on which no rollout did anything, and those of a rollout that has not ended.
        """

    async def require_term(self) -> None:
        """Raise LeadershipLost if another daemon has begun a term: this one must act on no node any more."""

    async def require_redaction_key(self, fingerprint: str) -> None:
        """Note the fingerprint of the key, or raise StoreFailed if the store's rows are of another key."""

    async def take_over_runs(self, machine: str) -> frozenset[str]:
        """Note that this machine begins runs; return the nodes on which other machines' may be under way."""

    async def find_changes_in_effect(self, node: str, rollouts: Sequence[str]) -> Mapping[str, bool]:
        """Return whether the node has the change of each rollout, or a later one that skipped its stages.

        A later rollout of the plan that changed the node counts in place of the earlier ones.  It omits
        rollouts that the database does not have; a deleted one has no change in effect.
        """

    async def find_identical(self, change: str, selector_digest: str, policy: str) -> str | None:
        """Return the latest rollout of the same content that is neither cancelled nor deleted."""

    async def find_nodes_with_change(self, change: str) -> frozenset[str]:
        """Return the nodes that any rollout brought to this change, or found already there."""

    async def find_later_changes(self, rollout: str) -> Mapping[str, str]:
        """Return the nodes that later rollouts of the same plan changed, each with the latest of them.

        It omits deleted rollouts.
        """

    async def load_steps(self, rollout: str, node: str, attempt: int | None = None) -> Sequence[StepRecord]:
        """Return the step records of a node, oldest first; of one attempt if named."""

    async def load_step_durations(self, limit: int) -> Sequence[StepDuration]:
        """Return the durations of the latest steps and prepare stages that succeeded, the latest first."""

    async def load_busy_times(self, limit: int) -> Sequence[BusyTime]:
        """Return how long traffic kept nodes from starting, the latest first; of so many changes of phase.

        Entries of the audit that are exported are not asked.
        """

    async def count_attempts(self, plan: str) -> tuple[int, int]:
        """Return how many attempts the rollouts of a plan had, and how many failures."""

    async def keep_forecast(self, kept: KeptForecast) -> None:
        """Keep a forecast, in place of one of the same rollout and instant; the audit has no entry of it."""

    async def load_forecasts(self, rollout: str | None = None) -> Sequence[KeptForecast]:
        """Return the kept forecasts, latest first, of rollouts that are not deleted."""

    async def load_configurations(self, nodes: Sequence[str]) -> NodeConfigurations:
        """Return the configuration records of these nodes, without nodes that have none."""

    async def list_expired_configurations(self, gone_before: float) -> Sequence[str]:
        """Return the nodes with configuration records that left the inventory until then.

        It omits nodes of a rollout that is not over.
        """

    async def remove_unused_documents(self) -> None:
        """Remove the documents of configurations that no node's record and no live rollout has."""

    async def list_expired_rollouts(self, ended_before: float) -> Sequence[str]:
        """Return the closed rollouts whose records may go, oldest first.

        It omits rollouts that are live, and those that some node of the inventory has its latest change from.
        """

    async def list_recorded_nodes(self, rollout: str, limit: int) -> Sequence[str]:
        """Return the first nodes of which a rollout has a target."""

    async def has_step_output(self, rollout: str) -> bool: ...

    async def remove_step_output(self, rollout: str, limit: int) -> None:
        """Remove the output of so many steps; the audit keeps its hash."""

    async def release_space(self) -> bool:
        """Give some free space of the database's file back to the disk; return whether there is more."""

    async def measure(self, now: float) -> StoredVolume: ...

    async def load_verdicts(self) -> Sequence[Verdict]:
        """Return the verdicts that are not cleared, oldest first."""

    async def unfinished_runs(self, node: str) -> Sequence[str]:
        """Return the handles of the node's runs that did not end well and have no later cleanup."""

    async def list_changed_nodes(self, rollout: str, after: int) -> frozenset[str]:
        """Return the nodes of a rollout that audit entries after a sequence number name."""

    async def latest_audit_entry(self) -> AuditEntry | None: ...

    async def verify_audit(self, head: str | None = None, *, gently: bool = False) -> AuditReport:
        """Verify the audit's chain, that `head` occurs in it, and that the tables follow from the audit.

        `gently` leaves most of the processor to others, and takes a multiple of the time.
        """

    async def verify_audit_checkpoint(self) -> AuditCheckpointReport:
        """Compare the newest entry, and the rows that decisions use, with the signed checkpoint.

        Its cost does not grow with the audit.  Rows of closed rollouts are not compared.
        """

    async def sign_audit_checkpoint(
        self, verified_at: float | None = None, *, all_rows: bool = False
    ) -> None:
        """Note in the checkpoint which rollouts are live, and when the whole audit was verified.

        `all_rows` signs all rows as they are: only after a verification that accounts for each.
        """

    async def drop_audit_checkpoint(self) -> None:
        """Remove the checkpoint, because a row is in doubt: the next start verifies the whole audit."""

    async def load_audit_base(self) -> AuditBase:
        """Return the last exported entry; entries up to it may still be there, and are read no more."""

    async def advance_audit_base(self, seq: int, at: float) -> None:
        """Make an entry the base, after it and those before it were exported.

        What they made of the tables is kept in their place, so that the audit is replayed from there.  At
        least two entries must follow.
        """

    async def remove_exported_entries(self, limit: int) -> bool:
        """Remove so many entries up to the base; return whether there is more to remove."""

    async def is_token_used(self, token: str) -> bool:
        """Return whether a service has used this token."""

    async def close(self) -> None:
        """Finish pending writes, then close."""
