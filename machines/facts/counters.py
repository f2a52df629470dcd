"""The running counts of one rollout, updated by differences.

They make the status of ten thousand nodes as cheap as that of ten.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field, fields, replace

from machines.model.rollout import NodeOrder, Target
from machines.states import CARRIES_CHANGE, EXCEPTIONS, IN_FLIGHT_PHASES, Outcome, Phase

EXPECTED_PERCENTILE = 90
"""Most nodes must fit the rest of a window, and one slow node must not close it for all."""


def percent_done(done: int, total: int, skipped: int, *, ended: bool) -> float:
    """Return the percentage of nodes that carry the change, of those that are to get it.

    `total` has no node that left, and `skipped` nodes are not to get the change.  It is the only definition.
    """
    if total > skipped:
        return 100.0 * done / (total - skipped)
    return 100.0 if ended else 0.0


@dataclass(slots=True)
class PoolCounters:
    """Counts of a rollout's targets in one pool; the words mean the same as for the whole rollout.

    `version` is another object after each change, so that forks never have the same one for other counts.
    """

    total: int = 0
    done: int = 0
    failed: int = 0
    skipped: int = 0
    rolled_back: int = 0
    in_flight: int = 0
    version: object = field(default_factory=object, compare=False)


@dataclass(slots=True)
class RolloutCounters:
    """Counts of a rollout's targets: by phase, outcome, wave, team and pool.

    `in_flight` and `failed` name the nodes of those phases, `kept_isolated` those of another phase that are
    still isolated, `exceptions` those that are done without the change, `drifted` those that lost it,
    `rollbacks_due` those that wait for a rollback that a person ordered, or whose isolation was aborted,
    `joined_outages` those that got the change in the outage of another rollout; `durations` are the sorted
    seconds that changed nodes took;
    `times` are the sorted instants at which the nodes of a wave entered their phases.
    `slot_ms` are the milliseconds that the latest attempts of nodes were in a slot, and the `holding` nodes
    still are: there it is less the epoch milliseconds at which they were admitted.  As integers, because a
    running sum of floats depends on the order of the events.
    """

    phases: Counter[Phase] = field(default_factory=Counter)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    teams: Counter[str] = field(default_factory=Counter)
    waves: dict[str, Counter[Phase]] = field(default_factory=dict)
    pools: dict[str, PoolCounters] = field(default_factory=dict)
    in_flight: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    kept_isolated: set[str] = field(default_factory=set)
    exceptions: set[str] = field(default_factory=set)
    drifted: set[str] = field(default_factory=set)
    rollbacks_due: set[str] = field(default_factory=set)
    joined_outages: set[str] = field(default_factory=set)
    durations: list[float] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=dict)
    slot_ms: int = 0
    holding: int = 0

    def copy(self) -> RolloutCounters:
        """Return counters of their own: a later change of these does not change them."""
        made = RolloutCounters(**{each.name: copy(getattr(self, each.name)) for each in fields(self)})
        made.times = {wave: times.copy() for wave, times in self.times.items()}
        made.waves = {wave: phases.copy() for wave, phases in self.waves.items()}
        made.pools = {pool: replace(counters) for pool, counters in self.pools.items()}
        return made

    def add_all(self, targets: Iterable[Target]) -> None:
        """Count many targets: those that are alike at once, and with one sort."""
        alike: dict[object, list[Target]] = {}
        for target in targets:
            totals = target.phase, target.outcome, target.wave, target.team, target.pools
            alike.setdefault(totals, []).append(target)
        for group in alike.values():
            self._adjust_totals(group[0], len(group))
            times = self.times.setdefault(group[0].wave, [])
            for target in group:
                durations = _duration_s(target)
                self._adjust_slots(target, durations, 1)
                self._adjust_names(target, set.add)
                self.durations += durations
                times.append(target.since)
        for values in (self.durations, *self.times.values()):
            values.sort()

    def adjust(self, target: Target, delta: int) -> None:
        """Count a target in (`delta` 1) or out (`delta` -1)."""
        durations = _duration_s(target)
        self._adjust_totals(target, delta)
        self._adjust_slots(target, durations, delta)
        self._adjust_names(target, set.add if delta > 0 else set.discard)
        times = self.times.setdefault(target.wave, [])
        for values, value in ((times, target.since), *((self.durations, s) for s in durations)):
            if delta > 0:
                insort(values, value)
            else:
                del values[bisect_left(values, value)]
        if not times:
            del self.times[target.wave]

    def _adjust_totals(self, target: Target, delta: int) -> None:
        """Count by phase, outcome, wave, team and pools, which add_all() groups by."""
        self.phases[target.phase] += delta
        if (phases := self.waves.get(target.wave)) is None:
            phases = self.waves[target.wave] = Counter()
        phases[target.phase] += delta
        if target.outcome is not None:
            self.outcomes[target.outcome] += delta
        # Nodes that left are in no total, or a pool that lost nodes could never be complete.
        if target.outcome is not Outcome.LEFT:
            if target.team is not None:
                self.teams[target.team] += delta
                # A team without targets is not asked at gates, so it must not stay with a zero.
                if not self.teams[target.team]:
                    del self.teams[target.team]
            self._adjust_pools(target, delta)

    def _adjust_slots(self, target: Target, durations: Iterable[float], delta: int) -> None:
        is_in_flight = target.phase in IN_FLIGHT_PHASES
        if target.admitted_at and (is_in_flight or target.phase is Phase.FAILED):
            self.holding += delta
            self.slot_ms -= delta * round(target.admitted_at * 1000)
        for duration in durations:
            self.slot_ms += delta * round(duration * 1000)

    def _adjust_names(self, target: Target, count: Callable[[set[str], str], None]) -> None:
        if target.drift is not None:
            count(self.drifted, target.node)
        if target.joined_outage:
            count(self.joined_outages, target.node)
        if target.outcome in EXCEPTIONS:
            count(self.exceptions, target.node)
        if target.phase in IN_FLIGHT_PHASES:
            count(self.in_flight, target.node)
        elif target.order is NodeOrder.ROLLBACK:
            count(self.rollbacks_due, target.node)
        if target.phase is Phase.FAILED:
            count(self.failed, target.node)
        elif target.isolated and target.phase not in IN_FLIGHT_PHASES:
            count(self.kept_isolated, target.node)

    @property
    def left(self) -> int:
        """Targets that left the inventory; they are not part of any total."""
        return self.outcomes[Outcome.LEFT]

    @property
    def skipped(self) -> int:
        """Targets that are done without the change: skipped or rolled back."""
        return sum(self.outcomes[outcome] for outcome in EXCEPTIONS)

    @property
    def rolled_back(self) -> int:
        """Targets whose change was undone; `skipped` counts them too."""
        return self.outcomes[Outcome.ROLLED_BACK]

    @property
    def done(self) -> int:
        """Targets that carry the change."""
        return sum(self.outcomes[outcome] for outcome in CARRIES_CHANGE)

    def expected_s(self, default: float) -> float:
        """Return how long a node takes (seconds): a percentile of those that are done."""
        if not self.durations:
            return default
        # The nearest rank, a time that a node really took: with few nodes an interpolation promises too much.
        return self.durations[-(-len(self.durations) * EXPECTED_PERCENTILE // 100) - 1]

    def slot_s(self, now: float) -> float:
        """Return how long the latest attempts of all nodes kept a slot, or have kept it (seconds)."""
        return self.slot_ms / 1000 + self.holding * now

    def _adjust_pools(self, target: Target, delta: int) -> None:
        for pool in target.pools:
            if (counters := self.pools.get(pool)) is None:
                counters = self.pools[pool] = PoolCounters()
            counters.version = object()
            counters.total += delta
            if target.outcome in CARRIES_CHANGE:
                counters.done += delta
            elif target.outcome in EXCEPTIONS:
                counters.skipped += delta
                counters.rolled_back += delta * (target.outcome is Outcome.ROLLED_BACK)
            elif target.phase is Phase.FAILED:
                counters.failed += delta
            elif target.phase in IN_FLIGHT_PHASES:
                counters.in_flight += delta
            if not counters.total:
                del self.pools[pool]


def _duration_s(target: Target) -> list[float]:
    """Return how long a changed target took, as a list of one or none."""
    # A backoff: what was timed last is the aborted isolation of its rollback.
    took_part = target.outcome is Outcome.CHANGED and target.admitted_at and not target.not_before
    return [target.since - target.admitted_at] if took_part else []
