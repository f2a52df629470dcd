"""The daemon's queue: the groups of pending nodes in which one may be able to start.

A decision must cost what changed, not the size of the fleet.  A group is active while one of its nodes may be
able to start; decide() examines active groups only.  A group in which nothing can start backs off: it is
skipped until the facts name it as changed, or until an instant (the end of a window or of a hold).

A backoff is a cache, never a rule: decide() without a queue examines all groups and must come to the same
decision.  The tests compare the two after every step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator

from machines.facts.index import Index
from machines.model.decision import BackOff, QueueGroup


class SchedulingQueue:
    """The groups that are active, and when the backoffs of the others end."""

    def __init__(self) -> None:
        self._active: dict[tuple[str, str], dict[QueueGroup, None]] = {}
        self._wakeups: list[tuple[float, int, QueueGroup]] = []
        self._backoff_sequence = 0  # breaks ties in the heap, because teams may be None

    def update(self, index: Index, now: float) -> None:
        """Activate the groups that changed or whose backoff is over; drop those without nodes."""
        groups = index.pending_groups
        for group in groups.take_changed():
            self._set_active(group, group in groups)
        # A group without nodes has nothing to wake up for; its instant would only wake the daemon.
        while self._wakeups and (self._wakeups[0][0] <= now or self._wakeups[0][2] not in groups):
            group = heapq.heappop(self._wakeups)[2]
            self._set_active(group, group in groups)

    def back_off(self, backoffs: Iterable[BackOff]) -> None:
        """Skip the groups in which a decision could start nothing."""
        for each in backoffs:
            self._set_active(each.group, False)
            if not math.isinf(each.until):
                self._backoff_sequence += 1
                heapq.heappush(self._wakeups, (each.until, self._backoff_sequence, each.group))

    def active(self, index: Index, rollout: str, wave: str, now: float) -> Iterator[QueueGroup]:
        """Yield the groups of a wave that are active at `now`, also by what changed since the last update."""
        found = dict(self._active.get((rollout, wave), {}))
        found.update(dict.fromkeys(index.pending_groups.changed))
        if self._wakeups and self._wakeups[0][0] <= now:
            found.update((group, None) for at, _, group in self._wakeups if at <= now)
        for group in found:
            if (group.rollout, group.wave) == (rollout, wave) and group in index.pending_groups:
                yield group

    def next_wakeup(self, now: float) -> float:
        """Return when the next backoff is over (epoch seconds), infinity for none."""
        if not self._wakeups or self._wakeups[0][0] > now:
            return self._wakeups[0][0] if self._wakeups else math.inf
        return min((at for at, _, _ in self._wakeups if at > now), default=math.inf)

    def _set_active(self, group: QueueGroup, is_active: bool) -> None:
        active = self._active.setdefault((group.rollout, group.wave), {})
        if is_active:
            active[group] = None
        else:
            active.pop(group, None)
            if not active:
                del self._active[group.rollout, group.wave]
