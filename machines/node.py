"""A node as the core sees it: its name, its pools and what was last observed of it.

How a node is reached (address, user, key) is the shell's affair; the core never
sees a connection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

NO_LABEL = "none"
"""The pool value of a node that lacks the pool's label key."""

_DIGITS = re.compile(r"(\d+)")
_NAMES_KEPT = 65_536
"""Sort keys kept: the names of a large fleet, a few megabytes."""


class Kind(StrEnum):
    """What sort of maintenance target a node is."""

    HOST = "host"
    KUBERNETES = "kubernetes"


@dataclass(frozen=True, slots=True)
class Node:
    """One maintenance target, as the union of what the inventory sources say of it."""

    name: str
    kind: Kind = Kind.HOST
    sources: tuple[str, ...] = ()
    labels: Mapping[str, str] = ()  # type: ignore[assignment]  # replaced in __post_init__; keeps the value hashable-free but shareable

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", dict(self.labels))

    @property
    def team(self) -> str | None:
        """The team that owns the node: its label `team`."""
        return self.labels.get("team")


class Sight(StrEnum):
    """What an observer saw of a node."""

    UP = "up"
    DOWN = "down"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Observation:
    """What was seen of a node at an instant (epoch seconds); `why` is for people.

    `foreign` says that the node is out of service by somebody else's doing (a
    cordon we did not place): it occupies its pool's slot and is never consent.
    `kept` names the isolator that left it out of service because somebody held
    it when we were done with it, and puts it back once nobody does.
    """

    node: str
    sight: Sight
    at: float
    why: str = ""
    foreign: bool = False
    kept: str = ""


def pools_of(labels: Mapping[str, str], keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the pool ids `key/value` of a node under each pool key, in key order."""
    return tuple(f"{key}/{labels.get(key, NO_LABEL)}" for key in keys)


@lru_cache(maxsize=_NAMES_KEPT)
def natural(name: str) -> tuple[tuple[str, int, str], ...]:
    """Return a sort key by which n2 comes before n10."""
    parts = _DIGITS.split(name)
    numbered = [(text, int(digits), digits) for text, digits in zip(parts[0::2], parts[1::2], strict=False)]
    return (*numbered, (parts[-1], -1, ""))
