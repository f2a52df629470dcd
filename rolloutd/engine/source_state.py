"""What the daemon knows of each inventory source, and shows of it."""

from __future__ import annotations

from dataclasses import dataclass

from machines.model.node import SourceFreshness
from rolloutd import ports


@dataclass(frozen=True, slots=True)
class HeldAnswer:
    """What an answer that waits for a person would do to the nodes of its source, by the source's names.

    `known` counts the nodes of the answer in effect.
    """

    at: float
    known: int
    removed: tuple[str, ...]


@dataclass(slots=True)
class SourceState:
    """An inventory source: its last answer in effect, and how the last refresh went.

    `refreshed_at` may be of an earlier daemon; `has_answered` is since the start of this one.
    """

    source: str
    refreshed_at: float | None = None
    nodes: int = 0
    error: str = ""
    failing_since: float | None = None
    tried_at: float | None = None
    """When this daemon last queried it to the end, whatever came of it."""
    has_answered: bool = False
    stale_after_s: float = ports.DEFAULT_STALE_AFTER_S
    held: HeldAnswer | None = None

    @property
    def freshness(self) -> SourceFreshness:
        return SourceFreshness(self.source, self.refreshed_at, self.stale_after_s, self.held is not None)
