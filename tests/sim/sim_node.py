"""What is on one node of the simulated world: its isolation, its runs and its guard."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from machines.model.node import NodeKind
from rolloutd.ports import Checkpoint, Failed, GuardState, Ok, RunRequest, Unknown

REPAIR_NOTICED_S = 300.0
"""So long after a staged file was repaired another stage may begin because of the damage."""

UNDO_REPEAT_S = 120.0
"""So long after an undo it may be repeated, because its answer was lost."""


@dataclass(slots=True)
class IsolationFlag:
    """One way of being out of service: `foreign` when another operator said so first.

    While it is only `gentle` new work stays away and nothing was driven off.
    `lost_at` is when an operator last undid what we had done, by the monotonic clock;
    `kept` says that we have left it set for whoever held the node.
    """

    is_set: bool = False
    cordon_only: bool = False
    set_by_other: bool = False
    set_by_rollout: str = ""
    undone_by_other_at: float = -math.inf
    left_for_hold: bool = False


@dataclass(slots=True)
class SimRun:
    """One run: its wrapper on the daemon's machine and its work on the node."""

    handle: str
    request: RunRequest
    claimed_by: str = ""
    has_wrapper: bool = True
    result: Ok | Failed | Unknown | None = None
    percent: float = 0.0
    would_change: bool = False
    ignored_signals: int = 0
    """How often its work on the node survives an attempt to end it."""


@dataclass(slots=True)
class SimNode:
    """A node: `red` keeps its checks from passing, `stuck` keeps its isolation from ending.

    `traffic` is what its clients do there; while it is `blind` nobody can say.
    """

    name: str
    labels: dict[str, str]
    up: bool = True
    fails_checks: bool = False
    stuck: bool = False
    traffic: bool = False
    traffic_unknown: bool = False
    listed: bool = True
    disputed: bool = False
    """Whether the inventory has it as offline, though it serves."""
    listed_as: str = ""
    """Another name that the inventory has for it."""
    has_twin: bool = False
    """Whether the inventory has another object of its name."""
    has_address: bool = True
    """Whether the inventory has a valid address of it."""
    kind: NodeKind = NodeKind.KUBERNETES
    """Of the kind to which every item of the plans applies, unless it is a cluster."""
    initialized: bool = True
    available: bool = True
    paused: bool = False
    endpoint: str = ""
    """A field of the cluster's object, which plans take as a value."""
    version: str = "old"
    isolation_flags: dict[str, IsolationFlag] = field(default_factory=dict)
    runs: dict[str, SimRun] = field(default_factory=dict)
    check_runs: list[SimRun] = field(default_factory=list)
    is_inspected: bool = False
    undone_at: float = -UNDO_REPEAT_S
    staged: set[str] = field(default_factory=set)
    damaged: dict[str, float] = field(default_factory=dict)
    """The staged files that are not whole, and since when by the monotonic clock."""
    repaired_at: float = -math.inf
    checkpoints: dict[tuple[str, str], Checkpoint] = field(default_factory=dict)
    service_starts: int = 1
    """How often its service was started: a stage that starts it again disturbs it."""

    def was_damaged_at(self, now: float) -> bool:
        """Return whether a staged file is damaged, or was until a moment ago: a stage may be on its way."""
        return bool(self.damaged) or now < self.repaired_at + REPAIR_NOTICED_S

    def checks_of(self, epoch: int) -> list[str]:
        """Return its runs in check mode that a daemon of the term has begun and that have not ended."""
        # Those of an earlier daemon end by themselves, and nobody uses their results.
        self.check_runs = [run for run in self.check_runs if run.has_wrapper and run.result is None]
        return [run.handle for run in self.check_runs if f".check-{epoch}-" in run.handle]

    def isolation_flag(self, kind: str) -> IsolationFlag:
        """Return one kind of isolation."""
        return self.isolation_flags.setdefault(kind, IsolationFlag())

    @property
    def status(self) -> str:
        """What the inventory says of its life."""
        if self.kind is not NodeKind.CLUSTER:
            return "offline" if self.disputed else "active"
        if not self.initialized:
            return "planned"
        if self.paused:
            return "paused"
        return "active" if self.up and not self.disputed else "offline"

    @property
    def cordoned_by_other(self) -> bool:
        """Whether it is out of service, and not for a rollout of ours."""
        return self.paused or any(
            bit.set_by_other or bit.left_for_hold for bit in self.isolation_flags.values()
        )

    @property
    def left_isolated_by(self) -> str:
        """The kind of isolation that was left standing for whoever held the node."""
        return next((kind for kind, bit in self.isolation_flags.items() if bit.left_for_hold), "")

    @property
    def isolating_rollouts(self) -> set[str]:
        """The rollouts whose isolation stands."""
        return {bit.set_by_rollout for bit in self.isolation_flags.values() if bit.set_by_rollout}


@dataclass(slots=True)
class SimGuard:
    """A guard on a node: what it keeps, and until when it waits (monotonic)."""

    node: str
    version: str
    after_s: float
    deadline: float
    state: GuardState = GuardState.ARMED
    by: str = ""
    """What restored the node: `timer` or `daemon`."""
