"""What happens when in a walk: the ends of steps, and runs that wait for a slot of the runner.

It does not know what a step is for.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from machines.forecast.attempt import Attempt, Part, WalkedStep
from machines.forecast.model import Assumptions
from machines.model.slot_queue import SlotQueue

Due = Callable[[float], bool]
"""What happens at an instant, which it gets; it returns whether to decide then."""


@dataclass(slots=True)
class Agenda:
    """Entries in the order of their instants (epoch seconds).

    `choose` takes one of the durations that a step may have.
    """

    assumptions: Assumptions
    choose: Callable[[Sequence[float]], float]
    attempts: list[Attempt] = field(default_factory=list)
    """In the order in which they began."""
    begun: list[Part] = field(default_factory=list)
    """The parts of the attempts, in the order in which they began."""
    most_runs: int = 0
    """How many runs there were at once, at most."""
    _entries: list[tuple[float, int, Due]] = field(default_factory=list)
    _number: int = 0
    _shared: list[tuple[float, int, WalkedStep, Due]] = field(default_factory=list)
    """Runs that delay each other, with how far `_progress_s` is when each ends."""
    _progress_s: float = 0.0
    """How far a run would be that delays none and is active since the begin of the walk."""
    _progress_at: float = -math.inf
    _turn: int = 0
    """How often the number of active runs has changed."""
    _runs: SlotQueue[Callable[[float], None]] = field(default_factory=SlotQueue)

    def next_at(self) -> float:
        """Return the first instant at which something happens, infinity if nothing does."""
        return self._entries[0][0] if self._entries else math.inf

    def take_due(self, now: float) -> Iterator[Due]:
        """Yield what happens until now, also what these add."""
        while self._entries and self._entries[0][0] <= now:
            yield heapq.heappop(self._entries)[2]

    def add(self, at: float, due: Due) -> None:
        self._number += 1
        heapq.heappush(self._entries, (at, self._number, due))

    def begin_attempt(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        self.begun.append(Part(attempt, 0, attempt.starts_at, attempt.starts_at))

    def resume(self, attempt: Attempt, since: float, others: Sequence[Attempt], now: float) -> None:
        """Continue an attempt that has waited for others on its node; what it waited for ends a part too."""
        for each in others:
            if each.steps and math.isclose(each.steps[-1].ends_at, now, abs_tol=1e-3):
                self.begun.append(Part(each, len(each.steps), now, now))
        self.begun.append(Part(attempt, len(attempt.steps), since, now))

    def begin_step(
        self, durations: Sequence[float], attempt: Attempt | None, end: Due, *, at: float, now: float
    ) -> None:
        """Begin a step at an instant, at the latest now, and let `end` happen when it is over."""
        step = WalkedStep(durations, self.choose(durations), at, at)
        if attempt is not None:
            attempt.steps.append(step)
        self.add(max(now, at + step.duration_s), end)

    def queue_run(
        self,
        durations: Sequence[float],
        attempt: Attempt | None,
        end: Due,
        *,
        at: float,
        now: float,
        is_slowed: bool,
    ) -> None:
        """Begin a run as soon as the runner has a slot for it; other runs delay one that `is_slowed`."""

        def begin(at: float, now: float = now) -> None:
            chosen_s = self.choose(durations)
            step = WalkedStep(durations, chosen_s, asked_at, at, True)
            if attempt is not None:
                attempt.steps.append(step)
                self.begun.append(Part(attempt, len(attempt.steps) - 1, asked_at, at, is_run=True))
            if is_slowed and self.assumptions.contention:
                self._begin_shared(step, end_run, now)
            else:
                self.add(max(now, at + chosen_s), end_run)

        def end_run(now: float) -> bool:
            self._advance(now)
            self._runs.active -= 1
            for begin_next in self._runs.admit(self.assumptions.parallel_runs):
                begin_next(now)
            self._continue_shared(now)
            return end(now)

        asked_at = at
        self._advance(now)
        if self._runs.enter(begin, self.assumptions.parallel_runs):
            begin(at)
            self._continue_shared(now)
        self.most_runs = max(self.most_runs, self._runs.active)

    # Runs that delay each other advance by the same progress, which is the slower the more of them there are.

    def _begin_shared(self, step: WalkedStep, end: Due, now: float) -> None:
        # One that began before the walk has advanced meanwhile, beside as many as are active now.
        advanced_s = max(0.0, now - step.began_at) / self._stretch()
        rest_s = max(0.0, step.duration_s - advanced_s)
        self._number += 1
        heapq.heappush(self._shared, (self._progress_s + rest_s, self._number, step, end))

    def _stretch(self) -> float:
        return self.assumptions.contention.stretch(self._runs.active)

    def _advance(self, now: float) -> None:
        """Advance the progress until now, before the number of active runs changes."""
        if self._shared and now > self._progress_at:
            self._progress_s += (now - self._progress_at) / self._stretch()
        self._progress_at = now

    def _continue_shared(self, now: float) -> None:
        """Let the run end that ends next, now that the number of active runs has changed."""
        self._turn += 1
        if not self._shared:
            return
        progress_s, _, step, end = self._shared[0]
        turn = self._turn

        def end_shared(now: float) -> bool:
            if turn != self._turn:
                return False  # another number of runs is active by now
            heapq.heappop(self._shared)
            took_s = now - step.began_at
            # Rounded, so that few of the distributions of a draw differ.
            step.stretch = round(took_s / step.duration_s, 2) if step.duration_s else 1.0
            step.duration_s = took_s
            return end(now)

        self.add(now + max(0.0, progress_s - self._progress_s) * self._stretch(), end_shared)
