"""Decisions of the scheduler, as values: a list of commands, and why the rest waits.

The daemon may be killed while it carries out a decision: the next decision contains what is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, TypeVar

from machines.model.plan import GateName
from machines.model.reasons import Reason
from machines.model.rollout import Failure, Hold, Target
from machines.model.windows import Freeze


@dataclass(frozen=True, slots=True)
class _OfTarget:
    rollout: str
    node: str


class Admit(_OfTarget):
    """Start this node."""


class AwaitTurn(_OfTarget):
    """Note since when this node waits for an earlier rollout of its train."""


class CheckIfCurrent(_OfTarget):
    """Check before admission whether this node needs the change."""


class DryRun(_OfTarget):
    """Find out without changing anything whether this node could be isolated now."""


class CompareStaged(_OfTarget):
    """Compare the staged files of this node, which could start if they are whole."""


class ProbeTraffic(_OfTarget):
    """Probe this node, which could start if it is idle."""


@dataclass(frozen=True, slots=True)
class Prepare(_OfTarget):
    """Run a prepare stage on a node in service; a build has no node."""

    stage: str
    attempt: int


class CheckSoaking(_OfTarget):
    """Check this node, which soaks in service."""


class Requeue(_OfTarget):
    """Change a done node again, because it has drifted and its plan keeps the change."""


@dataclass(frozen=True, slots=True)
class RollBack(_OfTarget):
    """Begin the rollback of this node; `reason` is the failure, None if a person ordered it."""

    reason: Reason | None = None


@dataclass(frozen=True, slots=True)
class AbortIsolation(_OfTarget):
    reason: Reason


@dataclass(frozen=True, slots=True)
class DeferMaintenance(_OfTarget):
    """Keep this isolated node as it is, and do not maintain it before its pools have a slot for it."""

    reason: Reason


class RestartSoak(_OfTarget):
    """Count a done node's soak from now: by its row it begins later."""


class SkipQuarantined(_OfTarget):
    """Skip a quarantined node that is all that its rollout or its wave still waits for."""


@dataclass(frozen=True, slots=True)
class OpenGate:
    rollout: str
    gate: GateName
    wave: str


@dataclass(frozen=True, slots=True)
class EndRollout:
    rollout: str


@dataclass(frozen=True, slots=True)
class DocumentPilot:
    """Attach the evidence of this rollout's pilot, which is done."""

    rollout: str


@dataclass(frozen=True, slots=True)
class CheckDrift:
    rollout: str
    nodes: tuple[str, ...]


class CheckRounds(StrEnum):
    """What is checked on nodes in service, in rounds over a rollout."""

    SOAK = "soak"
    DRIFT = "drift"


@dataclass(frozen=True, slots=True)
class NextRound:
    """Begin the next round of these checks of a rollout at this instant (epoch seconds), and not before."""

    rollout: str
    checks: CheckRounds
    at: float


@dataclass(frozen=True, slots=True)
class Release:
    """Return this node to service, which an isolator left out of service for a hold that has ended."""

    node: str


@dataclass(frozen=True, slots=True)
class Observe:
    """Observe this node: its last observation is too old to admit a node of its pools."""

    node: str


@dataclass(frozen=True, slots=True)
class EndHold:
    """Release this hold, because its time is over."""

    hold: Hold


@dataclass(frozen=True, slots=True)
class EndFreeze:
    """Lift this freeze, because its time is over."""

    freeze: Freeze


Command = (
    Admit
    | AwaitTurn
    | CheckIfCurrent
    | CheckSoaking
    | CheckDrift
    | NextRound
    | Release
    | Prepare
    | Requeue
    | RollBack
    | DryRun
    | ProbeTraffic
    | CompareStaged
    | AbortIsolation
    | DeferMaintenance
    | OpenGate
    | SkipQuarantined
    | EndRollout
    | DocumentPilot
    | Observe
    | EndHold
    | EndFreeze
    | RestartSoak
)
C = TypeVar("C")


class QueueGroup(NamedTuple):
    rollout: str
    wave: str
    team: str | None
    pools: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BackOff:
    """Skip a queue group until something activates it, or until the instant (epoch seconds)."""

    group: QueueGroup
    until: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now, and why everything else waits.

    Commands of one kind are in the order in which they are carried out.  `backoffs`: the queue groups of
    which no node can start, whatever else starts.  `reasons` are keyed by rollout id, `rollout/wave`, pool
    id, or `rollout|pool`.  `wake_at`: when time alone may next change the decision (epoch seconds).
    """

    commands: tuple[Command, ...] = ()
    backoffs: tuple[BackOff, ...] = ()
    reasons: Mapping[str, Reason] = field(default_factory=dict)
    wake_at: float | None = None

    def of(self, kind: type[C]) -> tuple[C, ...]:
        return tuple(command for command in self.commands if isinstance(command, kind))


@dataclass(frozen=True, slots=True)
class DueRollbacks:
    """The nodes to roll back, the next one first, and how many more only people may order.

    `failure` is the first one that the plan answers, None when people alone have ordered what is due.
    """

    targets: tuple[Target, ...] = ()
    beyond_limit: tuple[Target, ...] = ()
    failure: Failure | None = None
