"""What goes wrong: at each effect of the daemon, and in the world beside it.

An effect is whatever changes something outside the daemon's memory: a commit, a
node isolated or put back, a run started or cleared away.  Each is numbered as
it comes, and goes one of seven ways.  `Scripted` says which by number, for
crashing at every effect there is; `Seeded` draws.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

from tests.sim.seeds import Marks


class Way(StrEnum):
    """How one effect goes."""

    WELL = "well"
    FAILS = "fails-before"
    LOST = "answer-lost"
    TWICE = "happens-twice"
    CUT_BEFORE = "cut-before"
    CUT_AFTER = "cut-after"
    SLOW = "slow"


MISCHIEF = tuple(way for way in Way if way is not Way.WELL)


class Fate(StrEnum):
    """What becomes of one playbook run."""

    ENDS = "run-ends"
    FAILS = "run-fails"
    KILLED = "run-killed-midway"
    ORPHANED = "run-orphaned-midway"
    HANGS = "run-hangs"


class Mischief(Protocol):
    """Decides how each effect goes."""

    def way(self, label: str) -> Way:
        """Return how the next effect goes."""
        ...

    def fate(self) -> Fate:
        """Return what becomes of the next run."""
        ...

    def chance(self, name: str, probability: float) -> bool:
        """Say whether something happens that may happen with this probability."""
        ...


class Peace:
    """Nothing goes wrong."""

    def way(self, label: str) -> Way:
        return Way.WELL

    def fate(self) -> Fate:
        return Fate.ENDS

    def chance(self, name: str, probability: float) -> bool:
        return False


class Scripted(Peace):
    """Effects go as a table says, by their number from 0; all others go well."""

    def __init__(
        self, ways: Mapping[int, Way], marks: Marks, fates: Mapping[int, Fate] | None = None
    ) -> None:
        self.labels: list[str] = []
        self._ways = ways
        self._fates = fates or {}
        self._runs = 0
        self._marks = marks

    def way(self, label: str) -> Way:
        way = self._ways.get(len(self.labels), Way.WELL)
        self.labels.append(label)
        self._marks.hit(f"way:{way}")
        return way

    def fate(self) -> Fate:
        self._runs += 1
        return self._fates.get(self._runs - 1, Fate.ENDS)


class Seeded:
    """Effects, runs and answers go wrong by chance; how much differs from seed to seed."""

    def __init__(self, faults: random.Random, marks: Marks) -> None:
        self._faults = faults
        self._marks = marks
        self._rates = {way: faults.choice((0.0, 0.004, 0.015, 0.04)) for way in MISCHIEF}
        self._ill = faults.choice((0.0, 0.1, 0.3))
        self._bad = faults.choice((0.0, 0.3, 1.0))

    def way(self, label: str) -> Way:
        drawn = self._faults.random()
        for way, rate in self._rates.items():
            # Commits are many: each may fail, but not so often that nothing else is ever tried.
            rate = rate / 4 if label.startswith("commit") else rate
            if drawn < rate:
                self._marks.hit(f"way:{way}")
                return way
            drawn -= rate
        return Way.WELL

    def fate(self) -> Fate:
        if self._faults.random() >= self._ill:
            return Fate.ENDS
        fate = self._faults.choice((Fate.FAILS, Fate.FAILS, Fate.KILLED, Fate.ORPHANED, Fate.HANGS))
        self._marks.hit(f"fault:{fate}")
        return fate

    def chance(self, name: str, probability: float) -> bool:
        if self._faults.random() >= probability * self._bad:
            return False
        self._marks.hit(f"fault:{name}")
        return True
