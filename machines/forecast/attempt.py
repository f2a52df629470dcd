"""One attempt of a node, or one prepare stage: what a walk has seen of it, and where it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from machines.forecast.timeline import Waits

NodeKey = tuple[str, str]
"""Rollout and node."""


@dataclass(slots=True)
class Attempt:
    """One attempt of a node, or one prepare stage of it: `stage` is "" for an attempt.

    `ends_at` is None as long as it has not ended.  `steps` are the durations that each of its steps may have,
    and the one that it had.  `needed_s`: the time that must be left in a window.
    """

    rollout: str
    node: str
    stage: str
    starts_at: float
    wave: str = ""
    team: str | None = None
    pools: tuple[str, ...] = ()
    is_running: bool = False
    is_rollback: bool = False
    needed_s: float = 0.0
    ends_at: float | None = None
    has_failed: bool = False
    steps: list[tuple[Sequence[float], float]] = field(default_factory=list)
    waits: Waits = field(default_factory=dict)

    @property
    def key(self) -> NodeKey:
        return self.rollout, self.node
