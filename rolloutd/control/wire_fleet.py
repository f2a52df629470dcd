"""JSON shapes of what the API answers about slots, nodes, teams and settings."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

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


class Locks(TypedDict):
    """All pools, holds and freezes, as of audit entry `seq`."""

    pools: list[PoolSlots]
    holds: list[Hold]
    freezes: list[Freeze]
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


class HeldAnswer(TypedDict):
    """An answer of a source that waits for an admin: what it would remove and move, of `known` nodes."""

    at: str
    known: int
    removed: list[str]
    moved: list[str]


class InventorySourceStatus(TypedDict):
    """An inventory source and the age of its last answer in effect; if `stale`, no node of it starts."""

    source: str
    refreshed_at: str | None
    age_s: float | None
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
