"""Reboots that machines ask for themselves: the gate of a group of them, and people's approvals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from machines.model.plan import VoteRequirement
from machines.model.rollout import Actor


@dataclass(frozen=True, slots=True)
class RebootGate:
    """What a group's reboots need: votes of its owner team, and of each node's own team.

    `members` are the teams that people have now, by uid; a person who is not in it has those of the approval.
    """

    group: str
    owner: str | None
    need: VoteRequirement
    members: Mapping[int, frozenset[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RebootApproval:
    """One person's yes to the reboots of a group until an instant (epoch seconds); `id` is GROUP/PERSON."""

    id: str
    group: str
    actor: Actor
    teams: tuple[str, ...]
    reason: str
    at: float
    until: float


@dataclass(frozen=True, slots=True)
class RebootsApproved:
    """A person approved a group's reboots, in place of their earlier approval."""

    approval: RebootApproval


@dataclass(frozen=True, slots=True)
class RebootApprovalWithdrawn:
    approval: str
    actor: Actor
    reason: str
    at: float
