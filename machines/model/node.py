"""A node as values: name, labels and last observation.

It knows no connection: address, user and key belong to the shell.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

UNLABELED = "none"

_DIGITS = re.compile(r"(\d+)")
_POOL_ID_CACHE_SIZE = 65_536
"""Pools whose id is one object: more than the largest fleets have."""

NO_IDENTITY: Mapping[str, str] = {}
"""The pinned identity of each node without one."""

_SORT_KEY_CACHE_SIZE = 2_048
"""Sort keys kept, 0.5 MiB: more than the nodes of which a decision or a status asks again."""


class NodeKind(StrEnum):
    HOST = "host"
    KUBERNETES = "kubernetes"
    CLUSTER = "cluster"
    """A whole cluster: it is known by its management cluster, and ssh does not reach it."""


class ConflictKind(StrEnum):
    """What the inventory sources contradict each other in. The values are documented and do not change."""

    OWNERS_DIFFER = "owners-differ"
    POOLS_DIFFER = "pools-differ"
    NOT_REPORTED = "not-reported"
    """A source that is expected to report the node does not."""
    IDENTITY_CHANGED = "identity-changed"
    """The host key, the machine id or the cluster id is not the one that was pinned for the name."""
    ADDRESS_SHARED = "address-shared"
    OUT_OF_SERVICE = "out-of-service"
    """A source has the node as planned or offline."""
    MACHINE_ID_SHARED = "machine-id-shared"
    MOVE_DEFERRED = "move-deferred"
    """The node is in flight, and moves to the pool that its sources report at the end of its attempt."""
    PROVIDER_ID_SHARED = "provider-id-shared"
    RENAMED = "renamed"
    """A source has another name for the object."""
    NAME_SHARED = "name-shared"
    """A source has several objects of the name."""
    INVALID = "invalid"
    """A source's record of the node is not valid; the last valid one counts."""
    REMOVED_IN_FLIGHT = "removed-in-flight"
    """No source reports the node, which was in flight when the last one ceased to."""


WARNINGS = frozenset({ConflictKind.MACHINE_ID_SHARED, ConflictKind.MOVE_DEFERRED})
"""Conflicts that are shown and quarantine no node: clones of one image share a machine id."""

ACCEPTED_BY_PIN = frozenset(
    {ConflictKind.IDENTITY_CHANGED, ConflictKind.RENAMED, ConflictKind.REMOVED_IN_FLIGHT}
)
"""Conflicts that an admin ends by accepting what the sources report of the node now."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """A contradiction between the sources about a node, since an instant (epoch seconds).

    `about` is the label key, the identity, the address or the source that it is about.  `values` are what was
    reported, by source; for a shared address or machine id the other nodes.
    """

    kind: ConflictKind
    about: str
    values: Mapping[str, str]
    since: float

    @property
    def is_warning(self) -> bool:
        return self.kind in WARNINGS


@dataclass(frozen=True, slots=True)
class SourceFreshness:
    """When an inventory source last reported its nodes (epoch seconds), None for never.

    `is_held`: a newer answer waits for a person's decision.
    """

    source: str
    refreshed_at: float | None
    stale_after_s: float
    is_held: bool

    def is_stale(self, now: float) -> bool:
        """Return whether the last answer is too old to start a node by it, or from the future."""
        return self.refreshed_at is None or abs(now - self.refreshed_at) >= self.stale_after_s


@dataclass(frozen=True, slots=True)
class Node:
    """One maintenance target; the union of what all inventory sources report of its name.

    `identity` has the host key, the machine id and the cluster id that were pinned for the name.
    """

    name: str
    kind: NodeKind = NodeKind.HOST
    sources: tuple[str, ...] = ()
    labels: Mapping[str, str] = ()  # type: ignore[assignment]  # replaced in __post_init__; keeps the value hashable-free but shareable
    conflicts: tuple[Conflict, ...] = ()
    identity: Mapping[str, str] = ()  # type: ignore[assignment]  # as labels

    def __post_init__(self) -> None:
        # A dict stays the one that the source reported: each node has labels, and no code writes to them.
        if type(self.labels) is not dict:
            object.__setattr__(self, "labels", dict(self.labels))
        if type(self.identity) is not dict:
            object.__setattr__(self, "identity", dict(self.identity) if self.identity else NO_IDENTITY)

    @property
    def quarantined(self) -> bool:
        """Whether the sources contradict each other so that the node must not be maintained."""
        return any(not each.is_warning for each in self.conflicts)

    @property
    def team(self) -> str | None:
        """The team that owns the node: its label `team`; no text is no team."""
        return self.labels.get("team") or None


class NodeHealth(StrEnum):
    UP = "up"
    DOWN = "down"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of a node at an instant (epoch seconds); `why` is for people.

    `cordoned_by_other`: a cordon that is not ours; it takes a slot of the pool and is never consent.
    `left_isolated_by`: the isolator that left the node out of service for a hold, and returns it after the
    hold.  `is_leaving`: the owner is removing the node from the fleet, so it is no outage of its peers.
    `is_locked`: another tool works on the node by a lock of its own; it counts as a cordon of others.
    `watch`: the watch that reported it, and that confirms all that it has reported at once; empty without.
    """

    node: str
    sight: NodeHealth
    at: float
    why: str = ""
    cordoned_by_other: bool = False
    left_isolated_by: str = ""
    is_leaving: bool = False
    is_locked: bool = False
    watch: str = ""

    @property
    def is_up(self) -> bool:
        """Whether the node was found in service, without a cordon of others."""
        return self.sight is NodeHealth.UP and not self.cordoned_by_other

    def says_the_same_as(self, other: Observation) -> bool:
        """Return whether both differ in their instants at most."""
        return (
            self.sight is other.sight
            and self.why == other.why
            and self.cordoned_by_other == other.cordoned_by_other
            and self.left_isolated_by == other.left_isolated_by
            and self.is_leaving == other.is_leaving
            and self.is_locked == other.is_locked
        )


def pool_value(labels: Mapping[str, str], key: str) -> str:
    """Return which pool under a key a node is in: `none` if it lacks the label, or has no text there."""
    return labels.get(key) or UNLABELED


def pools_of(labels: Mapping[str, str], keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the pool ids `key/value` of a node under each pool key, in key order."""
    return tuple([id_of_pool(key, pool_value(labels, key)) for key in keys])


@lru_cache(maxsize=_POOL_ID_CACHE_SIZE)
def id_of_pool(key: str, value: str) -> str:
    """Return the id of a pool: the same object for each of its nodes, of which a fleet has many."""
    return f"{key}/{value}"


@lru_cache(maxsize=_SORT_KEY_CACHE_SIZE)
def natural_sort_key(name: str) -> tuple[str | int, ...]:
    """Return a sort key that puts n2 before n10."""
    parts = _DIGITS.split(name)
    key: list[str | int] = []
    # With the digits as text too: n1 and n01 are equal as numbers, and an order must not be left to chance.
    for text, digits in zip(parts[0::2], parts[1::2], strict=False):
        key += (text, int(digits), digits)
    return (*key, parts[-1], -1, "")
