"""A forecast as values: what it assumes, and when what happens.

All instants are epoch seconds, all durations seconds.  It has no sentences: the shell renders codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from machines.forecast.contention import Contention
from machines.model.plan import GateName
from machines.model.reasons import Params, ReasonCode
from machines.model.step_record import StepAction


class RandomSource(Protocol):
    """A seeded generator, such as `random.Random`; the core makes none of its own."""

    def random(self) -> float:
        """Return the next number from 0 up to, but not, 1."""
        ...


@dataclass(frozen=True, slots=True)
class Deviation:
    """By how much something may be longer or shorter than expected, as a share of it.

    `share`: the standard deviation, by the t-distribution with so many degrees of freedom.
    """

    share: float = 0.0
    freedom: int = 1


StepDurations = Callable[[str, str, str, StepAction], Sequence[float]]
"""Returns the durations, all equally likely, of a step: of a rollout, a node, a step and its action.

One value is a known duration.  The step is named as in its record, `run.configure` or `isolate.0.command`.
A prepare stage is asked for by its name, with the action RUN.
"""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What a forecast cannot know.

    `approve_after_s`: how long after it is asked a gate gets its votes, None for never.  `failure_rate`: the
    share of attempts that fail; then the rollout waits for its proceed votes, and the node is tried again.
    `busy_s` returns how long a node of a rollout that is probed stays busy, None if nothing is known of it;
    `busy_nodes` is of how many nodes that is known.  `parallel_runs`: how many runs the runner executes at
    once.  `contention`: how much longer they take then.  `common_deviation`: how much longer or shorter all
    steps together may take than those that their durations are from.  `are_samples`: the durations are
    samples, so their mean is as uncertain as their number says; else they are the whole truth.
    """

    approve_after_s: float | None = 0.0
    failure_rate: float = 0.0
    busy_s: Callable[[str, str], float | None] | None = None
    busy_nodes: int = 0
    parallel_runs: float = math.inf
    contention: Contention = Contention()
    common_deviation: Deviation = Deviation()
    are_samples: bool = False


class AssumptionCode(StrEnum):
    """What the sentence of an assumption is about; the values are documented and do not change."""

    APPROVE_AFTER = "approve-after"
    """`after_s`: when a gate gets its votes, None for never."""
    FAILURE_RATE = "failure-rate"
    """`rate`: the share of attempts that fail."""
    NODES_HEALTHY = "nodes-healthy"
    """`nodes`: how many nodes are not known to be up, and are taken to be."""
    TRAFFIC_IDLE = "traffic-idle"
    """Nodes with traffic probes are taken to be idle, because nothing is known of how long they are busy."""
    TRAFFIC_HISTORY = "traffic-history"
    """`nodes`: how many nodes are known that were probed; each node is busy for as long as one of them."""
    PARALLEL_RUNS = "parallel-runs"
    """`runs`: how many the runner executes at once; `longer`: by what share so many take longer than one."""
    COMMON_DEVIATION = "common-deviation"
    """`share`: by how much all steps together may differ from those before, as a standard deviation."""
    ORDER_OF_ONE_WALK = "order-of-one-walk"
    """All draws start nodes in the order of one walk with typical durations."""
    FEWER_DRAWS = "fewer-draws"
    """`draws`: how many there are, because `nodes` are ahead."""
    NO_BOTTLENECK = "no-bottleneck"
    """None is searched, because `nodes` are ahead."""
    HORIZON = "horizon"
    """`until`: later than this nothing is forecast."""


@dataclass(frozen=True, slots=True)
class Assumption:
    """One assumption that a forecast was made under."""

    code: AssumptionCode
    params: Params = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Spread:
    """The median and the 90th percentile of the draws; None where in so many draws it never happens."""

    p50: float | None
    p90: float | None


@dataclass(frozen=True, slots=True)
class NodeForecast:
    """When a node's attempt begins and when it is back in service for good.

    `starts_at` of a node that has begun is the instant at which it did.  `waits`: how long it waits for what
    before it starts, by the walk with typical durations; of one that never starts, until the horizon.
    """

    node: str
    starts_at: Spread
    ends_at: Spread
    waits: Mapping[ReasonCode, float]


@dataclass(frozen=True, slots=True)
class GateForecast:
    """When the votes of a gate are asked for; `wave` distinguishes the continue gates."""

    gate: GateName
    wave: str
    asked_at: Spread


class BottleneckKind(StrEnum):
    POOL = "pool"
    """A pool, by its id; one more of its nodes may be unavailable."""
    MAX_PARALLEL = "max-parallel"
    """The rollout's or its wave's limit, by its name, or the fleet's (`fleet`); one more may be in flight."""
    RUNNER = "runner"
    """The runner, by the name `runner`; it executes one more run at once.

    A runner elsewhere, or an inventory with workers, by its name; one more of its nodes may be in flight.
    """
    WINDOW = "window"
    """The windows of the plan or of a team, by `plan` or `team/NAME`; they are always open."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What nodes wait for longest, and how much earlier the rollout ends with one more slot there."""

    kind: BottleneckKind
    name: str
    saves_s: float


@dataclass(frozen=True, slots=True)
class TrainForecast:
    """What a train saves from now on: outages, and seconds for which nodes are isolated, all together.

    `downtime_saved_s` is negative where nodes wait for each other longer than they save.
    """

    train: str
    outages_saved: int
    downtime_saved_s: float


@dataclass(frozen=True, slots=True)
class RolloutForecast:
    """What happens to one rollout, while all open rollouts are walked together.

    `ends_at`: when its last node is back in service and its last soak over.  `stays_open`: it does not end
    then, because its plan keeps checking for drift.  `work_s`: from `made_at` to `ends_at`.  `waits`: those
    of its nodes added up.  `nodes` has those that are not done, by their position.
    """

    rollout: str
    made_at: float
    draws: int
    assumptions: tuple[Assumption, ...]
    ends_at: Spread
    work_s: Spread
    nodes: tuple[NodeForecast, ...]
    gates: tuple[GateForecast, ...]
    waits: Mapping[ReasonCode, float]
    bottleneck: Bottleneck | None = None
    train: TrainForecast | None = None
    stays_open: bool = False
