"""Models of the API's responses, as pydantic reads them: what clients may rely on.

Instants are RFC 3339 in UTC, absent is null, a percentage is 0 to 100.  OpenAPI shows the docstrings.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from rolloutd.control.daemons.wire_daemons import Daemons
from rolloutd.control.trains.wire_trains import RolloutTrain

RolloutState = Literal["awaiting-approval", "running", "soaking", "paused", "done", "cancelled"]

GateState = Literal["not-asked", "waiting", "open", "rejected", "in-doubt"]


class Remedy(TypedDict):
    """What ends a wait; `command` is null if no command does, `until` is the latest end."""

    kind: str
    command: str | None
    who: str | None
    until: str | None


class Reason(TypedDict):
    """Why something waits: `code`, `subject` and `params` for programs, `text` and `lifted_by` for people."""

    code: str
    text: str
    since: str | None
    lifted_by: str | None
    subject: str
    params: dict[str, Any]
    remedy: Remedy | None


class VoteCount(TypedDict):
    """How many votes a gate wants, and how many it has."""

    want: int
    have: int


class TeamVoteCount(VoteCount):
    """How many votes of one team a gate wants, and how many it has."""

    team: str


class GateVoteCounts(TypedDict):
    """The votes that a gate wants and has; with `four_eyes`, the submitter's yes does not count."""

    owner: VoteCount
    teams: list[TeamVoteCount]
    four_eyes: bool


class Vote(TypedDict):
    """One person's yes or no; `counts` is false if it expired, is for another digest, or is in doubt."""

    id: str
    by: str
    uid: int | None
    yes: bool
    teams: list[str]
    reason: str
    at: str
    digest: str
    withdrawn: str | None
    counts: bool


class PilotStep(TypedDict):
    """One step of the pilot, and how long it took."""

    attempt: int
    step: str
    action: str
    state: str
    seconds: float
    text: str


class PilotChange(TypedDict):
    """A task that changed the pilot; `diff` is null if the run recorded none."""

    attempt: int
    step: str
    task: str
    diff: str | None


class PilotLog(TypedDict):
    """The log of one of the pilot's runs; `rolloutctl logs` shows it."""

    attempt: int
    step: str
    lines: int
    sha256: str


class PilotEvidence(TypedDict):
    """What the pilot showed; `reason` is the text of its last transition."""

    node: str
    team: str | None
    outcome: str
    reason: str
    attempts: int
    steps: list[PilotStep]
    changes: list[PilotChange]
    logs: list[PilotLog]


class Gate(TypedDict):
    """A gate; `wave` is the wave that a `continue` gate follows, `missing` the votes it still needs.

    `digest` is what a vote here is for.  At `start`, `evidence` is what the pilot showed, and `waived` why
    the plan needs no pilot.  A gate `in-doubt` rests on rows that the audit does not account for, which
    `missing` names.  At `continue`, `prepared` are the pending nodes of the waves after it.
    """

    gate: str
    wave: str | None
    team: str | None
    state: GateState
    needs: GateVoteCounts
    votes: list[Vote]
    missing: str | None
    digest: str
    evidence: PilotEvidence | None
    waived: str | None
    prepared: Prepared | None


class Prepared(TypedDict):
    """Of `total` nodes `done` have no prepare stage left."""

    done: int
    total: int


class Minutes(TypedDict):
    """Minutes in a slot, and minutes of preparation in service, each of the latest attempts."""

    slot: float
    prepare: float


class ForcedStage(TypedDict):
    """A prepare stage that runs also where it is done: on `nodes`, on all if that is empty."""

    stage: str
    nodes: list[str]


class InFlight(TypedDict):
    """A node that the daemon works on; `runner` as in Node."""

    node: str
    pools: list[str]
    phase: str
    step: str | None
    percent: float | None
    task: str | None
    runner: str | None
    since: str
    admitted_at: str | None


class RolloutInFlight(InFlight):
    """A node that the daemon works on, and its rollout."""

    rollout: str


class Pool(TypedDict):
    """A pool of a rollout; its counts are of the rollout's nodes, as those of the rollout.

    `down` counts all its nodes, `unobserved` those without a fresh observation.
    """

    pool: str
    total: int
    done: int
    failed: int
    skipped: int
    rolled_back: int
    in_flight: int
    down: int
    unobserved: int
    max_unavailable: int


