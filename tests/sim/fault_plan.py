"""The outcome of each effect of the daemon: success, failure, lost answer, power cut.

An effect changes something outside the daemon's memory: a commit, an isolation,
a run.  Effects are numbered.  ScriptedFaults sets the outcome of some numbers, to
crash at every effect; SeededFaults draws outcomes.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

from tests.sim.random_streams import Coverage


class EffectOutcome(StrEnum):
    """How one effect goes."""

    SUCCEEDS = "well"
    FAILS = "fails-before"
    ANSWER_LOST = "answer-lost"
    TWICE = "happens-twice"
    CUT_BEFORE = "cut-before"
    CUT_AFTER = "cut-after"
    SLOW = "slow"


FAULTY_OUTCOMES = tuple(way for way in EffectOutcome if way is not EffectOutcome.SUCCEEDS)


class RunFate(StrEnum):
    """What becomes of one playbook run."""

    ENDS = "run-ends"
    FAILS = "run-fails"
    KILLED = "run-killed-midway"
    ORPHANED = "run-orphaned-midway"
    ESCAPED = "run-ignores-signals"
    HANGS = "run-hangs"
    LOSES_NODE = "run-loses-node"


class FaultPlan(Protocol):
    """Decides how each effect goes."""

    def next_outcome(self, label: str) -> EffectOutcome:
        """Return how the next effect goes."""
        ...

    def next_run_fate(self) -> RunFate:
        """Return what becomes of the next run."""
        ...

    def chance(self, name: str, probability: float) -> bool:
        """Say whether something happens that may happen with this probability."""
        ...


class NoFaults:
    """Nothing goes wrong."""

    def next_outcome(self, label: str) -> EffectOutcome:
        return EffectOutcome.SUCCEEDS

    def next_run_fate(self) -> RunFate:
        return RunFate.ENDS

    def chance(self, name: str, probability: float) -> bool:
        return False


class ScriptedFaults(NoFaults):
    """Effects go as a table says, by their number from 0; all others go well, those of one label slowly."""

    def __init__(
        self,
        outcomes: Mapping[int, EffectOutcome],
        coverage: Coverage,
        fates: Mapping[int, RunFate] | None = None,
        slow: str = "",
    ) -> None:
        self._slow = slow
        self.labels: list[str] = []
        self._outcomes = outcomes
        self._fates = fates or {}
        self._runs = 0
        self._coverage = coverage

    def next_outcome(self, label: str) -> EffectOutcome:
        usual = EffectOutcome.SLOW if label == self._slow else EffectOutcome.SUCCEEDS
        way = self._outcomes.get(len(self.labels), usual)
        self.labels.append(label)
        self._coverage.count(f"outcome:{way}")
        return way

    def next_run_fate(self) -> RunFate:
        self._runs += 1
        return self._fates.get(self._runs - 1, RunFate.ENDS)


class SeededFaults:
    """Effects, runs and answers go wrong by chance; how much differs from seed to seed."""

    def __init__(self, faults: random.Random, coverage: Coverage) -> None:
        self._faults = faults
        self._coverage = coverage
        self._rates = {way: faults.choice((0.0, 0.004, 0.015, 0.04)) for way in FAULTY_OUTCOMES}
        self._run_fault_rate = faults.choice((0.0, 0.1, 0.3))
        self._answer_fault_rate = faults.choice((0.0, 0.3, 1.0))

    def next_outcome(self, label: str) -> EffectOutcome:
        drawn = self._faults.random()
        for way, rate in self._rates.items():
            # Commits are many: each may fail, but not so often that nothing else is ever tried.
            rate = rate / 4 if label.startswith("commit") else rate
            if drawn < rate:
                self._coverage.count(f"outcome:{way}")
                return way
            drawn -= rate
        return EffectOutcome.SUCCEEDS

    def next_run_fate(self) -> RunFate:
        if self._faults.random() >= self._run_fault_rate:
            return RunFate.ENDS
        fate = self._faults.choice(
            (
                *(RunFate.FAILS, RunFate.FAILS, RunFate.KILLED),
                *(RunFate.ORPHANED, RunFate.ESCAPED, RunFate.HANGS, RunFate.LOSES_NODE),
            )
        )
        self._coverage.count(f"fault:{fate}")
        return fate

    def chance(self, name: str, probability: float) -> bool:
        if self._faults.random() >= probability * self._answer_fault_rate:
            return False
        self._coverage.count(f"fault:{name}")
        return True
