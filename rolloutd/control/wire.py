"""The shapes of the API's JSON, as types.

Instants are RFC 3339 UTC strings, percent is a number from 0 to 100, absent is
null.  Nothing but the standard library is imported here: the command line and
the console read these shapes and must start quickly.  The OpenAPI document is
generated from these same types by the server.

Longer than 400 lines: the shapes are one contract, read side by side.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

RolloutState = Literal["awaiting-approval", "running", "soaking", "paused", "done", "cancelled"]
GateState = Literal["not-asked", "waiting", "open", "rejected"]


class Reason(TypedDict):
    """Why something does not move."""

    code: str
    text: str
    since: str | None
    lifted_by: str | None


class Need(TypedDict):
    """How many votes are wanted and there."""

    want: int
    have: int


class TeamNeed(TypedDict):
    """How many votes of one team are wanted and there."""

    team: str
    want: int
    have: int


class Needs(TypedDict):
    """What a gate still needs."""

    owner: Need
    teams: list[TeamNeed]


class Vote(TypedDict):
    """One person's yes or no."""

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


class Gate(TypedDict):
    """A gate as it stands; `wave` is the one that `continue` comes after."""

    gate: str
    wave: str | None
    team: str | None
    state: GateState
    needs: Needs
    votes: list[Vote]
    missing: str | None


class InFlight(TypedDict):
    """A node that rolloutd is working on."""

    node: str
    pools: list[str]
    phase: str
    step: str | None
    percent: float | None
    task: str | None
    since: str


class Pool(TypedDict):
    """One pool of a rollout; `down` counts all its nodes, targets or not."""

    pool: str
    total: int
    done: int
    failed: int
    in_flight: int
    down: int
    max_unavailable: int


class Rollout(TypedDict):
    """A rollout as `status` shows it; `expected_s` is how long a node of it usually takes."""

    rollout: str
    plan: str
    digest: str
    state: RolloutState
    wave: str | None
    percent: float
    total: int
    done: int
    failed: int
    skipped: int
    pending: int
    in_flight: list[InFlight]
    pools: list[Pool]
    gates: list[Gate]
    reason: Reason | None
    eta: str | None
    submitted_by: str
    submitted_at: str
    not_looked_at: list[str]
    owner: str
    expected_s: float


class Status(TypedDict):
    """All rollouts, and what holds the whole daemon back if anything does.

    `seq` is the audit entry up to which this is told: the event stream goes on after it.
    """

    rollouts: list[Rollout]
    trouble: str | None
    seq: int


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


class Mistake(TypedDict):
    """One mistake in a plan."""

    file: str
    line: int
    column: int
    path: str
    found: str
    allowed: str
    message: str


class Validation(TypedDict):
    """What `plan validate` says."""

    valid: bool
    errors: list[Mistake]


class Submission(TypedDict):
    """What `plan submit` says; `existing` when the same digest was there already."""

    rollout: str
    digest: str
    state: RolloutState
    existing: bool


class Holder(TypedDict):
    """A node that takes a pool's slot; `rollout` or (`source`, `id`) say on whose behalf."""

    node: str
    why: str
    rollout: str | None
    source: str | None
    id: str | None
    since: str | None


class Lock(TypedDict):
    """One pool's slots and who takes them; `down` counts all its nodes, targets or not."""

    pool: str
    max_unavailable: int
    members: int
    down: int
    holders: list[Holder]


class Hold(TypedDict):
    """Somebody outside the plans takes a node's slot."""

    node: str
    source: str
    id: str
    by: str
    reason: str
    at: str
    until: str | None


class Freeze(TypedDict):
    """Nothing starts in this scope: `all`, `team/NAME` or a pool."""

    id: str
    scope: str
    by: str
    reason: str
    at: str
    until: str | None


class Locks(TypedDict):
    """Every pool that somebody takes a slot of or whose members are known, the holds and the freezes.

    All as they are after audit entry `seq`.
    """

    pools: list[Lock]
    holds: list[Hold]
    freezes: list[Freeze]
    seq: int


class Released(TypedDict):
    """How many holds or freezes were lifted; 0 is an answer too."""

    lifted: int


class Deleted(TypedDict):
    """A closed rollout that is no longer listed."""

    rollout: str


class Health(TypedDict):
    """That the daemon is there, since when, and what troubles it."""

    version: str
    epoch: int
    pid: int
    since: str
    observe_only: bool
    trouble: str | None


class WhoAmI(TypedDict):
    """Who is asking, as the socket says, and what they are here."""

    user: str
    uid: int
    groups: list[str]
    teams: list[str]
    owner_of: list[str]
    admin: bool


class TeamShown(TypedDict):
    """A team of the settings; `members` are user names and @groups, checks and windows are counted."""

    team: str
    members: list[str]
    checks: int
    windows: int
    canaries: list[str]


class Team(TypedDict):
    """A team: what the settings say of it, and what it has set for itself on top (`own_...`)."""

    team: str
    members: list[str]
    windows: list[str]
    own_windows: list[str]
    canaries: list[str]
    own_canaries: list[str]
    freezes: list[Freeze]


class PoolKeyShown(TypedDict):
    """A label key that makes pools, and the budget of those that have none of their own."""

    key: str
    max_unavailable: str


