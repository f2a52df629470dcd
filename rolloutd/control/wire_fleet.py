"""Models of the API's responses about slots, nodes, changes, teams and the daemon."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from rolloutd.control.wire import Reason, RolloutState, TeamVoteCount, VoteCount
from rolloutd.control.wire_audit import AuditEntry

ChangeState = Literal["done", "drifted", "in-flight", "pending", "failed", "skipped", "never"]

# -- slots, holds and freezes -------------------------------------------------


class SlotHolder(TypedDict):
    """A node that takes a slot, for a `rollout` or the hold (`source`, `id`).

    `state` is `why` without the node's name and the observation's age.  An `unobserved`
    node counts as down until it is observed, which happens before a peer starts.
    """

    node: str
    why: str
    state: str
    rollout: str | None
    source: str | None
    id: str | None
    since: str | None
    unobserved: bool


class PoolSlots(TypedDict):
    """A pool's slots and their holders; `down` includes the `unobserved`."""

    pool: str
    max_unavailable: int
    members: int
    down: int
    unobserved: int
    holders: list[SlotHolder]


class Hold(TypedDict):
    """A person or a tool outside the plans takes a node's slot."""

    node: str
    source: str
    id: str
    by: str
    reason: str
    at: str
    until: str | None


class Freeze(TypedDict):
    """Nothing starts in this scope: `all`, `team/NAME`, `node/NAME` or a pool."""

    id: str
    scope: str
    by: str
    reason: str
    at: str
    until: str | None


class RebootApproval(TypedDict):
    """One person's yes to the reboots of a group of machines."""

    by: str
    teams: list[str]
    reason: str
    at: str
    until: str


class RebootGate(TypedDict):
    """The gate of a group of machines that reboot themselves; each team's votes are for its own nodes."""

    group: str
    state: Literal["open", "waiting"]
    needs: RebootNeeds
    approvals: list[RebootApproval]
    missing: str | None


class RebootGates(TypedDict):
    """The gates of all groups that have one."""

    gates: list[RebootGate]


class RebootNeeds(TypedDict):
    owner: VoteCount
    teams: list[TeamVoteCount]


class RebootReason(TypedDict):
    """Why a machine may not reboot itself now; `reason` is null if it may."""

    group: str
    node: str
    reason: Reason | None


class Locks(TypedDict):
    """All pools, holds, freezes and gates of machines that reboot themselves, as of audit entry `seq`."""

    pools: list[PoolSlots]
    holds: list[Hold]
    freezes: list[Freeze]
    reboot_gates: list[RebootGate]
    seq: int


class ReleaseResponse(TypedDict):
    """How many holds or freezes were lifted; 0 is not an error."""

    lifted: int


# -- the inventory ------------------------------------------------------------


class NodeConflict(TypedDict):
    """What the sources contradict each other in about a node; a `warning` does not quarantine it."""

    kind: str
    about: str
    values: dict[str, str]
    text: str
    since: str
    warning: bool


class InventoryNode(TypedDict):
    """A known node, its sources and its last observation; a `quarantined` node does not start."""

    node: str
    kind: str
    team: str | None
    labels: dict[str, str]
    pools: list[str]
    sources: list[str]
    sight: str
    seen_at: str | None
    why: str | None
    quarantined: bool
    conflicts: list[NodeConflict]


class NodeReport(TypedDict):
    """What one source last reported of a node, and when."""

    source: str
    at: str | None
    name: str
    kind: str
    labels: dict[str, str]
    address: str
    provider_id: str | None
    machine_id: str | None
    host_key: str | None


class InventoryNodeDetail(TypedDict):
    """A known node, what each of its sources last reported, and what was pinned for its name."""

    node: InventoryNode
    pinned: dict[str, str]
    reports: list[NodeReport]


class ShellCommand(TypedDict):
    """The command that opens a shell on a node, word by word; the caller runs it as themselves."""

    node: str
    command: list[str]


class HeldAnswer(TypedDict):
    """An answer of a source that waits for an admin: what it would remove, of `known` nodes."""

    at: str
    known: int
    removed: list[str]


class InventorySourceStatus(TypedDict):
    """An inventory source and the age of its last answer in effect; if `stale`, no node of it starts.

    `tried_age_s` is the age of the last query that this daemon has ended, answered or not.
    """

    source: str
    refreshed_at: str | None
    age_s: float | None
    tried_age_s: float | None
    stale_after_s: float
    stale: bool
    nodes: int
    error: str | None
    failing_since: str | None
    held: HeldAnswer | None


class Inventory(TypedDict):
    """The known nodes by name, and their sources; `next` is the `after` of the next page, null at the end."""

    nodes: list[InventoryNode]
    sources: list[InventorySourceStatus]
    next: str | None


