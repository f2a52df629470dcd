"""Models of the API's responses about slots, the inventory, changes and teams."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from rolloutd.control.audit.wire_audit import AuditEntry
from rolloutd.control.rollouts.wire import Reason, RolloutState, TeamVoteCount, VoteCount

ChangeState = Literal[
    "done",
    "drifted",
    "in-flight",
    "pending",
    "held",
    "failed",
    "unknown",
    "skipped",
    "replaced",
    "never",
]


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
    cluster_id: str | None
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


class Team(TypedDict):
    """A team: its settings, and the rules it set for itself (`own_...`)."""

    team: str
    members: list[str]
    windows: list[str]
    own_windows: list[str]
    canaries: list[str]
    own_canaries: list[str]
    freezes: list[Freeze]


class NodeChange(TypedDict):
    """A node and whether it has the change.

    `never`: no rollout brought it there or will.  `held`: pending, and a hold keeps the node.  `unknown`:
    nothing shows how its run ended.  `replaced`: it got another change of the plan since.
    """

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

    `version` is what people call it, `pin` the whole commit or digest.  `counts` and `groups` are over all
    nodes, `nodes` and `never` over those of the page.
    """

    plan: str
    change: str
    version: str
    pin: str
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
