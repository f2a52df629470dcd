"""What decide() asks: the facts, and what follows from them at an instant.

Who is down, how full each pool is, how far each rollout has come: all of it is
derived from the facts of the book and kept, so that asking costs little.  Time is
an argument: `advance(now)` lets observations grow old and holds run out.

It is read here; projection.py keeps it up by events.  It makes no decision and
knows no rule: those ask it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from machines import ballots
from machines.book import Book
from machines.lanes import Lanes, Place
from machines.limits import Limits
from machines.node import Node, Observation, Sight, pools_of
from machines.prospects import Prospects
from machines.rollout import Failure, Target
from machines.slots import Pool, Slots
from machines.stands import Stand
from machines.states import Phase
from machines.tally import Tally


class Index(Book):
    """The facts, and what follows from them at the instant `now` (epoch seconds)."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._keys: tuple[str, ...] = tuple(limits.pools)
        self.lanes = Lanes()
        self.prospects = Prospects()
        self._slots = Slots(self, self.lanes)
        self._tallies: dict[str, Tally] = {}
        self._pending: dict[str, dict[str, list[Place]]] = {}
        self._unsettled: dict[str, tuple[Failure, ...]] = {}
        self._wave_ends: dict[tuple[str, str], float | None] = {}
        self._wanted: set[tuple[str, str]] = set()
        self._at_work = 0
        self._kept: set[str] = set()

    def busy(self) -> list[Target]:
        """Return every target that needs a driver: at work, or with a person's order."""
        return [self._targets[rollout][node] for rollout, node in sorted(self._wanted)]

    def kept(self) -> list[Observation]:
        """Return what was seen of the nodes that were left out of service for somebody who held them."""
        return [seen for node in sorted(self._kept) if (seen := self._seen.get(node)) is not None]

    def tally(self, rollout: str) -> Tally:
        """Return the running counts of a rollout."""
        return self._tallies[rollout]

    def in_flight(self) -> int:
        """Return how many nodes are at work in the whole fleet."""
        return self._at_work

    def all_done(self, rollout: str) -> bool:
        """Say whether every target of a rollout is done."""
        phases = self._tallies[rollout].phases
        return phases[Phase.DONE] == phases.total()

    def expected_s(self, rollout: str) -> float:
        """Return how long a node of this rollout takes."""
        return self._tallies[rollout].expected_s(self._rollouts[rollout].plan.expected_s)

    def has_failed(self, rollout: str, node: str) -> bool:
        """Say whether the node has failed in this rollout, settled or not."""
        return any(failure.node == node for failure in self._rollouts[rollout].failures)

    def full_pools(self) -> Iterable[Pool]:
        """Return the pools in which as many nodes are known to be down as may be, in no order."""
        return (self._slots.pools[pool] for pool in self._slots.full)

    def crowded(self) -> list[Pool]:
        """Return the pools with more nodes down than their budget, in the order of their ids."""
        over = (pool for pool in self.full_pools() if len(pool.down) > self.budget(pool))
        return sorted(over, key=lambda pool: pool.id)

    def next_change(self) -> float:
        """Return when next time alone may change a decision, other than by a soak (epoch seconds)."""
        return min(self._slots.next_change(self._is_current), self.lanes.next_wake())

    def _is_current(self, node: str, at: float) -> bool:
        """Say whether a bad observation or a hold of the node still ends at the instant."""
        seen = self._seen.get(node)
        if seen is not None and seen.at + self.limits.observe_within_s == at:
            return True
        return any(hold.until == at for hold in self.holds_on(node))

    def unsettled(self, rollout: str) -> tuple[Failure, ...]:
        """Return the failures of a rollout that no sufficient vote covers."""
        known = self._unsettled.get(rollout)
        if known is None:
            known = ballots.judge_failures(self._rollouts[rollout], sorted(self._tallies[rollout].teams))
            self._unsettled[rollout] = known
        return known

    def is_wave_over(self, rollout: str, wave: str) -> bool:
        """Say whether all nodes of a wave are done, or failed and covered by a vote."""
        tally = self._tallies[rollout]
        phases = tally.waves.get(wave)
        if phases is None:
            return True
        if any(count and phase not in (Phase.DONE, Phase.FAILED) for phase, count in phases.items()):
            return False
        if not phases[Phase.FAILED]:
            return True
        open_failures = {failure.id for failure in self.unsettled(rollout)}
        failed = (self._targets[rollout][node] for node in tally.failed)
        return not any(t.wave == wave and t.failure and t.failure.id in open_failures for t in failed)

    def wave_end(self, rollout: str, wave: str) -> float | None:
        """Return when the last node of a wave came to its phase (epoch seconds); None for an empty wave."""
        key = (rollout, wave)
        if key not in self._wave_ends:
            times = (t.since for t in self._targets[rollout].values() if t.wave == wave)
            self._wave_ends[key] = max(times, default=None)
        return self._wave_ends[key]

    def pending(self, rollout: str, wave: str) -> Sequence[Place]:
        """Return the places of the wave's pending nodes, the next one first."""
        return self._pending.get(rollout, {}).get(wave, ())

    def stand(self, node: str) -> Stand | None:
        """Return why the node counts as down at `now`, None when it is known to be up."""
        return self._slots.stand(node)

    def pools_of(self, node: Node) -> tuple[str, ...]:
        """Return the ids of the pools that every plan obeys on this node."""
        return pools_of(node.labels, tuple(self.limits.pools))

    def pools_for(self, rollout: str, node: str) -> tuple[Pool, ...]:
        """Return the node's pools under this rollout: those of all plans, and those its plan adds."""
        found = self._slots.of(node)
        if len(self._keys) == len(self.limits.pools):
            return found
        asked = self._rollouts.get(rollout)  # a hold asks on behalf of no rollout
        added = () if asked is None else asked.plan.pool_keys
        return tuple(pool for pool in found if pool.key in self.limits.pools or pool.key in added)

    def all_pools(self, node: str) -> tuple[Pool, ...]:
        """Return the pools of a node under any rollout: a node that is down is down in all of them."""
        return self._slots.of(node)

    def pool(self, pool: str) -> Pool:
        """Return a pool by its id; one that has no members is empty."""
        key, _, value = pool.partition("/")
        return self._slots.pools.get(pool) or Pool(key, value)

    def members(self, key: str, value: str) -> Iterable[str]:
        """Return the known nodes of the pool `key/value`, in no order."""
        return self.pool(f"{key}/{value}").members

    def pool_ids(self) -> Iterable[str]:
        """Return the ids of all pools that have had members."""
        return self._slots.pools.keys()

    def budget(self, pool: Pool) -> int:
        """Return how many of the pool's nodes may be down; 1 for a pool that only a plan names."""
        return self._slots.budget(pool)

    # -- time

    def advance(self, now: float) -> None:
        """Let time pass: observations grow old, holds run out."""
        backwards = now < self.now
        self.now = now
        if backwards:
            self._turn_back()
        self._slots.advance(now)
        self.lanes.advance(now)

    def _turn_back(self) -> None:
        """Judge all anew: the clock was set back, and what had grown old or run out has not any more.

        How old an observation is that was made later than now nobody can say.
        """
        self._seen = {node: seen for node, seen in self._seen.items() if seen.at <= self.now}
        self._traffic.forget_after(self.now)
        for seen in self._seen.values():
            self._expires(seen)
        for hold in self._holds.values():
            if hold.until is not None:
                self._slots.expires(hold.node, hold.until, lifts=True)
        self._slots.judge(self._nodes)
        self.lanes.heat_all()

    def _expires(self, seen: Observation) -> None:
        good = seen.sight is Sight.UP and not seen.foreign
        self._slots.expires(seen.node, seen.at + self.limits.observe_within_s, lifts=not good)
