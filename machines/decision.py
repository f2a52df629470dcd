"""What the core answers when it is asked what to do now.

A decision is a value: the daemon carries it out and may be killed at any point
of that, because asking again gives what is left of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from machines.plan import GateName
from machines.rollout import Reason


@dataclass(frozen=True, slots=True)
class Start:
    """Admit this node: pending → isolating."""

    rollout: str
    node: str


@dataclass(frozen=True, slots=True)
class Look:
    """Before admission, look whether this node needs the change at all."""

    rollout: str
    node: str


@dataclass(frozen=True, slots=True)
class Rehearse:
    """Find out, changing nothing, whether this node could be isolated now."""

    rollout: str
    node: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Find out whether client traffic runs on this node."""

    rollout: str
    node: str


@dataclass(frozen=True, slots=True)
class PutBack:
    """Put this isolating node back as it was, for this reason."""

    rollout: str
    node: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Open:
    """This gate has all its votes now."""

    rollout: str
    gate: GateName
    wave: str


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, and why the rest does not move.

    `observe` names nodes whose last observation is too old to start a mate of
    theirs.  `reasons` is keyed by rollout id, `rollout/wave` or pool id (of one
    rollout: `rollout|pool`).  `wake_at` is the next instant (epoch seconds) at
    which time alone may change the answer.
    """

    starts: tuple[Start, ...] = ()
    looks: tuple[Look, ...] = ()
    rehearse: tuple[Rehearse, ...] = ()
    probes: tuple[Probe, ...] = ()
    put_backs: tuple[PutBack, ...] = ()
    opens: tuple[Open, ...] = ()
    ends: tuple[str, ...] = ()
    observe: tuple[str, ...] = ()
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    wake_at: float | None = None
