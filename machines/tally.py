"""The running counts of one rollout, kept by differences and never recounted.

They make a status of ten thousand nodes as cheap as one of ten.  This file
knows values only: what a count means for a gate or a wave is said elsewhere.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from machines.rollout import Target
from machines.states import BUSY, Outcome, Phase

EXPECTED_PERCENTILE = 90


@dataclass(slots=True)
class PoolTally:
    """What became of a rollout's targets in one pool; those that left are out of it."""

    total: int = 0
    done: int = 0
    failed: int = 0
    in_flight: int = 0


@dataclass(slots=True)
class Tally:
    """Counts of a rollout's targets: by phase, outcome, wave, team and pool.

    `busy` and `failed` name the nodes of those phases; `durations` are the
    seconds that changed nodes took, in order of length.
    """

    phases: Counter[Phase] = field(default_factory=Counter)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    teams: Counter[str] = field(default_factory=Counter)
    waves: dict[str, Counter[Phase]] = field(default_factory=dict)
    pools: dict[str, PoolTally] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    durations: list[float] = field(default_factory=list)

    def gather(self, targets: Iterable[Target]) -> None:
        """Count many targets in: the durations are put in order once, not once for each."""
        for target in targets:
            self._count(target, 1)
            if target.outcome is Outcome.CHANGED and target.admitted_at:
                self.durations.append(target.since - target.admitted_at)
        self.durations.sort()

    def count(self, target: Target, by: int) -> None:
        """Count a target in (`by` 1) or out (`by` -1)."""
        self._count(target, by)
        self._time(target, by)

    def _count(self, target: Target, by: int) -> None:
        self.phases[target.phase] += by
        self.waves.setdefault(target.wave, Counter())[target.phase] += by
        if target.outcome is not None:
            self.outcomes[target.outcome] += by
        if target.outcome is not Outcome.LEFT:
            self._count_teams(target, by)
            self._count_pools(target, by)
        self._name(target, by)

    @property
    def left(self) -> int:
        """Targets that left the inventory: out of every total."""
        return self.outcomes[Outcome.LEFT]

    @property
    def skipped(self) -> int:
        """Targets that were skipped or rolled back."""
        return self.outcomes[Outcome.SKIPPED] + self.outcomes[Outcome.ROLLED_BACK]

    @property
    def done(self) -> int:
        """Targets that carry the change."""
        return self.outcomes[Outcome.CHANGED] + self.outcomes[Outcome.ALREADY_CURRENT]

    def expected_s(self, otherwise: float) -> float:
        """Return how long a node takes: the 90th percentile of those that are done."""
        if not self.durations:
            return otherwise
        return self.durations[-(-len(self.durations) * EXPECTED_PERCENTILE // 100) - 1]

    def _count_teams(self, target: Target, by: int) -> None:
        if target.team is not None:
            self.teams[target.team] += by
            if not self.teams[target.team]:
                del self.teams[target.team]

    def _count_pools(self, target: Target, by: int) -> None:
        for pool in target.pools:
            tally = self.pools.setdefault(pool, PoolTally())
            tally.total += by
            if target.phase is Phase.DONE:
                tally.done += by
            elif target.phase is Phase.FAILED:
                tally.failed += by
            elif target.phase in BUSY:
                tally.in_flight += by
            if not tally.total:
                del self.pools[pool]

    def _name(self, target: Target, by: int) -> None:
        if target.phase in BUSY:
            (self.busy.add if by > 0 else self.busy.discard)(target.node)
        elif target.phase is Phase.FAILED:
            (self.failed.add if by > 0 else self.failed.discard)(target.node)

    def _time(self, target: Target, by: int) -> None:
        if target.outcome is not Outcome.CHANGED or not target.admitted_at:
            return
        took = target.since - target.admitted_at
        if by > 0:
            insort(self.durations, took)
        else:
            del self.durations[bisect_left(self.durations, took)]
