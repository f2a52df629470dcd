"""All that can happen, as values: the only way in which anything remembered changes.

An event is committed by the store (rows and audit entry in one transaction) and
then applied to the index.  Observations alone are applied without being stored:
they are as old as the daemon.  All instants are epoch seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from machines.limits import TeamRules
from machines.node import Node
from machines.plan import Digest, GateName
from machines.rollout import Actor, Failure, Hold, Order, Target, Vote
from machines.states import Outcome, Phase, Trigger
from machines.windows import Freeze

__all__ = ["Actor", "Event", "StepRecord"]


class StepAction(StrEnum):
    """What was done in a step."""

    LOOK = "look"
    DO = "do"
    UNDO = "undo"
    RUN = "run"
    CHECK = "check"
    CLEAR = "clear"


class StepState(StrEnum):
    """What is known of a step; `intended` means begun and not heard of again."""

    INTENDED = "intended"
    OK = "ok"
    FAILED = "failed"
    BUSY = "busy"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one attempt, as far as it is known.

    `number` tells repeated passages of one step apart (a rerun); `handle` is
    the runner's opaque string; `prior` is what an isolator found before it did
    anything; `output` is evidence for people, limited by the shell.
    """

    rollout: str
    node: str
    attempt: int
    step: str
    action: StepAction
    number: int
    state: StepState
    at: float
    began_at: float
    stage: str = ""
    handle: str = ""
    prior: Any = None
    text: str = ""
    output: str = ""
    visible_to: str | None = None


@dataclass(frozen=True, slots=True)
class NodesSeen:
    """The inventory told of new nodes, or of nodes that changed."""

    nodes: tuple[Node, ...]
    connections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodesGone:
    """The inventory no longer has these nodes."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RolloutOpened:
    """A plan was submitted; `content` is its canonical form, `source` what was pinned."""

    rollout: str
    name: str
    content: Mapping[str, Any]
    source: Mapping[str, str]
    digest: Digest
    selector_digest: str
    submitted_by: Actor
    at: float
    targets: tuple[Target, ...]
    again: bool = False
    supersedes: str | None = None


@dataclass(frozen=True, slots=True)
class TargetsJoined:
    """An amendment: nodes that appeared and match were added to a rollout."""

    rollout: str
    targets: tuple[Target, ...]
    at: float


@dataclass(frozen=True, slots=True)
class TargetChanged:
    """An amendment: a target's team or pools changed in the inventory, or its vote came."""

    rollout: str
    node: str
    team: str | None
    pools: tuple[str, ...]
    needs_vote_of: str | None
    at: float


@dataclass(frozen=True, slots=True)
class PhaseMoved:
    """A node took an edge of the table."""

    rollout: str
    node: str
    trigger: Trigger
    source: Phase
    target: Phase
    attempt: int
    at: float
    outcome: Outcome | None = None
    failure: Failure | None = None
    rolling_back: bool = False
    not_before: float = 0.0
    isolated: bool | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class StepRecorded:
    """A step was begun or ended; `isolated` is the target's new value, None where it stays."""

    record: StepRecord
    isolated: bool | None = None


@dataclass(frozen=True, slots=True)
class LookedCurrent:
    """A look before admission: the node needs the change after all (or it could not be told)."""

    rollout: str
    node: str
    at: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class NodeOrdered:
    """A person asked for something that takes a while; None when it is over."""

    rollout: str
    node: str
    order: Order | None
    actor: Actor
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class NodeAdvanced:
    """Somebody let a waiting node go before the others of its wave; `position` is its new place."""

    rollout: str
    node: str
    position: int
    actor: Actor
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class VoteCast:
    """Somebody voted; a service by the single-use `token`, for whom it calls `outside`."""

    rollout: str
    vote: Vote
    token: str = ""
    outside: str = ""


@dataclass(frozen=True, slots=True)
class VoteWithdrawn:
    """Somebody took a vote back; a service by the single-use `token`, for whom it calls `outside`."""

    rollout: str
    vote: str
    actor: Actor
    reason: str
    at: float
    token: str = ""
    outside: str = ""


@dataclass(frozen=True, slots=True)
class GateOpened:
    """A gate had all its votes; waves are frozen when a continue gate opens."""

    rollout: str
    gate: GateName
    wave: str
    at: float


@dataclass(frozen=True, slots=True)
class RolloutPaused:
    """A person paused a rollout."""

    rollout: str
    actor: Actor
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class RolloutResumed:
    """A person lifted a person's pause."""

    rollout: str
    actor: Actor
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class RolloutCancelled:
    """A rollout was cancelled: nothing of it starts any more."""

    rollout: str
    actor: Actor
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class RolloutEnded:
    """Every node of a rollout is done."""

    rollout: str
    at: float


@dataclass(frozen=True, slots=True)
class RolloutDeleted:
    """A closed rollout was removed from the lists; its audit entries stay."""

    rollout: str
    actor: Actor
    at: float


@dataclass(frozen=True, slots=True)
class HoldTaken:
    """Somebody outside the plans took a node's slot."""

    hold: Hold


@dataclass(frozen=True, slots=True)
class HoldReleased:
    """A hold ended."""

    node: str
    source: str
    id: str
    actor: Actor
    at: float


@dataclass(frozen=True, slots=True)
class Frozen:
    """A freeze began."""

    freeze: Freeze


@dataclass(frozen=True, slots=True)
class Unfrozen:
    """A freeze was lifted."""

    freeze: str
    actor: Actor
    at: float


@dataclass(frozen=True, slots=True)
class TeamSet:
    """A team set its own rules; they replace the ones it had."""

    rules: TeamRules
    actor: Actor
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class CallRefused:
    """Somebody asked for what they may not do."""

    actor: Actor
    call: str
    why: str
    at: float


@dataclass(frozen=True, slots=True)
class DaemonStarted:
    """A daemon took up its work; `epoch` grows with every start."""

    epoch: int
    version: str
    settings_digest: str
    at: float


@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """The daemon took up other settings while it ran; `changed` names the keys, never their values."""

    settings_digest: str
    changed: tuple[str, ...]
    at: float


@dataclass(frozen=True, slots=True)
class RunsRemoved:
    """What an ended rollout's runs have said is being removed, `keep_s` after its end, by the settings."""

    rollout: str
    runs: int
    keep_s: float
    at: float


@dataclass(frozen=True, slots=True)
class NodeLetGo:
    """The isolator of this kind is asked to put a node in service that it had left out for a hold."""

    node: str
    kind: str
    at: float


Event = (
    NodesSeen
    | NodesGone
    | RolloutOpened
    | TargetsJoined
    | TargetChanged
    | PhaseMoved
    | StepRecorded
    | LookedCurrent
    | NodeOrdered
    | NodeAdvanced
    | VoteCast
    | VoteWithdrawn
    | GateOpened
    | RolloutPaused
    | RolloutResumed
    | RolloutCancelled
    | RolloutEnded
    | RolloutDeleted
    | HoldTaken
    | HoldReleased
    | Frozen
    | Unfrozen
    | TeamSet
    | CallRefused
    | DaemonStarted
    | SettingsChanged
    | RunsRemoved
    | NodeLetGo
)