class SettingsShown(TypedDict):
    """The part of the settings that says who may do what, and how much at once."""

    observe_only: bool
    max_parallel: int
    admins: list[str]
    teams: list[TeamShown]
    pools: list[PoolKeyShown]


class RolloutLine(TypedDict):
    """A rollout in a list."""

    rollout: str
    plan: str
    digest: str
    state: RolloutState
    percent: float
    submitted_by: str
    submitted_at: str
    ended_at: str | None


class Rollouts(TypedDict):
    """All rollouts, the latest first."""

    rollouts: list[RolloutLine]


class Nodes(TypedDict):
    """The nodes of a rollout, in their order, as they are after audit entry `seq`."""

    nodes: list[Node]
    seq: int


class Failure(TypedDict):
    """How a node failed."""

    id: str
    attempt: int
    step: str
    message: str
    at: str


class Step(TypedDict):
    """One step of one attempt; `output` is null where it is another team's."""

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
    """A node of a rollout with everything that was done to it."""

    steps: list[Step]
    failure: Failure | None


class Why(TypedDict):
    """Why a node does not move; null when it does, or has arrived."""

    node: str
    phase: str
    reason: Reason | None


class LogLine(TypedDict):
    """One line of a node's log; `offset` is where the next one begins."""

    offset: int
    at: str
    kind: str
    text: str
    attempt: NotRequired[int]
    step: NotRequired[str]
    fields: NotRequired[dict[str, Any]]


class PlanContent(TypedDict):
    """A rollout's plan in its canonical form, what was pinned for it, and its hashes."""

    content: dict[str, Any]
    source: dict[str, str]
    digest: str
    hashes: Hashes


class Hashes(TypedDict):
    """The hashes of a plan's three parts, and of the whole: the digest."""

    change: str
    scope: str
    policy: str
    whole: str


class InFlightOf(InFlight):
    """A node in flight, and whose."""

    rollout: str


class EventLine(TypedDict):
    """One line of the event stream: an entry, or what runs now, or a sign of life.

    `heartbeat` is the sequence number up to which everything was told.
    """

    seq: int | None
    entry: NotRequired[dict[str, Any]]
    progress: NotRequired[list[InFlightOf]]
    heartbeat: NotRequired[int]


class PreviewTarget(TypedDict):
    """A node that the plan would change; `cannot_start` says why it could not now."""

    node: str
    team: str | None
    pools: list[str]
    wave: str
    position: int
    cannot_start: Reason | None


class PreviewWave(TypedDict):
    """A wave and its nodes, in order."""

    wave: str
    nodes: list[str]
    max_parallel: int | None
    soak_s: float
    gate: str | None


class PreviewPool(TypedDict):
    """A pool that targets of the plan are in; `members` counts all known nodes."""

    pool: str
    targets: int
    members: int
    max_unavailable: int


class Answerers(TypedDict):
    """Who may answer at a gate: the owners, and the members of each team that owns a target."""

    owner: list[str]
    teams: dict[str, list[str]]


class PreviewNeeds(TypedDict):
    """How many votes a gate wants."""

    owner: int
    each_team: int
    four_eyes: bool


class PreviewGate(TypedDict):
    """A gate and who may answer it."""

    gate: str
    needs: PreviewNeeds
    answerable_by: Answerers


class Preview(TypedDict):
    """What a plan would do, without opening a rollout."""

    targets: list[PreviewTarget]
    waves: list[PreviewWave]
    pools: list[PreviewPool]
    gates: list[PreviewGate]
    not_looked_at: list[str]
    digest: str
    hashes: Hashes
    warnings: list[str]


class Upload(TypedDict):
    """The content hash of an uploaded tree."""

    upload: str


class InventoryNode(TypedDict):
    """A known node, where it is known from, and what was last seen of it."""

    node: str
    kind: str
    team: str | None
    labels: dict[str, str]
    pools: list[str]
    sources: list[str]
    sight: str
    seen_at: str | None
    why: str | None


class Source(TypedDict):
    """An inventory source and how its last refresh went."""

    source: str
    refreshed_at: str | None
    nodes: int
    error: str | None


class Inventory(TypedDict):
    """All known nodes and where they come from."""

    nodes: list[InventoryNode]
    sources: list[Source]


class Refreshing(TypedDict):
    """The inventory sources that are being asked again."""

    sources: list[str]


class Audit(TypedDict):
    """A page of the audit; `next` is the `after` of the next page, null at the end."""

    entries: list[AuditEntry]
    next: int | None


class Verdict(TypedDict):
    """Whether the audit's chain is whole; `first_bad` is the first entry that is not."""

    ok: bool
    entries: int
    head: str
    first_bad: int | None
    message: str


class AuditEntry(TypedDict):
    """One audit entry; `entry` is what was hashed, parsed: its instants are epoch seconds, `at` is not."""

    seq: int
    at: str
    hash: str
    entry: dict[str, Any]


class Head(TypedDict):
    """The latest audit entry; its hash, kept elsewhere, shows later whether the tail was cut."""

    seq: int
    hash: str
    at: str | None


class Error(TypedDict):
    """Why a request was not carried out."""

    error: str
    code: str
    errors: list[Mistake]
