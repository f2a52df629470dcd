"""What traffic probes said of waiting nodes, how long that is believed, and when they are asked again.

A node whose plan names probes starts only on a fresh word that it is idle; busy
and unknown let others of its pools go first.  Only nodes that would start
otherwise are looked at, a few of each pool at a time, and one that stays busy
less and less often.  It knows no probe: what it is told is as old as the daemon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from machines.moments import stamp
from machines.rollout import Reason, Target

GOOD_FOR_S = 30.0
"""How long it is believed that a node is idle: its start follows its look within a second or two."""

AGAIN_S = 15.0
"""When a busy node is looked at again at first: a request that is long takes some seconds."""

AGAIN_MOST_S = 300.0
"""The longest such wait: a job that ran for hours may end unnoticed for so long."""

UNKNOWN_MOST_S = 60.0
"""The longest wait where nobody can say: a server that was away is to be noticed soon when it is back."""

AHEAD = 4
"""Nodes of a pool that are looked at together: each look is a request to somebody else's server."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the probes of a rollout's plan said of a node at an instant (epoch seconds).

    `busy` None: nobody can say.  `since` is when that was first said without a
    break; 0.0 until it is remembered.
    """

    rollout: str
    node: str
    busy: bool | None
    at: float
    text: str = ""
    since: float = 0.0

    @property
    def again_at(self) -> float:
        """When it should be asked again: the longer it was so, the later."""
        if self.busy is False:
            return self.at + GOOD_FOR_S
        most_s = AGAIN_MOST_S if self.busy else UNKNOWN_MOST_S
        return self.at + min(max(AGAIN_S, (self.at - self.since) / 2), most_s)

    def is_due(self, now: float) -> bool:
        """Say whether it must be asked again; also where the clock was set back behind it."""
        return not self.at <= now < self.again_at

    def is_idle(self, now: float) -> bool:
        """Say whether the node is known to be idle now."""
        return self.busy is False and self.at <= now < self.at + GOOD_FOR_S


@dataclass(slots=True)
class TrafficSeen:
    """The last word on each node of each rollout that still goes on."""

    _told: dict[str, dict[str, Traffic]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Traffic]:
        for nodes in self._told.values():
            yield from nodes.values()

    def of(self, rollout: str, node: str) -> Traffic | None:
        """Return the last word on a node."""
        return self._told.get(rollout, {}).get(node)

    def take(self, traffic: Traffic) -> None:
        """Remember a word; what was said before in the same sense began it."""
        nodes = self._told.setdefault(traffic.rollout, {})
        last = nodes.get(traffic.node)
        same = last is not None and last.busy is traffic.busy
        since = last.since if last is not None and same else traffic.since or traffic.at
        nodes[traffic.node] = replace(traffic, since=since)

    def forget_after(self, now: float) -> None:
        """Forget what was said later than now: the clock was set back, and how old it is nobody can say."""
        for nodes in self._told.values():
            for told in [each for each in nodes.values() if each.at > now]:
                del nodes[told.node]

    def forget_rollout(self, rollout: str) -> None:
        """Forget a rollout that is over."""
        self._told.pop(rollout, None)

    def forget_node(self, node: str) -> None:
        """Forget a node that has left."""
        for nodes in self._told.values():
            nodes.pop(node, None)


@dataclass(slots=True)
class Looks:
    """The looks that one decision asks for, by pool; in an unsure pool somebody's place depends on one."""

    _asked: Counter[str] = field(default_factory=Counter)
    _unsure: set[str] = field(default_factory=set)

    def is_full(self, pools: Collection[str]) -> bool:
        """Say whether enough nodes of one of these pools are being looked at."""
        return any(self._asked[pool] >= AHEAD for pool in pools)

    def is_unsure(self, pools: Collection[str]) -> bool:
        """Say whether somebody before is being looked at for a slot of one of these pools."""
        return not self._unsure.isdisjoint(pools)

    def add(self, pools: Collection[str], *, unsure: bool) -> None:
        """Count one more look; `unsure` when the node keeps its place meanwhile."""
        self._asked.update(pools)
        if unsure:
            self._unsure.update(pools)


def block(told: Traffic | None) -> Reason | None:
    """Return why the last word on a node keeps it from starting; None where it is idle or was never asked."""
    if told is None or told.busy is False:
        return None
    again = f"it is looked at again about {stamp(told.again_at)}"
    if told.busy:
        return Reason("traffic-busy", told.text, told.since, f"the end of that traffic; {again}")
    return Reason("traffic-unknown", told.text, told.since, f"an answer of the traffic probe; {again}")


def being_looked_at(target: Target) -> Reason:
    """Return why a node does not start this moment that is being looked at."""
    text = f"whether {target.node} is busy with client traffic is being looked at"
    return Reason("traffic-unknown", text, target.since, "an answer of the traffic probe")
