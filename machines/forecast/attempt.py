"""What a walk has seen of one attempt of a node, or of one prepare stage."""

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
    of which `steps_s` were taken in all.  `needed_s`: the time that must be left in a window.
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
    steps: list[Sequence[float]] = field(default_factory=list)
    steps_s: float = 0.0
    waits: Waits = field(default_factory=dict)

    @property
    def key(self) -> NodeKey:
        return self.rollout, self.node
