"""One attempt of a node, or one prepare stage: what a walk has seen of it, and where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from machines.forecast.timeline import Waits

NodeKey = tuple[str, str]
"""Rollout and node."""


@dataclass(slots=True)
class WalkedStep:
    """One step of an attempt: the durations that it may have, and the one that it had.

    The duration is one of `durations`, multiplied by `stretch` where other runs delayed it.  `is_run`: it
    waited for a slot of the runner from `asked_at` to `began_at`.
    """

    durations: Sequence[float]
    duration_s: float
    asked_at: float
    began_at: float
    is_run: bool = False
    stretch: float = 1.0

    @property
    def ends_at(self) -> float:
        return self.began_at + self.duration_s


@dataclass(slots=True)
class Attempt:
    """One attempt of a node, or one prepare stage of it: `stage` is "" for an attempt.

    `ends_at` is None as long as it has not ended.  `needed_s`: the time that must be left in a window.
    `bounds`: how many nodes may be in flight at its runner, and at the inventories with workers, by name.
    `outage_of`: the attempt that began the outage which this one has joined.
    """

    rollout: str
    node: str
    stage: str
    starts_at: float
    wave: str = ""
    team: str | None = None
    pools: tuple[str, ...] = ()
    bounds: Mapping[str, int] = field(default_factory=dict)
    is_running: bool = False
    is_rollback: bool = False
    outage_of: Attempt | None = None
    needed_s: float = 0.0
    ends_at: float | None = None
    has_failed: bool = False
    steps: list[WalkedStep] = field(default_factory=list)
    waits: Waits = field(default_factory=dict)

    def runner_wait_s(self, since: float) -> float:
        """Return how long it waited for slots of the runner from an instant on."""
        return sum(max(0.0, step.began_at - max(step.asked_at, since)) for step in self.steps if step.is_run)

    @property
    def key(self) -> NodeKey:
        return self.rollout, self.node

    @property
    def outage(self) -> int:
        """What names its outage: the id() of the attempt that began it."""
        return id(self if self.outage_of is None else self.outage_of)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an attempt: its begin, a run, or what follows a wait for another attempt on the node.

    `step` is the number of its first step; it waited from `asked_at` to `began_at`.
    """

    attempt: Attempt
    step: int
    asked_at: float
    began_at: float
    is_run: bool = False
