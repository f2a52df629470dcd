"""A rollout as a value: its targets, votes, failures, holds and freezes.

Nothing here is a status: a rollout's state, percent and reasons are computed
from these values (progress.py, gates.py, schedule.py) and stored nowhere.  All
instants are epoch seconds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from machines.plan import Digest, GateName, Plan
from machines.states import Outcome, Phase


class ActorKind(StrEnum):
    """What sort of somebody did a thing."""

    PERSON = "person"
    SERVICE = "service"
    DAEMON = "daemon"


@dataclass(frozen=True, slots=True)
class Actor:
    """Who did it; a person's `name` and `uid` come from the socket's peer credential.

    A service is named `SERVICE:NAME` after the one it vouches for, and `uid` is
    that of the account which handed its word in.
    """

    kind: ActorKind
    name: str
    uid: int | None = None

    @property
    def human(self) -> str:
        """The name by which one person is known here, in person and through services alike."""
        name = self.name.partition(":")[2] if self.kind is ActorKind.SERVICE else self.name
        return name.partition("@")[0].casefold()

    def is_same_human(self, other: Actor) -> bool:
        """Whether both are, or stand for, one person; in doubt they are."""
        if ActorKind.SERVICE in (self.kind, other.kind):
            return self.human == other.human
        if self.uid is not None and other.uid is not None:
            return self.uid == other.uid
        return self.name == other.name


DAEMON = Actor(ActorKind.DAEMON, "rolloutd")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something is not moving, since when, and who or what can lift it."""

    code: str
    text: str
    since: float | None = None
    lifted_by: str = ""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure of one node; `step` and `message` make its signature.

    `id` is `node#attempt` or, for a node that fails twice in one attempt (a
    canary that turned red in the soak), `node#attempt.2`.
    """

    id: str
    node: str
    attempt: int
    step: str
    message: str
    at: float

    @property
    def signature(self) -> str:
        """What makes two failures of the same sort: the step and the message without node and numbers."""
        # A node's name is one word: of a node `a`, no letter of other words may go with it.
        nameless = re.sub(rf"(?<![\w.-]){re.escape(self.node)}(?![\w-])", "", self.message)
        text = "".join(char for char in nameless if not char.isdigit())
        return f"{self.step}:{text.strip().lower()[:200]}"


class Order(StrEnum):
    """What a person asked to be done with a node, while it is still being done."""

    RETURN = "return"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Target:
    """One node of one rollout.

    `since` is when it entered its phase; `isolated` says that something we did
    to take it out of service has not been undone; `not_before` is when it may
    be tried again; `needs_vote_of` names the team that a joiner waits for;
    `maybe_current` asks for a look, before it is admitted, whether it needs the
    change at all.  `attempt` counts from 1; 0 means never admitted.
    `admitted_at` is when its latest attempt began: done nodes say by it how long
    a node takes.
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
    put_backs: int = 0
    last_text: str = ""
    failure: Failure | None = None
    order: Order | None = None
    order_by: Actor | None = None
    ordered_at: float = 0.0
    joined: bool = False
    needs_vote_of: str | None = None
    maybe_current: bool = False
    admitted_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Vote:
    """One person's yes or no at a gate, for a digest.

    `teams` are the teams whose member the person was when voting (or the one
    named with --team); `wave` tells the continue gates of several waves apart;
    `shown` are the failures a proceed vote was shown; `nodes`, `more` and
    `until` widen it, never beyond.
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
class Opened:
    """A gate that was open once: from then on its votes no longer expire."""

    gate: GateName
    wave: str
    at: float


@dataclass(frozen=True, slots=True)
class Pause:
    """A person's pause; lifted by a person's resume and nothing else."""

    by: Actor
    reason: str
    at: float


@dataclass(frozen=True, slots=True)
class Rollout:
    """One digest on its way through the fleet.

    `failures` are all that happened, oldest first; which of them are settled is
    computed from the votes.  `approved_count` is the number of targets that
    were resolved at submit.  `supersedes` is the rollout it took over from.
    """

    id: str
    plan: Plan
    digest: Digest
    submitted_by: Actor
    submitted_at: float
    approved_count: int
    votes: tuple[Vote, ...] = ()
    opened: tuple[Opened, ...] = ()
    failures: tuple[Failure, ...] = ()
    paused: Pause | None = None
    cancelled: Pause | None = None
    ended_at: float | None = None
    amendments: int = 0
    supersedes: str | None = None

    @property
    def closed(self) -> bool:
        """Whether no node of it will ever be started again."""
        return self.cancelled is not None or self.ended_at is not None


@dataclass(frozen=True, slots=True)
class Hold:
    """Somebody outside the plans takes the node's slot; owned by (source, id)."""

    node: str
    source: str
    id: str
    actor: Actor
    reason: str
    at: float
    until: float | None = None