class Work(TypedDict):
    """The seconds until the forecast end: the median, and the 90th percentile."""

    low_s: float
    high_s: float


class Instants(TypedDict):
    """The median and the 90th percentile of an instant; null where in so many draws it never happens."""

    p50: str | None
    p90: str | None


class Bottleneck(TypedDict):
    """What nodes wait for longest (a pool, a limit or a window), and what one more slot there saves."""

    kind: str
    name: str
    saves_s: float


class VoteDeadline(TypedDict):
    """Until when a vote at the gate that waits costs nothing, and how many seconds one costs after that."""

    yes_by: str
    costs_s: float


class ForecastSummary(TypedDict):
    """The latest forecast of a rollout: each gate gets its votes as soon as it asks."""

    made_at: str
    ends_at: Instants
    waits: dict[str, float]
    bottleneck: Bottleneck | None
    vote_deadline: VoteDeadline | None


class Source(TypedDict):
    """The pinned source: a git commit and the `ref` that named it, or the content hash of an upload.

    `requirements` is the sha256 of the collections and roles that are installed for it.
    """

    kind: str
    pin: str
    requirements: str | None
    url: str | None
    ref: str | None
    ref_kind: str | None
    text: str


class RolloutSummary(TypedDict):
    """What a list and `status` both show of a rollout."""

    rollout: str
    plan: str
    digest: str
    state: RolloutState
    percent: float
    total: int
    done: int
    skipped: int
    rolled_back: int
    submitted_by: str
    submitted_at: str


class Rollout(RolloutSummary):
    """A rollout as `status` shows it; `expected_s` is the usual time of one of its nodes.

    `skipped` nodes are done without the change, `rolled_back` is how many of these were changed before.
    `forecast`, `work` and `eta` (its p90) are of the latest forecast, null before the first one and once
    `eta` has passed.
    `votes_missing` counts votes at all gates ahead, `minutes` are of all nodes; `prepared` may be null.
    """

    source: Source
    wave: str | None
    failed: int
    drifted: int
    pending: int
    in_flight: list[InFlight]
    pools: list[Pool]
    gates: list[Gate]
    reason: Reason | None
    work: Work | None
    votes_missing: int
    eta: str | None
    forecast: ForecastSummary | None
    traffic_probes: list[str]
    not_probed: list[str]
    not_isolated: list[str]
    owner: str
    expected_s: float
    prepared: Prepared | None
    forced_stages: list[ForcedStage]
    minutes: Minutes
    train: RolloutTrain | None


class KeptSlots(TypedDict):
    """The nodes at rest that still hold slots for a rollout that has ended: the first ones of `total`."""

    rollout: str
    nodes: list[str]
    total: int


class Status(Daemons):
    """All rollouts as of audit entry `seq`; `trouble` is what stops the daemon as a whole."""

    rollouts: list[Rollout]
    kept_slots: list[KeptSlots]
    trouble: str | None
    seq: int


class RolloutLine(RolloutSummary):
    """A rollout in a list."""

    ended_at: str | None


class Rollouts(TypedDict):
    """All rollouts, latest first."""

    rollouts: list[RolloutLine]


class DeleteResponse(TypedDict):
    """The deleted rollout."""

    rollout: str


class RollbackResponse(TypedDict):
    """The nodes whose rollback was ordered or withdrawn, and the rollout."""

    rollout: str
    nodes: list[str]


class EventLine(TypedDict):
    """One line of the event stream: an entry, the progress of running work, a status, or a heartbeat.

    `change` is what differs from the status of the version before.  `heartbeat` is the sequence number of the
    last entry sent.
    """

    seq: int | None
    entry: NotRequired[dict[str, Any]]
    progress: NotRequired[list[RolloutInFlight]]
    version: NotRequired[int]
    status: NotRequired[Status]
    change: NotRequired[dict[str, Any]]
    heartbeat: NotRequired[int]


class TrainForecast(TypedDict):
    """What the train of a rollout saves from now on: outages, and seconds for which nodes are isolated."""

    name: str
    outages_saved: int
    downtime_saved_s: float


class Seconds(TypedDict):
    """The median and the 90th percentile of a duration in seconds; null as in Instants."""

    p50: float | None
    p90: float | None


class AssumptionText(TypedDict):
    """What a forecast cannot know, and assumes."""

    code: str
    text: str
