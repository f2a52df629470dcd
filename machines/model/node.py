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
"""The pool value of a node that lacks the pool's label key."""

_DIGITS = re.compile(r"(\d+)")
_SORT_KEY_CACHE_SIZE = 65_536
"""Sort keys kept: the names of a large fleet, a few megabytes."""


class NodeKind(StrEnum):
    HOST = "host"
    KUBERNETES = "kubernetes"


@dataclass(frozen=True, slots=True)
class Node:
    """One maintenance target; the union of what all inventory sources report of its name."""

    name: str
    kind: NodeKind = NodeKind.HOST
    sources: tuple[str, ...] = ()
    labels: Mapping[str, str] = ()  # type: ignore[assignment]  # replaced in __post_init__; keeps the value hashable-free but shareable

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", dict(self.labels))

    @property
    def team(self) -> str | None:
        """The team that owns the node: its label `team`."""
        return self.labels.get("team")


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
    """

    node: str
    sight: NodeHealth
    at: float
    why: str = ""
    cordoned_by_other: bool = False
    left_isolated_by: str = ""
    is_leaving: bool = False


def pools_of(labels: Mapping[str, str], keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the pool ids `key/value` of a node under each pool key, in key order."""
    return tuple(f"{key}/{labels.get(key, UNLABELED)}" for key in keys)


@lru_cache(maxsize=_SORT_KEY_CACHE_SIZE)
def natural_sort_key(name: str) -> tuple[tuple[str, int, str], ...]:
    """Return a sort key that puts n2 before n10."""
    parts = _DIGITS.split(name)
    numbered = [(text, int(digits), digits) for text, digits in zip(parts[0::2], parts[1::2], strict=False)]
    return (*numbered, (parts[-1], -1, ""))
