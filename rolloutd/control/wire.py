"""Models of the API's answers, as pydantic reads them: what clients may rely on.

Instants are RFC 3339 in UTC, absent is null, and a percentage is 0 to 100.  The
docstrings are the descriptions in the OpenAPI document.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from rolloutd.control.wire_preparation import ForcedStage, Minutes, Prepared

RolloutState = Literal["awaiting-approval", "running", "soaking", "paused", "done", "cancelled"]
GateState = Literal["not-asked", "waiting", "open", "rejected"]


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


# -- gates --------------------------------------------------------------------


class VoteCount(TypedDict):
    """How many votes a gate wants, and how many it has."""

    want: int
    have: int


class TeamVoteCount(VoteCount):
    """How many votes of one team a gate wants, and how many it has."""

    team: str


class GateVoteCounts(TypedDict):
    """The votes that a gate wants and has."""

    owner: VoteCount
    teams: list[TeamVoteCount]


class Vote(TypedDict):
    """One person's yes or no; `counts` is false for a vote that has expired or is for another digest."""

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
    the plan needs no pilot.  At `continue`, `prepared` are the pending nodes of the waves after it.
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


# -- rollouts -----------------------------------------------------------------


class InFlight(TypedDict):
    """A node that the daemon works on."""

    node: str
    pools: list[str]
    phase: str
    step: str | None
    percent: float | None
    task: str | None
    since: str


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
    """The least and the most seconds of work that are left if nothing blocks."""

    low_s: float
    high_s: float


class Source(TypedDict):
    """The pinned source: a git commit and the `ref` that named it, or the content hash of an upload."""

    kind: str
    pin: str
    url: str | None
    ref: str | None
    ref_kind: str | None
    text: str


class Rollout(TypedDict):
    """A rollout as `status` shows it; `expected_s` is the usual time of one of its nodes.

    `skipped` nodes are done without the change, `rolled_back` is how many of these were changed before.
    `work` is what machines have left to do, `votes_missing` what people have: votes at all gates ahead.
    `prepared` is null if the plan has no prepare stage; `minutes` are of all nodes together.
    """

    rollout: str
    plan: str
    digest: str
    source: Source
    state: RolloutState
    wave: str | None
    percent: float
    total: int
    done: int
    failed: int
    skipped: int
    rolled_back: int
    drifted: int
    pending: int
    in_flight: list[InFlight]
    pools: list[Pool]
    gates: list[Gate]
    reason: Reason | None
    work: Work | None
    votes_missing: int
    eta: str | None
    submitted_by: str
    submitted_at: str
    traffic_probes: list[str]
    not_probed: list[str]
    not_isolated: list[str]
    owner: str
    expected_s: float
    prepared: Prepared | None
    forced_stages: list[ForcedStage]
    minutes: Minutes


class Status(TypedDict):
    """All rollouts as of audit entry `seq`; `trouble` is what stops the daemon as a whole."""

    rollouts: list[Rollout]
    trouble: str | None
    seq: int


class RolloutLine(TypedDict):
    """A rollout in a list."""

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


# -- nodes of a rollout -------------------------------------------------------


class Node(TypedDict):
    """A node of a rollout, as `nodes` shows it."""

    node: str
    team: str | None
    pools: list[str]
    phase: str
    wave: str
    outcome: str | None
    attempt: int
    isolated: bool
    since: str | None
    step: str | None
    percent: float | None
    reason: Reason | None
    admitted_at: str | None
    minutes: Minutes


class Nodes(TypedDict):
    """A rollout's nodes in their order, as of audit entry `seq`.

    `next` is the `after` of the next page, null at the end.
    """

    nodes: list[Node]
    seq: int
    next: str | None


class Failure(TypedDict):
    """The step that failed, and its message; `code` is the sort of failure."""

    id: str
    attempt: int
    step: str
    message: str
    at: str
    code: str


class Step(TypedDict):
    """One step of an attempt; `output` is null if it belongs to another team."""

    attempt: int
    step: str
    action: str
    number: int
    state: str
    began_at: str
    at: str
    text: str
    output: str | None


class NodeDetail(Node):
    """A node of a rollout, with every step of every attempt."""

    steps: list[Step]
    failure: Failure | None


class NodeReason(TypedDict):
    """Why a node does not move; `reason` is null if it moves or is done.

    `trouble` is the daemon's own, such as a full disk; null when there is none.
    """

    node: str
    phase: str
    reason: Reason | None
    trouble: str | None


class LogLine(TypedDict):
    """One line of a node's log; `offset` is where the next line begins."""

    offset: int
    at: str
    kind: str
    text: str
    attempt: NotRequired[int]
    step: NotRequired[str]
    fields: NotRequired[dict[str, Any]]


# -- the audit and the event stream -------------------------------------------


class AuditEntry(TypedDict):
    """One audit entry; `entry` is the hashed text, parsed: its instants are epoch seconds."""

    seq: int
    at: str
    hash: str
    entry: dict[str, Any]


class Audit(TypedDict):
    """A page of the audit; `next` is the `after` or the `before` of the next page, null at the end."""

    entries: list[AuditEntry]
    next: int | None


class AuditMismatch(TypedDict):
    """A row of the database that does not follow from the audit.

    `kind`: extra, missing or altered; `columns`: those that differ; `scope`: what does not start until an
    admin has settled it; `restorable`: the audit has all that the row needs.
    """

    subject: str
    kind: str
    scope: str
    columns: list[str]
    restorable: bool
    text: str


class AuditVerification(TypedDict):
    """Whether the audit's hash chain is intact and the database follows from it.

    `first_bad` is the first entry that breaks the chain; `unreadable` are entries of an unknown form;
    `compared` is false for the file of an older version, of which only the chain was verified.
    """

    ok: bool
    entries: int
    head: str
    first_bad: int | None
    message: str
    mismatches: list[AuditMismatch]
    unreadable: list[int]
    compared: bool


class AuditHead(TypedDict):
    """The latest audit entry; a copy of its hash shows later whether the tail was cut."""

    seq: int
    hash: str
    at: str | None


class EventLine(TypedDict):
    """One line of the event stream: an entry, the progress of running work, or a heartbeat.

    `heartbeat` is the sequence number of the last entry sent.
    """

    seq: int | None
    entry: NotRequired[dict[str, Any]]
    progress: NotRequired[list[RolloutInFlight]]
    heartbeat: NotRequired[int]


# -- the daemon ---------------------------------------------------------------


class Runs(TypedDict):
    """Playbook runs on the daemon's machine, and the memory of its fork servers."""

    parallel: int
    active: int
    waiting: int
    forks: int
    new_processes: int
    fork_servers: int
    fork_servers_bytes: int


class Health(TypedDict):
    """The daemon's version, start, trouble and runs."""

    version: str
    epoch: int
    pid: int
    since: str
    observe_only: bool
    trouble: str | None
    runs: Runs


class OpenApi(TypedDict):
    """The OpenAPI document of this API."""

    openapi: str
    info: dict[str, str]
    paths: dict[str, dict[str, Any]]
    components: dict[str, dict[str, Any]]


class Diagnostic(TypedDict):
    """One mistake in a plan file."""

    file: str
    line: int
    column: int
    path: str
    found: str
    allowed: str
    message: str


class Error(TypedDict):
    """Why a request was refused: a sentence, a code, and a plan's mistakes."""

    error: str
    code: str
    errors: list[Diagnostic]
