"""The outages of a walk: how many there are and how long, and which attempts wait for another in one.

It decides nothing: when an attempt waits, the workflow says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from machines.forecast.attempt import NodeKey


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
