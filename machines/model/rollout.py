"""A rollout as values: targets, votes, failures, verdicts and holds.

No status is stored: state, percent and reasons are computed from these values.  All instants are epoch
seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

from machines.model.plan import Digest, EnrolPolicy, GateName, Plan
from machines.model.preparation import ManifestEntry, PrepareStage
from machines.states import IN_FLIGHT_PHASES, Outcome, Phase

_CACHED_MESSAGES: Final = 65_536
"""Messages of failures whose signature is kept: those of a fleet of which each node has failed once."""


class ActorKind(StrEnum):
    PERSON = "person"
    SERVICE = "service"
    DAEMON = "daemon"


@dataclass(frozen=True, slots=True)
class Actor:
    """Who did something; a person's `name` and `uid` come from the socket's peer credential.

    A service is named `SERVICE:NAME` after its voting person; `uid` is that of the account that sent the
    vote.
    """

    kind: ActorKind
    name: str
    uid: int | None = None

    @property
    def person_key(self) -> str:
        """The name that identifies a person, in person and through services alike."""
        # Mail addresses and logins differ in case and domain from system to system; their person does not.
        full_name = self.name.partition(":")[2] if self.kind is ActorKind.SERVICE else self.name
        return full_name.partition("@")[0].casefold()

    def is_same_person(self, other: Actor) -> bool:
        """Return whether both are one person or vote for one person; when in doubt they are."""
        # A service has the uid of its account, which says nothing about the person that it votes for.
        if ActorKind.SERVICE in (self.kind, other.kind):
            return self.person_key == other.person_key
        if self.uid is not None and other.uid is not None:
            return self.uid == other.uid
        return self.name == other.name


DAEMON = Actor(ActorKind.DAEMON, "rolloutd")


class FailureCode(StrEnum):
    """What sort of failure it is, for parts that must not read its message."""

    FAILED = "failed"
    """The change or a check failed on the node."""
    NEVER_STARTED = "never-started"
    """The node failed before its run began."""
    UNREACHABLE = "unreachable"
    """The node did not answer before its run began."""
    LOST = "lost"
    """The node was lost during the attempt: it is gone, not ready, or went silent in the middle of a run."""
    UNKNOWN = "unknown"
    """Nothing shows how the run or the check ended."""
    PREPARE_DISTURBED = "prepare-disturbed"
    """A prepare stage changed what it must not change on a node in service."""
    RESTORED_ITSELF = "restored-itself"
    """The node undid the change, because the change was not confirmed in time."""
    INTERFERENCE = "disturbed"
    """Another rollout, a user or another tool changed the node or stopped its run during the attempt."""


BLAMES_CHANGE = frozenset({FailureCode.FAILED, FailureCode.RESTORED_ITSELF})
"""Codes of failures that say something about the change; others are of the node's surroundings."""

UNATTENDED_RESTORE: Final = "guard.unattended"
"""Step of a failure when a node restored itself while no daemon was there to confirm the change."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure of one node; `step` and `message` make its signature.

    `id` is `node#attempt`, `node#attempt.2` for a check that fails during the soak, and
    `node#attempt.stage.try` for a prepare stage that disturbs the node, after its last attempt.
    """

    id: str
    node: str
    attempt: int
    step: str
    message: str
    at: float
    code: FailureCode = FailureCode.FAILED

    @property
    def params(self) -> dict[str, str]:
        return {"step": self.step, "message": self.message, "code": self.code.value}

    @property
    def blames_change(self) -> bool:
        """Whether the failure says something about the change."""
        return self.code in BLAMES_CHANGE and self.step != UNATTENDED_RESTORE

    @property
    def signature(self) -> str:
        """What failures of one sort share: the step, and the message without node name and numbers."""
        return f"{self.step}:{_without_name_and_numbers(self.message, self.node)}"


class NodeOrder(StrEnum):
    """A person's order to a node that is not complete yet."""

    RETURN = "return"
    STOP = "stop"
    ROLLBACK = "rollback"
    """Rolled back as soon as its pools have a slot for it."""


@dataclass(frozen=True, slots=True)
class Drift:
    """What check mode would change again on a node that is done; `since` is when that was first found."""

    since: float
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """One node of one rollout.

    `since`: when it entered its phase.  `isolated`: an isolator of ours is in effect.  `not_before`: when it
    may be tried again.  `needs_vote_of`: the team that a joiner waits for.  `maybe_current`: check before
    admission whether it needs the change.  `attempt` counts from 1; 0 means never admitted.  `admitted_at`:
    when its latest attempt began.  `downtime_s`: time without a daemon that this phase's deadline leaves out.
    `content`: hash of the configuration that a run of its latest attempt gave it, "" before the run.
    `joined_outage`: it got the change in the outage of another rollout, so that it needed none of its own.
    """

    rollout: str
    node: str
    team: str | None
    pools: tuple[str, ...]
    wave: str
    position: int
    phase: Phase = Phase.PENDING
    outcome: Outcome | None = None
    attempt: int = 0
    rolling_back: bool = False
    isolated: bool = False
    since: float = 0.0
    not_before: float = 0.0
    aborted_isolations: int = 0
    last_text: str = ""
    failure: Failure | None = None
    order: NodeOrder | None = None
    order_by: Actor | None = None
    ordered_at: float = 0.0
    joined: bool = False
    needs_vote_of: str | None = None
    maybe_current: bool = False
    admitted_at: float = 0.0
    downtime_s: float = 0.0
    drift: Drift | None = None
    content: str = ""
    joined_outage: bool = False

    @property
    def is_checked_first(self) -> bool:
        """Whether to check if it needs the change; a node that is isolated needs its attempt."""
        return self.maybe_current and not self.isolated

    @property
    def needs_driver(self) -> bool:
        """Whether it is in flight, or has an order that needs no slot."""
        return self.phase in IN_FLIGHT_PHASES or self.order in (NodeOrder.RETURN, NodeOrder.STOP)


