"""What the attempts that share the outage of a node ask of each other.

A train's changes take turns on a node: each attempt isolates, changes and checks it, and then waits.  After
each later change the earlier ones check again, so that the change that broke something is named, by any
check.  The last one to join returns first, and the first one last; then each checks in service.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from machines.model.plan import StepDef
from machines.model.rollout import Target
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.model.train import OutageProgress, change_key
from machines.states import IN_FLIGHT_PHASES, Phase
from machines.workflow.records import active_isolations

OUTAGE_STEP: Final = "train"
"""Step of an attempt that waits for another one of its train."""

_LIMITS: Final = frozenset({"timeout", "drain_timeout"})
"""Parameters that say how long an isolator may take, not what it isolates."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another target that is in flight on the node, or that keeps it down; `is_later`: it joined later."""

    target: Target
    progress: OutageProgress
    is_later: bool

    @property
    def is_in_flight(self) -> bool:
        return self.target.phase in IN_FLIGHT_PHASES

    @property
    def key(self) -> str:
        """What names its change, for the checks after it."""
        suffix = ".failed" if self.target.phase is Phase.FAILED else ""
        return f"{change_key(self.target)}{suffix}"

    @property
    def must_be_judged(self) -> bool:
        """Whether the other attempts check again, because it has changed the node."""
        if self.target.phase is Phase.FAILED:
            return True
        return self.is_later and self.target.phase is Phase.VERIFYING and self.progress.has_passed


@dataclass(frozen=True, slots=True)
class Outage:
    """The others on the node: `joiner` is the rollout that may join now, "" for none.

    `joiner_until`: until when the node may wait for it (epoch seconds).
    `held`: the isolators of this attempt that another one has in effect too, with the state before both.
    """

    peers: tuple[Peer, ...] = ()
    joiner: str = ""
    joiner_until: float = math.inf
    held: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_shared(self) -> bool:
        return bool(self.peers or self.joiner)

    @property
    def earlier(self) -> list[Peer]:
        """The attempts in flight that joined before this one."""
        return [peer for peer in self.peers if peer.is_in_flight and not peer.is_later]

    @property
    def is_kept_down(self) -> bool:
        """Whether a target that is not in flight keeps the node isolated: it failed, or is to begin again."""
        return any(not peer.is_in_flight and peer.target.isolated for peer in self.peers)

    def is_at_work(self) -> bool:
        """Return whether another attempt has not passed its own checks yet."""
        return any(peer.is_in_flight and not peer.progress.has_passed for peer in self.peers)

    def accusation(self, target: Target) -> str | None:
        """Return what an earlier attempt's checks say since this change: "" passed, None not known yet."""
        # Those that have left the isolation too: a rollback may begin after that, and would never be settled.
        answers = [peer.progress.judged.get(change_key(target)) for peer in self.earlier]
        return next((answer for answer in answers if answer), None if None in answers else "")


def outage_peers(
    target: Target, others: Iterable[Target], progress_of: Mapping[str, OutageProgress]
) -> tuple[Peer, ...]:
    """Return the others on the node of this target; `progress_of` is by rollout."""
    own = (target.admitted_at, target.rollout)
    peers = (
        Peer(other, progress_of[other.rollout], (other.admitted_at, other.rollout) > own)
        for other in others
        if other.rollout != target.rollout
    )
    # What failed in service before this attempt began is not part of its outage.
    return tuple(
        peer
        for peer in peers
        if peer.is_in_flight or peer.target.isolated or (peer.target.phase is Phase.FAILED and peer.is_later)
    )


def held_isolators(
    own: Iterable[StepDef], others: Sequence[tuple[Sequence[StepDef], Sequence[StepRecord]]]
) -> Mapping[str, Any]:
    """Return which own isolators others have in effect, with the state that the first of them found.

    `others` are the isolators and the records of each.  One that is being undone is not held any more: of two
    that leave at once, one must undo it on the node.
    """
    held: dict[str, Any] = {}
    for specs, records in others:
        for spec, prior in active_isolations(specs, records):
            if not _is_leaving(spec, records):
                same = (each.name for each in own if is_same_isolator(each, spec))
                for name in same:
                    held.setdefault(name, prior)
    return held


def is_same_isolator(one: StepDef, other: StepDef) -> bool:
    """Return whether both take a node out of service in the same way, within whatever time."""
    return one.kind == other.kind and _what(one) == _what(other)


def _what(spec: StepDef) -> dict[str, Any]:
    return {key: value for key, value in spec.params.items() if key not in _LIMITS}


def _is_leaving(spec: StepDef, records: Sequence[StepRecord]) -> bool:
    own = (r for r in reversed(records) if r.step == spec.name and r.action is not StepAction.INSPECT)
    latest = next(own, None)
    return latest is not None and (latest.action, latest.state) == (StepAction.REVERT, StepState.INTENDED)
