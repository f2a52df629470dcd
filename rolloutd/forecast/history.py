"""How long each step has taken, and how often attempts failed: from the records that the store keeps.

A step's durations are those of this rollout, else of this plan, else of this class of hosts, else of its
plan's `expected`.  Runs that were active at once share this machine, so each took longer than alone: their
durations are kept as if each had run alone.  How much longer follows from what they need of its cores; what
that does not explain is one number for all, of how much another run delays one.
What remains between one time and the next, such as other load, makes all runs of a time longer or shorter
together; how much, the history says too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean, variance

from machines.facts.index import Index
from machines.forecast.contention import Contention, share_alone
from machines.forecast.model import Deviation
from machines.model.plan import RUN_PREFIX
from machines.model.step_record import StepAction, StepRecord, StepState
from rolloutd.ports import BusyTime, RunLoad, StepDuration

MIN_SAMPLES = 3
"""Fewer durations say too little: the next wider group is asked."""

MAX_SAMPLES = 200
"""The latest durations of a group; more make no forecast better."""

MIN_ATTEMPTS = 20
"""A failure rate of fewer attempts is chance."""

MIN_RUNS = 10
"""A slowdown of fewer runs is chance."""

MAX_SLOWDOWN = 1.0
"""Two runs at once take at most as long as one after the other."""

MIN_RUNS_OF_TIME = 3
"""Fewer runs say too little of a time's mean."""

ASSUMED_DEVIATION = 0.05
"""How much all runs of a time differ together before the history says so, as a share of their time."""

ASSUMED_TIMES = 2
"""How many comparisons of two times the assumed deviation counts as."""

BEGINNING = 1 / 3
"""The share of a rollout's runs that its rest is compared with: what was known after its first waves."""

Group = tuple[str, str, str, str]
"""The kind of a group, its name, the step and its action."""


@dataclass(frozen=True, slots=True)
class PastRun:
    """A run, and how many others were active meanwhile, on average."""

    seconds: float
    others: float


def past_runs(samples: Sequence[StepDuration]) -> Mapping[int, PastRun]:
    """Return the runs among these durations, by their position."""
    instants = [
        instant
        for position, each in enumerate(samples)
        if each.is_run and each.seconds > 0.0
        for instant in ((each.ended_at - each.seconds, position, 1), (each.ended_at, position, -1))
    ]
    runs: dict[int, PastRun] = {}
    active, at, active_s = 0, 0.0, 0.0
    active_before_s: dict[int, float] = {}
    for instant, position, change in sorted(instants):
        active_s += active * (instant - at)
        at, active = instant, active + change
        if change > 0:
            active_before_s[position] = active_s
            continue
        seconds = samples[position].seconds
        of_all_s = active_s - active_before_s.pop(position)
        runs[position] = PastRun(seconds, max(0.0, of_all_s / seconds - 1.0))
    return runs


def cores_of(load: RunLoad | None) -> Contention:
    """Return how runs delay each other because of the cores of the runner's machine."""
    if load is None:
        return Contention()
    return Contention(share_alone(load.cpu_share, load.active, load.cores), load.cores)


def without(contention: Contention, run: PastRun) -> PastRun:
    """Return a run as if no other had delayed it so."""
    return replace(run, seconds=run.seconds / contention.stretch(1.0 + run.others))


def slowdown(runs: Iterable[tuple[object, PastRun]]) -> float:
    """Return by what share of its time alone a run takes longer for each other one; 0 if it may be chance.

    Each run comes with its group: only runs of one playbook are compared.
    """
    groups: dict[object, list[PastRun]] = {}
    for group, run in runs:
        groups.setdefault(group, []).append(run)
    points: list[tuple[float, float]] = []
    others: list[float] = []
    for members in groups.values():
        mean_s = sum(each.seconds for each in members) / len(members)
        mean_others = sum(each.others for each in members) / len(members)
        if mean_s > 0.0:
            points += [(each.others - mean_others, each.seconds / mean_s - 1.0) for each in members]
            others += [each.others for each in members]
    spread = sum(x * x for x, _ in points)
    if len(points) < MIN_RUNS or not spread:
        return 0.0
    slope = sum(x * y for x, y in points) / spread
    residual = sum((y - slope * x) ** 2 for x, y in points) / (len(points) - 2)
    if slope <= 2.0 * math.sqrt(residual / spread):
        return 0.0
    # The slope is a share of the mean time, at the mean number of others.
    alone = 1.0 - slope * sum(others) / len(others)
    return min(MAX_SLOWDOWN, slope / alone) if alone > 0.0 else MAX_SLOWDOWN


def common_deviation(rollouts: Iterable[Mapping[str, Sequence[float]]], *, is_within: bool) -> Deviation:
    """Return by how much all runs of a time are longer or shorter together.

    `rollouts` are, for each playbook, the durations of its runs alone by rollout, in the order of time.
    Compared is what a forecast had with what then came: `is_within`, a rollout's beginning and its rest; else
    the rollouts before one and that one.
    """
    squares, count = ASSUMED_TIMES * ASSUMED_DEVIATION**2, ASSUMED_TIMES
    for of_playbook in rollouts:
        before: list[float] = []
        for seconds in of_playbook.values():
            first = round(len(seconds) * BEGINNING) if is_within else 0
            pair = (seconds[:first], seconds[first:]) if is_within else (before[-MAX_SAMPLES:], seconds)
            if min(map(len, pair)) >= MIN_RUNS_OF_TIME:
                squares += _excess(*pair)
                count += 1
            before += seconds
    return Deviation(math.sqrt(max(0.0, squares / count)), count)


