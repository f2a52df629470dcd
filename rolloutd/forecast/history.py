"""How long each step has taken, and how often attempts failed: from the records that the store keeps.

A step's durations are those of this rollout, else of this plan, else of this class of hosts, else of its
plan's `expected`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from machines.facts.index import Index
from machines.model.step_record import StepAction
from rolloutd.ports import StepDuration

MIN_SAMPLES = 3
"""Fewer durations say too little: the next wider group is asked."""

MAX_SAMPLES = 200
"""The latest durations of a group; more make no forecast better."""

MIN_ATTEMPTS = 20
"""A failure rate of fewer attempts is chance."""

Group = tuple[str, str, str, str]
"""The kind of a group, its name, the step and its action."""

HostClass = Mapping[str, str]


class StepHistory:
    """The durations of steps, as a forecast asks for them."""

    def __init__(self, index: Index, samples: Iterable[StepDuration], host_class: Sequence[str]) -> None:
        self._index = index
        self._host_class = tuple(host_class)
        self._groups: dict[Group, list[float]] = {}
        self._known: dict[tuple[str, str, str, StepAction], Sequence[float]] = {}
        for sample in samples:  # the latest first
            class_name = self._class_of(sample.node)
            for kind, name in (
                ("rollout", sample.rollout),
                ("plan", sample.plan),
                ("class", class_name),
            ):
                group = self._groups.setdefault((kind, name, sample.step, sample.action), [])
                if len(group) < MAX_SAMPLES:
                    group.append(sample.seconds)

    def durations(self, rollout: str, node: str, step: str, action: StepAction) -> Sequence[float]:
        """Return the durations that a step may take, all equally likely."""
        class_name = self._class_of(node)
        key = (rollout, class_name, step, action)
        if key not in self._known:
            self._known[key] = self._find(rollout, class_name, step, action)
        return self._known[key]

    def _find(self, rollout: str, class_name: str, step: str, action: StepAction) -> Sequence[float]:
        plan = self._index.rollout(rollout).plan
        names = (("rollout", rollout), ("plan", plan.name), ("class", class_name))
        groups = [self._groups.get((kind, name, step, action), []) for kind, name in names]
        enough = next((group for group in groups if len(group) >= MIN_SAMPLES), None)
        some = enough or next((group for group in groups if group), None)
        if some:
            return sorted(some)
        # `expected` is of the whole node; what is not known of other steps is within it.
        is_run = action is StepAction.RUN and step.startswith("run.")
        stages = max(1, len(plan.stages))
        return (plan.expected_s / stages,) if is_run else (0.0,)

    def _class_of(self, node: str) -> str:
        known = self._index.nodes.get(node)
        labels: Mapping[str, str] = {} if known is None else known.labels
        return ",".join(f"{key}={labels.get(key, '')}" for key in self._host_class)


def failure_rate(attempts: int, failures: int) -> float:
    """Return the share of attempts that failed, 0 as long as there were too few."""
    return 0.0 if attempts < MIN_ATTEMPTS else min(0.9, failures / attempts)