class RefreshResponse(TypedDict):
    """The sources that the daemon reads again."""

    sources: list[str]


# -- people, teams and settings -----------------------------------------------


class WhoAmI(TypedDict):
    """The caller, as the socket and the settings identify them."""

    user: str
    uid: int
    groups: list[str]
    teams: list[str]
    owner_of: list[str]
    admin: bool


class TeamSummary(TypedDict):
    """A team of the settings; `members` are user names and @groups, `checks` and `windows` are counts."""

    team: str
    members: list[str]
    checks: int
    windows: int
    canaries: list[str]


class Team(TypedDict):
    """A team: its settings, and the rules it set for itself (`own_...`)."""

    team: str
    members: list[str]
    windows: list[str]
    own_windows: list[str]
    canaries: list[str]
    own_canaries: list[str]
    freezes: list[Freeze]


class PoolKeySummary(TypedDict):
    """A label key that makes pools, and their default budget."""

    key: str
    max_unavailable: str


class SettingsSummary(TypedDict):
    """The settings' limits, admins and teams."""

    observe_only: bool
    max_parallel: int
    admins: list[str]
    teams: list[TeamSummary]
    pools: list[PoolKeySummary]


class LeftFile(TypedDict):
    """A fence, guard, checkpoint or artifact on a node; `found` would be removed, `reason` is why it is kept.

    With `what: node` the node as a whole is not clean.
    """

    node: str
    what: str
    path: str
    result: Literal["removed", "kept", "found"]
    reason: str | None


class CleanLine(TypedDict):
    """What ended rollouts left on one node, or a heartbeat."""

    kind: Literal["node", "heartbeat"]
    node: NotRequired[str]
    files: NotRequired[list[LeftFile]]


# -- what nodes remember of prepare stages ---------------------------------------


class CarriedArtifact(TypedDict):
    """An artifact that a checkpoint names, with its place on the node."""

    name: str
    version: str
    sha256: str
    path: str


class NodeCheckpoint(TypedDict):
    """A finished prepare stage, as the node remembers it."""

    plan: str
    stage: str
    content: str
    change: str
    rollout: str
    at: str
    artifacts: list[CarriedArtifact]


class NodeCheckpoints(TypedDict):
    """The checkpoints of a node; `text` says why they could not be read."""

    node: str
    text: str
    checkpoints: list[NodeCheckpoint]


class RolloutCheckpoints(TypedDict):
    """The checkpoints that a rollout's plan left on its nodes."""

    rollout: str
    nodes: list[NodeCheckpoints]


class ReportedArtifact(TypedDict):
    """An artifact that nodes should have: `expected` by the manifest, `found` on them ("" for none)."""

    site: str
    name: str
    expected: str
    found: str
    nodes: list[str]


class ArtifactReport(TypedDict):
    """Which digests the nodes of each site carry; `unreadable` nodes did not answer."""

    rollout: str
    artifacts: list[ReportedArtifact]
    unreadable: list[str]


# -- the matrix of changes and nodes -------------------------------------------


class NodeChange(TypedDict):
    """A node and whether it has the change; `never`: no rollout brought it there or will."""

    node: str
    state: ChangeState


class GroupChange(TypedDict):
    """How far a change is in a pool, team, site or cluster; `total` counts all known nodes."""

    group: str
    total: int
    done: int
    percent: float


class Change(TypedDict):
    """A plan's name and the hash of what it does; `rollouts` are those that bring it, latest first.

    `counts` and `groups` are over all nodes, `nodes` and `never` over those of the page.
    """

    plan: str
    change: str
    rollouts: list[str]
    percent: float
    counts: dict[ChangeState, int]
    nodes: list[NodeChange]
    groups: list[GroupChange]
    never: list[str]


class Changes(TypedDict):
    """All changes, latest first; `next` is the last node of the page, if more follow."""

    changes: list[Change]
    next: str | None


# -- the handover ---------------------------------------------------------------


class MissingVotes(TypedDict):
    """A gate that waits, and the votes it still needs."""

    gate: str
    wave: str | None
    missing: str


class HandoverRollout(TypedDict):
    """A rollout that changed since an instant, or waits: what happened, and what it waits for.

    `changed` counts the nodes that were changed since then; `failed` are those that failed and still are.
    """

    rollout: str
    plan: str
    state: RolloutState
    percent: float
    opened: bool
    ended: bool
    changed: int
    failed: list[str]
    reason: Reason | None
    gates: list[MissingVotes]


class Handover(TypedDict):
    """What happened since an instant, who decided, and what waits; `omitted`: some decisions are left out."""

    since: str
    until: str
    rollouts: list[HandoverRollout]
    decisions: list[AuditEntry]
    omitted: bool


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
