"""Nodes at work in a walk: their attempts and prepare stages, what each does now, and their outages.

It decides nothing: when an attempt waits for another in its outage, the workflow says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from machines.forecast.timeline import Waits
from machines.model.actions import Action, Wait
from machines.model.plan import Plan
from machines.model.rollout import Target
from machines.model.step_record import StepRecord
from machines.workflow.records import upsert

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


@dataclass(slots=True)
class Lane:
    """One node at work: its plan, its records, and what it does now.

    `kind` is what nodes have in common that take the same steps if each step takes as long; None for a node
    with a past.  `passed` is when each of its steps has ended, from `began_at` on, and how.
    """

    plan: Plan
    records: tuple[StepRecord, ...]
    began_at: float
    kind: tuple[object, ...] | None = None
    passed: tuple[tuple[float, str], ...] = ()
    action: Action | None = None

    def add(self, record: StepRecord) -> None:
        self.records = upsert(self.records, record)
        # To the millisecond: the same durations at other instants differ by a rounding.
        self.passed += ((round(record.at - self.began_at, 3), record.state),)


def kind_of(target: Target, plan: Plan) -> tuple[object, ...]:
    """Return what next_action() reads of a node without records, other than times."""
    # The plan of a node is its rollout's, but for the items that do not apply to it.
    specs = (*plan.traffic, *plan.isolate, *plan.verify, *(plan.guard.confirm if plan.guard else ()))
    names = tuple(spec.name for spec in specs)
    return target.rollout, target.attempt, target.isolated, names


def later_by(action: Action, seconds: float) -> Action:
    return replace(action, until=action.until + seconds) if isinstance(action, Wait) else action


@dataclass(slots=True)
class WalkedOutages:
    """The outages of all nodes; instants are epoch seconds."""

    began_at: float
    count: int = 0
    """How many began in the walk."""
    downtime_s: float = 0.0
    """How long nodes were isolated, all together, up to the end of each outage."""
    moved: set[str] = field(default_factory=set)
    """The nodes on which an attempt that waits for another may do more since the last decision."""
    _waiting: dict[NodeKey, float] = field(default_factory=dict)
    _isolated_since: dict[str, float] = field(default_factory=dict)

    def isolate(self, node: str, now: float) -> None:
        self.count += 1
        self._isolated_since[node] = now

    def end(self, node: str, now: float) -> None:
        self.downtime_s += now - self._isolated_since.pop(node, self.began_at)

    def wait(self, key: NodeKey, now: float) -> None:
        """Note that an attempt waits for another one."""
        self._waiting.setdefault(key, now)

    def resume(self, key: NodeKey) -> float | None:
        """Note that an attempt continues; return since when it has waited, None if it has not."""
        return self._waiting.pop(key, None)

    def take_woken(self, at_work: Iterable[NodeKey]) -> Iterator[NodeKey]:
        """Yield the attempts that are to be asked again after a decision, of those at work.

        One that is alone on its node waits for a rollout that may join, so it depends on all decisions.
        """
        if self._waiting:
            moved, self.moved = self.moved, set()
            attempts_on = Counter(node for _, node in at_work)
            for key in list(self._waiting):
                if key[1] in moved or attempts_on[key[1]] == 1:
                    yield key