def _excess(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the squared distance of two means, as a share, beyond what the spread of their runs explains."""
    distance = math.log(fmean(after) / fmean(before))
    chance = sum(variance(each) / fmean(each) ** 2 / len(each) for each in (before, after))
    return distance**2 - chance


def begun_at(records: Sequence[StepRecord], started_at: float | None) -> tuple[StepRecord, ...]:
    """Return the records of a node at work; its run began only when it got its slot of the runner."""
    if started_at is None or not records or records[-1].state is not StepState.INTENDED:
        return tuple(records)
    return (*records[:-1], replace(records[-1], began_at=started_at))


class StepHistory:
    """The durations of steps, as a forecast asks for them; `contention` and `busy_s` are for Assumptions.

    `load` is what the runs of late needed of their machine.
    """

    def __init__(
        self,
        index: Index,
        samples: Sequence[StepDuration],
        host_class: Sequence[str],
        busy_times: Sequence[BusyTime] = (),
        load: RunLoad | None = None,
    ) -> None:
        self._index = index
        runs = past_runs(samples)
        by_cores = cores_of(load)
        # What the cores do not explain.
        of_playbooks = (
            ((samples[position].plan, samples[position].step), without(by_cores, run))
            for position, run in runs.items()
            if samples[position].action is StepAction.RUN
        )
        self.contention = replace(by_cores, slowdown=slowdown(of_playbooks))
        self._host_class = tuple(host_class)
        self._busy: dict[tuple[str, str], list[float]] = {}
        self.busy_nodes = len({each.node for each in busy_times})
        for each in busy_times:  # the latest first
            for key in (
                ("rollout", each.rollout),
                ("plan", each.plan),
                ("class", self._class_of(each.node)),
            ):
                if len(of_group := self._busy.setdefault(key, [])) < MAX_SAMPLES:
                    of_group.append(each.seconds)
        self._groups: dict[Group, list[float]] = {}
        self._known: dict[tuple[str, str, str, StepAction], Sequence[float]] = {}
        self._alone: dict[str, dict[str, list[float]]] = {}
        """The durations of runs alone by playbook and rollout, the latest first."""
        for position, sample in enumerate(samples):  # the latest first
            seconds, run = sample.seconds, runs.get(position)
            if run is not None and sample.action is StepAction.RUN:
                seconds = without(self.contention, run).seconds
                of_playbook = self._alone.setdefault(f"{sample.plan}/{sample.step}", {})
                of_playbook.setdefault(sample.rollout, []).append(seconds)
            class_name = self._class_of(sample.node)
            for kind, name in (
                ("rollout", sample.rollout),
                ("plan", sample.plan),
                ("class", class_name),
            ):
                group = self._groups.setdefault((kind, name, sample.step, sample.action), [])
                if len(group) < MAX_SAMPLES:
                    group.append(seconds)

    def over(self, index: Index) -> StepHistory:
        """Return the same history for other facts, such as those of a what-if with another `expected`."""
        other = copy(self)
        other._index, other._known = index, {}
        return other

    def durations(self, rollout: str, node: str, step: str, action: StepAction) -> Sequence[float]:
        """Return the durations that a step may take, all equally likely."""
        class_name = self._class_of(node)
        key = (rollout, class_name, step, action)
        if key not in self._known:
            self._known[key] = self._find(rollout, class_name, step, action)
        return self._known[key]

    def common_deviation(self, rollout: str) -> Deviation:
        """Return by how much the steps of a rollout may be longer or shorter together than those before."""
        has_own = any(len(of.get(rollout, ())) >= MIN_SAMPLES for of in self._alone.values())
        in_order = [
            {name: runs[::-1] for name, runs in reversed(of_playbook.items())}
            for of_playbook in self._alone.values()
        ]
        return common_deviation(in_order, is_within=has_own)

    def busy_s(self, rollout: str, node: str) -> float | None:
        """Return how long a node is busy: as long as one of those before, which its name decides."""
        plan = self._index.rollout(rollout).plan.name
        names = (("rollout", rollout), ("plan", plan), ("class", self._class_of(node)))
        groups = [self._busy.get(key, ()) for key in names]
        seconds = next((group for group in groups if len(group) >= MIN_SAMPLES), ())
        return Random(f"{rollout}/{node}").choice(seconds) if seconds else None  # noqa: S311  # no secret

    def _find(self, rollout: str, class_name: str, step: str, action: StepAction) -> Sequence[float]:
        plan = self._index.rollout(rollout).plan
        names = (("rollout", rollout), ("plan", plan.name), ("class", class_name))
        groups = [self._groups.get((kind, name, step, action), []) for kind, name in names]
        enough = next((group for group in groups if len(group) >= MIN_SAMPLES), None)
        some = enough or next((group for group in groups if group), None)
        if some:
            # One sample is not a known duration: as two equal ones it is drawn.
            return sorted(some) if len(some) > 1 else [*some, *some]
        # `expected` is of the whole node; what is not known of other steps is within it.
        is_run = action is StepAction.RUN and step.startswith(RUN_PREFIX)
        stages = max(1, len(plan.stages))
        return (plan.expected_s / stages,) if is_run else (0.0,)

    def _class_of(self, node: str) -> str:
        known = self._index.nodes.get(node)
        labels: Mapping[str, str] = {} if known is None else known.labels
        return ",".join(f"{key}={labels.get(key, '')}" for key in self._host_class)


def failure_rate(attempts: int, failures: int) -> float:
    """Return the share of attempts that failed, 0 as long as there were too few."""
    return 0.0 if attempts < MIN_ATTEMPTS else min(0.9, failures / attempts)
