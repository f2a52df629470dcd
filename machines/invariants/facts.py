"""The facts that the invariants read; an Index offers them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from machines.facts.counters import RolloutCounters
from machines.facts.node_work import WorkFacts
from machines.facts.pending_groups import QueuePosition
from machines.facts.pool_index import Pool
from machines.model.events import Event, PhaseMoved
from machines.model.limits import Limits, TeamRules
from machines.model.node import Node, Observation, SourceFreshness, pool_value
from machines.model.preparation import Preparation, StagedComparison
from machines.model.rollout import Failure, Rollout, Target
from machines.model.traffic import TrafficResult
from machines.model.windows import Freeze
from machines.states import IN_FLIGHT_PHASES, Phase


class InvariantFacts(WorkFacts, Protocol):
    @property
    def limits(self) -> Limits: ...
    @property
    def nodes(self) -> Mapping[str, Node]: ...
    @property
    def rollouts(self) -> Mapping[str, Rollout]: ...
    @property
    def worked_on(self) -> Mapping[str, float]: ...
    @property
    def changed_values(self) -> Mapping[tuple[str, str], tuple[tuple[str, str, str], ...]]: ...
    @property
    def freezes(self) -> Sequence[Freeze]: ...
    @property
    def team_rules(self) -> Mapping[str, TeamRules]: ...
    @property
    def sources(self) -> Mapping[str, SourceFreshness]: ...
    def targets(self, rollout: str) -> Iterable[Target]: ...
    def target(self, rollout: str, node: str) -> Target: ...
    def preparation(self, rollout: str, node: str, stage: str) -> Preparation | None: ...
    def observation(self, node: str) -> Observation | None: ...
    def traffic_of(self, rollout: str, node: str) -> TrafficResult | None: ...
    def staged_comparison(self, rollout: str, node: str) -> StagedComparison | None: ...
    def pool(self, pool: str) -> Pool: ...
    def counters(self, rollout: str) -> RolloutCounters: ...
    def all_done(self, rollout: str) -> bool: ...
    def pending(self, rollout: str, wave: str) -> Sequence[QueuePosition]: ...
    def wave_end(self, rollout: str, wave: str) -> float | None: ...
    @property
    def recounted_failures(self) -> dict[str, list[Failure]]: ...


class EarlierEvents:
    """What the events of a commit before the judged one have done, which the facts do not have yet."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.begun: dict[str, None] = {}
        """The nodes that come in flight, in order."""
        self.failed: set[str] = set()
        self._begun_by_pool: dict[str, _BegunByValue] = {}
        for event in events:
            self.add(event)

    def add(self, event: Event) -> None:
        if isinstance(event, PhaseMoved) and event.target in IN_FLIGHT_PHASES:
            self.begun[event.node] = None
        elif isinstance(event, PhaseMoved) and event.target is Phase.FAILED:
            self.failed.add(event.node)

    def begun_in(self, facts: InvariantFacts, key: str, value: str) -> int:
        """Return how many nodes of a pool come in flight that the facts do not count as down."""
        found = self._begun_by_pool.setdefault(key, _BegunByValue())
        # Each node once for each key: a commit may admit thousands, and each is judged after all before it.
        for node in islice(self.begun, found.seen, None):
            label = pool_value(facts.nodes[node].labels, key)
            pool = facts.pool(f"{key}/{label}")
            found.counts[label] += node not in pool.down and node not in pool.unknown
        found.seen = len(self.begun)
        return found.counts[value]


@dataclass(slots=True)
class _BegunByValue:
    seen: int = 0
    counts: Counter[str] = field(default_factory=Counter)
