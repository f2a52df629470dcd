"""Events: the only way to change a stored fact that the audit accounts for.

Some rows have no event and no audit entry (Writer.write_unaudited): what each source reported, forecasts, and
what the retention removes.  The store commits an event (rows and audit entry in one transaction), then the
index applies it.  Observations are no events, because they are not stored.  The names of classes and fields
are part of the audit format. All instants are epoch seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from machines.model.limits import TeamRules
from machines.model.node import Node
from machines.model.plan import Digest, GateName
from machines.model.preparation import ManifestEntry, Preparation
from machines.model.reboots import RebootApprovalWithdrawn, RebootsApproved
from machines.model.rollout import Actor, Failure, Hold, NodeOrder, PilotEvidence, Target, Verdict, Vote
from machines.model.step_record import StepRecord
from machines.model.train import TrainRemoved, TrainStored
from machines.model.trust_events import TrustEvent
from machines.model.windows import Freeze
from machines.states import Outcome, Phase, Trigger


@dataclass(frozen=True, slots=True)
class NodesDiscovered:
    """The inventory reported new nodes or changed ones; `connections` are their variables without secrets."""

    nodes: tuple[Node, ...]
    connections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodesRemoved:
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RolloutOpened:
    """A plan was submitted; `content` is its canonical form, `source` its pinned source.

    `overrides` are verdicts against which it was submitted, for the `override_reason`.
    """

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
    overrides: tuple[str, ...] = ()
    override_reason: str = ""


@dataclass(frozen=True, slots=True)
class TargetsJoined:
    """Amendment: new nodes that match the selector were added to a rollout."""

    rollout: str
    targets: tuple[Target, ...]
    at: float


@dataclass(frozen=True, slots=True)
class TargetChanged:
    """Amendment: a target's team or pools changed in the inventory."""

    rollout: str
    node: str
    team: str | None
    pools: tuple[str, ...]
    needs_vote_of: str | None
    at: float


@dataclass(frozen=True, slots=True)
class PhaseMoved:
    """A node took an edge of the table; `joins_outage`: it begins in the outage of another rollout."""

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
    joins_outage: bool = False
    busy_s: float | None = None  # how long traffic kept it from its admission; None without probes


@dataclass(frozen=True, slots=True)
class StepRecorded:
    """A step was begun or ended; `isolated` is the target's new value, None for no change.

    Of a run that begins, `content` is the hash of the configuration that it gives the node, and `document` is
    that configuration without secrets.
    """

    record: StepRecord
    isolated: bool | None = None
    content: str = ""
    document: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class PreparationRecorded:
    """A prepare stage of a node has begun or ended, or is to be tried again."""

    preparation: Preparation


@dataclass(frozen=True, slots=True)
class ArtifactsBuilt:
    """Amendment: a build stage made its manifest."""

    rollout: str
    stage: str
    manifest: tuple[ManifestEntry, ...]
    at: float


@dataclass(frozen=True, slots=True)
class DeadlineExtended:
    """The deadline of a node's phase leaves out so much time, in all, in which no daemon was running."""

    rollout: str
    node: str
    downtime_s: float
    at: float


@dataclass(frozen=True, slots=True)
class ChangeNeeded:
    """A check before admission found that the node needs the change, or could not find out."""

    rollout: str
    node: str
    at: float
    text: str = ""


@dataclass(frozen=True, slots=True)
class SoakRestarted:
    """The clock was set back to before a done node's soak began, so the soak counts from `at`."""

    rollout: str
    node: str
    at: float


@dataclass(frozen=True, slots=True)
class DriftRecorded:
    """Check mode would change these tasks again on a node that is done; none: the drift is gone.

    The event has no diff: it could contain secrets, and the audit keeps it for ever.
    """

    rollout: str
    node: str
    at: float
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NodeOrdered:
    """A person gave an order that takes time; `order` None: the order is complete."""

    rollout: str
    node: str
    order: NodeOrder | None
    actor: Actor
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class NodeAdvanced:
    """A person moved a pending node ahead of the others of its wave, to `position`."""

    rollout: str
    node: str
    position: int
    actor: Actor
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class VoteCast:
    """A person voted; a service votes with a single-use `token` for its user `outside`."""

    rollout: str
    vote: Vote
    token: str = ""
    outside: str = ""


@dataclass(frozen=True, slots=True)
class VoteWithdrawn:
    """A person withdrew a vote; `token` and `outside` are as in VoteCast."""

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
class _RolloutCommand:
    rollout: str
    actor: Actor
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class PilotEvidenceAttached:
    """The pilot is done, and its evidence waits at the start gate; votes for earlier evidence are void."""

    rollout: str
    node: str
    evidence: PilotEvidence


