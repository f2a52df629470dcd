"""What rehearsals told of waiting nodes: those that could be isolated now go first.

A prospect is a hint for the order and never a rule: of nodes that all could not
go, the first one starts all the same, because what holds it may let it go while
it is asked for.  Only nodes that would start otherwise are rehearsed, a few of
each pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from machines.moments import stamp
from machines.plan import Plan
from machines.rollout import Reason, Target

REHEARSED_KINDS = frozenset({"kubernetes"})
"""Isolators that can say beforehand, changing nothing, whether a node could be isolated."""

GOOD_FOR_S = 30.0
"""How long a rehearsal is believed: budgets change with every pod that becomes ready."""

AHEAD = 4
"""Nodes of a pool that are rehearsed for one start: each costs the API server a request per pod."""

KEPT_S = 3600.0
"""How long it is told of a node that it was passed over."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """Whether a node could be isolated at an instant (epoch seconds); None: nobody can say."""

    rollout: str
    node: str
    can: bool | None
    at: float
    why: str = ""


@dataclass(slots=True)
class Prospects:
    """The last prospect of each node of each rollout."""

    _told: dict[tuple[str, str], Prospect] = field(default_factory=dict)

    def take(self, prospect: Prospect) -> None:
        """Remember a prospect, and forget those that are long over."""
        self._told = {key: each for key, each in self._told.items() if prospect.at < each.at + KEPT_S}
        self._told[prospect.rollout, prospect.node] = prospect

    def fresh(self, target: Target, now: float) -> Prospect | None:
        """Return what is to be believed of a node, None when it must be rehearsed first."""
        told = self._told.get((target.rollout, target.node))
        return told if told is not None and told.at <= now < told.at + GOOD_FOR_S else None

    def explain(self, target: Target, reason: Reason) -> Reason:
        """Add to the reason of a waiting node that it was passed over, and why."""
        told = self._told.get((target.rollout, target.node))
        if told is None or told.can is not False or reason.code not in ("pool-full", "turn"):
            return reason
        passed = f"it could not have been isolated at {stamp(told.at)}, so others go first: {told.why}"
        return replace(reason, text=f"{reason.text}; {passed}")


@dataclass(slots=True)
class Queue:
    """The nodes that were passed over in one decision; `unsure` are pools in which one is being rehearsed."""

    passed: list[Target] = field(default_factory=list)
    unsure: set[str] = field(default_factory=set)
    _asked: Counter[str] = field(default_factory=Counter)

    def is_full(self, pools: Collection[str]) -> bool:
        """Say whether no more nodes of one of these pools are worth a rehearsal."""
        return any(self._asked[pool] >= AHEAD for pool in pools)

    def is_unsure(self, pools: Collection[str]) -> bool:
        """Say whether somebody before is being rehearsed for a slot of one of these pools."""
        return not self.unsure.isdisjoint(pools)

    def pass_over(self, target: Target, pools: Collection[str], told: Prospect | None) -> bool:
        """Say whether the node lets others go first: it cannot go now, or that must be found out."""
        if told is not None and told.can is not False:
            return False
        if told is None:
            self.unsure.update(pools)
        self._asked.update(pools)
        self.passed.append(target)
        return True


def is_rehearsed(plan: Plan, target: Target) -> bool:
    """Say whether the node's turn depends on a rehearsal, where somebody else could go first."""
    if target.isolated or target.rolling_back:
        return False
    return any(spec.kind in REHEARSED_KINDS for spec in plan.isolate)
