"""What is remembered, and how it is asked for; no SQL above this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from machines.book import Snapshot
from machines.events import Actor, Event, StepRecord
from machines.plan import Digest
from machines.rollout import Pause, Rollout, Target
from rolloutd.chain import Verdict
from rolloutd.ports.values import JSON


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the audit: `text` is the canonical JSON that was hashed.

    Its keys: `actor {kind,name,uid}`, `at`, `cause`, `digest`, `event` (the
    name of the event's class), `fields` (the event's own), `node`, `rollout`,
    `seq`.  `digest`, `node` and `rollout` are null where there is none.
    """

    seq: int
    text: str
    hash: str


@dataclass(frozen=True, slots=True)
class ClosedRollout:
    """The header of a rollout that load() leaves out, for lists.

    `tally` counts its targets: done ones by outcome, the others by phase.
    """

    id: str
    name: str
    digest: Digest
    submitted_by: Actor
    submitted_at: float
    cancelled: Pause | None
    ended_at: float | None
    tally: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Remembered:
    """A rollout that was ever submitted, for whoever tidies up after it.

    `ended_at` is None while something of it is under way, failed, isolated or
    ordered back; `source` is what was pinned for it.
    """

    id: str
    source: Mapping[str, str]
    ended_at: float | None
    deleted: bool


class Store(Protocol):
    """What is remembered: rollouts, targets, steps, votes, holds and their audit.

    Every method raises StoreFailed when the database cannot be read or written.
    """

    async def load(self) -> Snapshot:
        """Return everything the core decides from.

        Rollouts that were deleted are left out, and those that have ended or were
        cancelled once none of their nodes is in flight, failed, isolated or
        ordered back: they are in closed_rollouts().  Nodes that the inventory
        no longer has are left out as well.
        """
        ...

    async def commit(
        self, events: Sequence[Event], *, actor: Actor, cause: str, at: float
    ) -> tuple[Entry, ...]:
        """Write the events and their audit entries in one transaction, or nothing.

        Returns the entries, at least one per event and in their order.  Raises
        Conflict when a row was not as an event says it is, StoreFailed when it
        could not be written or this daemon's tenure has ended.  A cancelled
        caller's events are written whole or not at all.
        """
        ...

    async def audit(
        self,
        *,
        after: int = 0,
        limit: int = 1000,
        rollout: str | None = None,
        node: str | None = None,
        event: str | None = None,
    ) -> Sequence[Entry]:
        """Return entries with a sequence number greater than `after`, oldest first.

        `event` is the name of an event's class.
        """
        ...

    async def connections(self) -> Mapping[str, Mapping[str, JSON]]:
        """Return how each node is reached, also those that the inventory no longer has."""
        ...

    async def content(self, rollout: str) -> tuple[Mapping[str, JSON], Mapping[str, str]]:
        """Return a rollout's plan in canonical form and what was pinned; raises NotFound."""
        ...

    async def rollout(self, rollout: str) -> Rollout:
        """Return one rollout, also a closed one; raises NotFound."""
        ...

    async def targets(self, rollout: str) -> Sequence[Target]:
        """Return the targets of one rollout, also of a closed one, in their order."""
        ...

    async def closed_rollouts(self, limit: int = 100) -> Sequence[ClosedRollout]:
        """Return the rollouts that load() leaves out and nobody deleted, latest first."""
        ...

    async def remembered(self) -> Sequence[Remembered]:
        """Return every rollout that was ever submitted, deleted ones too."""
        ...

    async def find_identical(self, change: str, selector_digest: str, policy: str) -> str | None:
        """Return the latest rollout of the same content that was neither cancelled nor deleted."""
        ...

    async def done_before(self, change: str) -> frozenset[str]:
        """Return the nodes that some rollout brought to this change, or found there."""
        ...

    async def steps(self, rollout: str, node: str, attempt: int | None = None) -> Sequence[StepRecord]:
        """Return the step records of a node, oldest first; of one attempt if named."""
        ...

    async def unclean(self, node: str) -> bool:
        """Say whether a run on the node is not known to have ended and was not cleared since.

        True when any rollout's RUN step there is intended, failed or unknown with
        no later CLEAR that is ok.
        """
        ...

    async def head(self) -> Entry | None:
        """Return the latest audit entry."""
        ...

    async def verify(self, head: str | None = None) -> Verdict:
        """Check the audit's chain from its first entry on; with `head`, that it still occurs."""
        ...

    async def is_spent(self, token: str) -> bool:
        """Say whether a service spoke by this token already."""
        ...

    async def close(self) -> None:
        """Finish what was handed in, then close."""
        ...