@dataclass(frozen=True, slots=True)
class Vote:
    """One person's yes or no at a gate, for a digest.

    `teams`: the person's teams when voting, or the one named with --team.  `wave` distinguishes the continue
    gates. `shown`: the failures that a proceed vote was shown; `nodes`, `more` and `until` extend it to later
    failures.
    """

    id: str
    gate: GateName
    digest: str
    actor: Actor
    yes: bool
    reason: str
    at: float
    teams: tuple[str, ...] = ()
    wave: str = ""
    shown: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    more: int = 0
    until: float | None = None
    withdrawn_at: float | None = None


@dataclass(frozen=True, slots=True)
class GateOpening:
    """A gate that opened; from then on its votes do not expire."""

    gate: GateName
    wave: str
    at: float


@dataclass(frozen=True, slots=True)
class PilotEvidence:
    """What the pilot's attempts showed, for the people who vote at the start gate.

    `digest` is over the rollout's digest and the content.  `pilot_since` is when the pilot entered its phase:
    another value means that the evidence is of an earlier attempt.
    """

    content: Mapping[str, Any]
    digest: str
    pilot_since: float
    at: float


@dataclass(frozen=True, slots=True)
class Interruption:
    """A pause or a cancellation by a person."""

    by: Actor
    reason: str
    at: float


JOIN_PERCENT: Final = 10
"""How much of the approved count may join without a vote."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One digest on its way through the fleet.

    `failures`: all, oldest first; the votes decide which of them are resolved.  `approved_count`: targets at
    submit. `supersedes`: the rollout that it took over from.  `overrides`: verdicts that it disregards, so
    that its entry gate asks an admin too.  `source`: the pinned source, for people.  `built`: the manifests
    that build stages made in this rollout, by stage.
    """

    id: str
    plan: Plan
    digest: Digest
    submitted_by: Actor
    submitted_at: float
    approved_count: int
    votes: tuple[Vote, ...] = ()
    opened: tuple[GateOpening, ...] = ()
    failures: tuple[Failure, ...] = ()
    paused: Interruption | None = None
    cancelled: Interruption | None = None
    ended_at: float | None = None
    amendments: int = 0
    supersedes: str | None = None
    overrides: tuple[str, ...] = ()
    pilot_evidence: PilotEvidence | None = None
    source: Mapping[str, str] = field(default_factory=dict)
    built: Mapping[str, tuple[ManifestEntry, ...]] = field(default_factory=dict)

    @property
    def prepare_stages(self) -> tuple[PrepareStage, ...]:
        """The plan's prepare stages, with the manifests that its build stages made."""
        if not self.built:
            return self.plan.prepare
        return tuple(stage.with_built(self.built) for stage in self.plan.prepare)

    @property
    def free_joiners(self) -> int:
        """How many nodes may join without a vote."""
        if self.plan.enrol is not EnrolPolicy.AUTO:
            return 0
        # One at least, or in a small rollout every joiner would have to be voted for.
        return max(1, self.approved_count * JOIN_PERCENT // 100)

    def node_of_stage(self, node: str, stage: str) -> str:
        """Return the node on which a row's stage runs: a build's host, "" for the daemon's machine."""
        builds = (each.host for each in self.plan.prepare if each.name == stage)
        return node or next(builds, "")

    def digest_at(self, gate: GateName) -> str:
        """Return the digest that a vote at this gate is for: at `start` it covers the pilot's evidence."""
        if gate is GateName.START and self.pilot_evidence is not None:
            return self.pilot_evidence.digest
        return self.digest.whole

    @property
    def closed(self) -> bool:
        """Whether no node of it starts any more."""
        return self.cancelled is not None or self.ended_at is not None


@dataclass(frozen=True, slots=True)
class Hold:
    """A user outside the plans takes a node's slot; owned by (source, id)."""

    node: str
    source: str
    id: str
    actor: Actor
    reason: str
    at: float
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A content that failed on a node, and the evidence; it holds for all hosts of the node's class.

    `change` is the hash of what the rollout did, `content` that of what its run gave to the node.
    `host_class` has the labels of the class, "" for one that the node lacks; without any it is all nodes.
    """

    id: str
    change: str
    content: str
    host_class: Mapping[str, str]
    rollout: str
    node: str
    step: str
    text: str
    at: float


@lru_cache(maxsize=_CACHED_MESSAGES)
def _without_name_and_numbers(message: str, node: str) -> str:
    # The name is removed as a whole word only; a node named `a` must not remove letters of other words.
    nameless = re.sub(rf"(?<![\w.-]){re.escape(node)}(?![\w-])", "", message)
    return "".join(char for char in nameless if not char.isdigit()).strip().lower()[:200]