@dataclass(frozen=True, slots=True)
class RolloutPaused(_RolloutCommand):
    pass


@dataclass(frozen=True, slots=True)
class RolloutResumed(_RolloutCommand):
    pass


@dataclass(frozen=True, slots=True)
class RolloutCancelled(_RolloutCommand):
    """A person cancelled a rollout; none of its nodes starts any more."""


@dataclass(frozen=True, slots=True)
class RolloutEnded:
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
    """A user outside the plans took a node's slot."""

    hold: Hold


@dataclass(frozen=True, slots=True)
class HoldReleased:
    """A hold was released, or its time is over."""

    node: str
    source: str
    id: str
    actor: Actor
    at: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class FreezeStarted:
    freeze: Freeze


@dataclass(frozen=True, slots=True)
class FreezeLifted:
    """A freeze was lifted, or its time is over; entries up to 0.2 lack `scope` and `reason`."""

    freeze: str
    actor: Actor
    at: float
    scope: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TeamRulesChanged:
    rules: TeamRules
    actor: Actor
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class RequestDenied:
    """A request was denied because the actor lacks the permission."""

    actor: Actor
    call: str
    why: str
    at: float


@dataclass(frozen=True, slots=True)
class DaemonStarted:
    """A daemon started; `epoch` grows with every start."""

    epoch: int
    version: str
    settings_digest: str
    at: float


@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """The daemon applied new settings while running; `changed` names the keys, never the values."""

    settings_digest: str
    changed: tuple[str, ...]
    at: float


@dataclass(frozen=True, slots=True)
class RunOutputPruned:
    """The output of an ended rollout's runs is removed, `keep_s` after its end, by the settings."""

    rollout: str
    runs: int
    keep_s: float
    at: float


@dataclass(frozen=True, slots=True)
class ConfigurationPruned:
    """The configuration records of a node are removed, `keep_s` after it left the inventory."""

    node: str
    keep_s: float
    at: float


@dataclass(frozen=True, slots=True)
class RecordsPruned:
    """Records of a closed rollout are removed, `keep_s` after its end, by the settings.

    They are those of the `nodes`; without nodes, all that is left of the rollout.  Its audit entries stay.
    """

    rollout: str
    nodes: tuple[str, ...]
    keep_s: float
    at: float


@dataclass(frozen=True, slots=True)
class NodeCleaned:
    """What ended rollouts left on a node is removed; `removed` are paths, `kept` counts what stays."""

    node: str
    removed: tuple[str, ...]
    kept: int
    at: float


@dataclass(frozen=True, slots=True)
class IsolationReleased:
    """The isolator of this kind returns a node to service that it left isolated for a hold."""

    node: str
    kind: str
    at: float


@dataclass(frozen=True, slots=True)
class VerdictRecorded:
    """A content failed on a node by the node's own fault; its class of hosts does not get it again."""

    rollout: str
    node: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class VerdictCleared:
    """A person cleared a verdict: the content may be submitted again."""

    verdict: str
    actor: Actor
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class MismatchSettled:
    """An admin settled what a row is that the audit did not account for; `row` None: there is none.

    `kept` is `audit` when the row was restored from the audit, `database` when the stored row was accepted.
    """

    subject: str
    table: str
    key: Mapping[str, Any]
    row: Mapping[str, Any] | None
    kept: str
    actor: Actor
    reason: str
    at: float


TargetEvent = (
    PhaseMoved
    | StepRecorded
    | DeadlineExtended
    | ChangeNeeded
    | SoakRestarted
    | DriftRecorded
    | NodeOrdered
    | NodeAdvanced
    | TargetChanged
)

RecordOnlyEvent = (
    RequestDenied | SettingsChanged | RunOutputPruned | NodeCleaned | IsolationReleased | TrustEvent
)
"""Events that change no fact: only the audit has them."""

StoreEvent = VerdictRecorded | VerdictCleared | ConfigurationPruned | RecordsPruned
"""Events that change only what stores keep: no decision reads it."""

Event = (
    RolloutOpened
    | RolloutDeleted
    | TargetEvent
    | PreparationRecorded
    | TargetsJoined
    | ArtifactsBuilt
    | VoteCast
    | VoteWithdrawn
    | GateOpened
    | PilotEvidenceAttached
    | RolloutPaused
    | RolloutResumed
    | RolloutCancelled
    | RolloutEnded
    | NodesDiscovered
    | NodesRemoved
    | HoldTaken
    | HoldReleased
    | FreezeStarted
    | FreezeLifted
    | TrainStored
    | TrainRemoved
    | RebootsApproved
    | RebootApprovalWithdrawn
    | TeamRulesChanged
    | StoreEvent
    | DaemonStarted
    | MismatchSettled
    | RecordOnlyEvent
)
