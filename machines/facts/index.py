"""The read side of the index: facts, and judgements derived from them.

Availability, fill of pools and progress of rollouts are kept between questions, so that a decision costs what
changed and not the size of the fleet.  projection.py updates them.  The index knows no rule; the rules ask
it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Self

from machines.facts import votes
from machines.facts.availability import Unavailability
from machines.facts.counters import RolloutCounters
from machines.facts.dry_runs import DryRunResults
from machines.facts.fleet_facts import FleetFacts
from machines.facts.pending_groups import PendingGroups, QueuePosition
from machines.facts.pool_index import Pool, PoolIndex
from machines.facts.preparations import RolloutPreparations
from machines.model.decision import DueRollbacks
from machines.model.limits import Limits, RunnerRule, runner_of
from machines.model.node import Node, Observation, pools_of
from machines.model.plan import PLAYBOOK_RUN, Plan
from machines.model.rollout import Failure, Target
from machines.model.target_plan import plan_for_target
from machines.states import IN_FLIGHT_PHASES, Phase

JUDGED_AT_ONCE = 1_000
"""Nodes of one part of an advance: each takes up to 15 µs, and a part less than the loop may pause."""


class Index(FleetFacts):
    """The facts, and what follows from them at the instant `now` (epoch seconds)."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._pool_keys: tuple[str, ...] = tuple(limits.pools)
        self.pending_groups = PendingGroups()
        self.dry_run_results = DryRunResults()
        self._pool_index = PoolIndex(self.pending_groups)
        self._counters: dict[str, RolloutCounters] = {}
        self._pending: dict[str, dict[str, list[QueuePosition]]] = {}
        self._unresolved_failures: dict[str, tuple[Failure, ...]] = {}
        self.recounted_failures: dict[str, list[Failure]] = {}
        """What machines/invariants/vote_recount.py found, until a vote, a failure or a team changes."""
        self.due_rollbacks: dict[str, DueRollbacks] = {}
        """What machines/rules/rollbacks.py found, until a fact changes that it may depend on."""
        self._needing_driver: set[tuple[str, str]] = set()
        self._in_flight = 0
        self.nodes_by_runner: Mapping[str, frozenset[str]] | None = None
        """The nodes in flight by runner, until a fact changes that it may depend on."""
        self._left_cordoned: set[str] = set()
        self._covering_watches: dict[str, None] = {}
        """The watches whose last confirmation is recent enough for all nodes that they have reported."""
        self._watched_not_up: dict[str, dict[str, None]] = {}
        """By watch: the nodes that it reported as not up, the only ones that a confirmation may change."""
        self._incomplete_watches: frozenset[str] = frozenset()
        """The watches of which a report was dropped: they must report all nodes again."""
        self.judged_at_once = JUDGED_AT_ONCE

    def fork(self) -> Self:
        """Return the same facts; a later change of one does not change the other."""
        made = super().fork()
        made.pending_groups = self.pending_groups.fork()
        made._pool_index = self._pool_index.fork_for(made.pending_groups)
        # Answers are written by questions, so the two sides must not share them.
        made._unresolved_failures = self._unresolved_failures.copy()
        made.recounted_failures = self.recounted_failures.copy()
        made.due_rollbacks = self.due_rollbacks.copy()
        return made

    def _own_preparations(self, rollout: str) -> RolloutPreparations | None:
        """Return the preparations of a rollout, for writing."""
        if rollout not in self._preparations:
            return None
        self._preparations = self._own(self._preparations)
        return self._own_row(self._preparations, rollout)

    def _own_rollout_tables(self) -> None:
        """Have the tables of rollouts and targets for writing; their rows are owned where they change."""
        # All at once, because a change of one target touches them all; owning a table again costs a lookup.
        self._rollouts, self._targets = self._own(self._rollouts), self._own(self._targets)
        self._targets_by_node = self._own(self._targets_by_node)
        self._preparations, self._preparing = self._own(self._preparations), self._own(self._preparing)
        self._counters, self._pending = self._own(self._counters), self._own(self._pending)
        self._needing_driver, self._isolations = self._own(self._needing_driver), self._own(self._isolations)
        self._outages, self._train_waits = self._own(self._outages), self._own(self._train_waits)
        self._aborts = self._own(self._aborts)

    def needing_driver(self) -> list[Target]:
        """Return every target in flight or with a person's order."""
        return [self._targets[rollout][node] for rollout, node in sorted(self._needing_driver)]

    def left_cordoned(self) -> list[Observation]:
        """Return the observations of nodes that were left out of service because of a hold."""
        return [self._observations[node] for node in sorted(self._left_cordoned & self._observations.keys())]

    def bounds_of(self, node: Node, kinds: Collection[str]) -> Iterator[RunnerRule]:
        """Yield what bounds a node's runs of these kinds: its runner, for changes its sources' workers."""
        rule, workers = runner_of(self.limits.runners, node), self.limits.workers
        if PLAYBOOK_RUN in kinds and rule is not None and rule.parallel is not None:
            yield rule
        if any(kind != PLAYBOOK_RUN for kind in kinds):
            yield from (RunnerRule(each, parallel=workers[each]) for each in node.sources if each in workers)

    def in_flight_of_runner(self, name: str) -> frozenset[str]:
        """Return the nodes in flight that a runner's limit counts, or that of an inventory source."""
        if self.nodes_by_runner is None:
            nodes: dict[str, set[str]] = {}
            for rollout, name_of_node in self._needing_driver:
                node = self._nodes.get(name_of_node)
                is_in_flight = self._targets[rollout][name_of_node].phase in IN_FLIGHT_PHASES
                if node is not None and is_in_flight:
                    kinds = self._rollouts[rollout].plan.run_kinds
                    for rule in self.bounds_of(node, kinds):
                        nodes.setdefault(rule.name, set()).add(node.name)
            self.nodes_by_runner = {key: frozenset(each) for key, each in nodes.items()}
        return self.nodes_by_runner.get(name, frozenset())

    def counters(self, rollout: str) -> RolloutCounters:
        return self._counters[rollout]

    def in_flight(self) -> int:
        """Return how many nodes of the fleet are in flight."""
        return self._in_flight

    def all_done(self, rollout: str) -> bool:
        phases = self._counters[rollout].phases
        return phases[Phase.DONE] == phases.total()

    def expected_s(self, rollout: str) -> float:
        return self._counters[rollout].expected_s(self._rollouts[rollout].plan.expected_s)

    def has_failed(self, rollout: str, node: str, attempt: int | None = None) -> bool:
        """Return whether the node has a failure in this rollout or this attempt, resolved or not."""
        failures = self._rollouts[rollout].failures
        return any(each.node == node and attempt in (None, each.attempt) for each in failures)

    def full_pools(self) -> Iterable[Pool]:
        """Return the pools with as many nodes confirmed down as their budget, in no order."""
        return (self._pool_index.pools[pool] for pool in self._pool_index.full_pool_ids)

    def over_budget(self) -> list[Pool]:
        """Return the pools with more nodes down than their budget, by id."""
        over = (pool for pool in self.full_pools() if len(pool.down) > self.budget(pool))
        return sorted(over, key=lambda pool: pool.id)

    def next_change(self) -> float:
        """Return when time alone may next change a decision, other than by a soak (epoch seconds)."""
        # Only a node that is not up may improve, by becoming unknown.
        covering = (watch for watch in self._covering_watches if self._watched_not_up.get(watch))
        lapses = map(self._lapses_at, covering)
        return min((self._pool_index.next_change(), self.pending_groups.next_instant(), *lapses))

    def _is_still_due(self, node: str, at: float) -> bool:
        """Return whether a bad observation or a hold of the node still ends at the instant."""
        seen = self._observations.get(node)
        expires = seen is not None and seen.at + self.limits.observe_within_s == at
        return expires or any(hold.until == at for hold in self.holds_on(node))

    def plan_for(self, target: Target) -> Plan:
        """Return the plan as it applies to the node of this target, which the inventory must have."""
        return plan_for_target(self._rollouts[target.rollout].plan, target, self._nodes[target.node])

    def unresolved_failures(self, rollout: str) -> tuple[Failure, ...]:
        """Return the failures of a rollout that no sufficient vote covers."""
        known = self._unresolved_failures.get(rollout)
        if known is None:
            known = votes.unresolved_failures(self._rollouts[rollout], sorted(self._counters[rollout].teams))
            self._unresolved_failures[rollout] = known
        return known

    def is_wave_over(self, rollout: str, wave: str) -> bool:
        """Return whether all nodes of a wave are done, or failed and covered by a vote.

        A quarantined node does not hold the wave once another node of it is done.
        """
        counters = self._counters[rollout]
        phases = counters.waves.get(wave)
        # A wave without nodes, such as canaries that no node matches, must not hold the others.
        if phases is None:
            return True
        # A quarantined node is not waited for, but one in flight always is: it may still fail.
        if any(phases[phase] for phase in IN_FLIGHT_PHASES):
            return False
        if phases[Phase.PENDING] and not (phases[Phase.DONE] and self.only_quarantined(rollout, wave)):
            return False
        if not phases[Phase.FAILED]:
            return True
        open_failures = {failure.id for failure in self.unresolved_failures(rollout)}
        failed = (self._targets[rollout][node] for node in counters.failed)
        return not any(t.wave == wave and t.failure and t.failure.id in open_failures for t in failed)

    def only_quarantined(self, rollout: str, wave: str) -> bool:
        return all(self.is_quarantined(node) for _, _, node in self.pending(rollout, wave))

    def wave_end(self, rollout: str, wave: str) -> float | None:
        """Return when the last node of a wave entered its phase (epoch seconds), None for an empty wave."""
        times = self._counters[rollout].times.get(wave)
        return times[-1] if times else None

    def pending(self, rollout: str, wave: str) -> Sequence[QueuePosition]:
        """Return the positions of the wave's pending nodes, the next one first."""
        return self._pending.get(rollout, {}).get(wave, ())

    def unavailability(self, node: str) -> Unavailability | None:
        """Return why the node counts as down at `now`, None when it is known to be up."""
        return self._pool_index.unavailability(node)

    def pools_of(self, node: Node) -> tuple[str, ...]:
        """Return the ids of the pools that every plan obeys on this node."""
        return pools_of(node.labels, tuple(self.limits.pools))

    def pools_for(self, rollout: str, node: str) -> tuple[Pool, ...]:
        """Return the node's pools under this rollout: those of the settings and those that its plan adds."""
        found = self._pool_index.pools_of_node(node)
        # Mostly no plan adds a pool key, and then this must cost nothing: the rules ask it for every node.
        if len(self._pool_keys) == len(self.limits.pools):
            return found
        rollout_record = self._rollouts.get(rollout)  # None: a hold asks, for no rollout
        added = () if rollout_record is None else rollout_record.plan.pool_keys
        return tuple(pool for pool in found if pool.key in self.limits.pools or pool.key in added)

    def pool_ids_for(self, rollout: str, node: str) -> tuple[str, ...]:
        if len(self._pool_keys) == len(self.limits.pools):
            return self._pool_index.ids_of_node(node)
        return tuple(pool.id for pool in self.pools_for(rollout, node))

    def all_pools(self, node: str) -> tuple[Pool, ...]:
        """Return the node's pools under any rollout: a node that is down is down in all of them."""
        return self._pool_index.pools_of_node(node)

    @property
    def pool_keys(self) -> tuple[str, ...]:
        """The label keys that make pools: those of the settings and those of open rollouts' plans."""
        return self._pool_keys

    def pool(self, pool: str) -> Pool:
        """Return a pool by its id; a pool without members is empty."""
        key, _, value = pool.partition("/")
        return self._pool_index.pools.get(pool) or Pool(key, value)

    def pool_ids(self) -> Iterable[str]:
        """Return the ids of all pools that have had members."""
        return self._pool_index.pools.keys()

    def budget(self, pool: Pool) -> int:
        return self._pool_index.budget(self, pool)

    def at(self, now: float) -> Self:
        """Return the facts at an instant: these, unless time alone has changed something since."""
        is_due = self._pool_index.is_due(now) or self.pending_groups.is_due(now)
        is_due = is_due or any(self._lapses_at(watch) <= now for watch in self._covering_watches)
        if self.now <= now and not is_due:
            return self
        # In a fork, because only the daemon may advance the facts: a question must not end a hold.
        made = self.fork()
        made.advance(now)
        return made

    def advance(self, now: float) -> None:
        """Let observations and holds expire; only the daemon does this, no question."""
        while self.advance_in_part(now):
            pass

    def advance_in_part(self, now: float) -> bool:
        """Advance as far as takes some milliseconds; return whether more is due.

        Meanwhile pools and `unavailability` may show what has expired; at() never does.
        """
        backwards = now < self.now
        # Reevaluation below reads `now`, so it is set first.
        self.now = now
        if backwards:
            self._on_clock_set_back()
        for watch in tuple(self._covering_watches):
            if self._lapses_at(watch) <= now:  # each node of it counts by its own report again
                self._covering_watches = {each: None for each in self._covering_watches if each != watch}
                self._pool_index.judge_again(self._nodes_of_watch(watch))
        self._pool_index.advance(self, now, self._is_still_due, self._covering_watches, self.judged_at_once)
        self.pending_groups.end_due(now)
        return self._pool_index.is_due(now)

    def _lapses_at(self, watch: str) -> float:
        """Return until when the watch's last confirmation is recent enough (epoch seconds)."""
        return self._confirmed_at[watch] + self.limits.observe_within_s

    def _nodes_of_watch(self, watch: str) -> list[str]:
        return [node for node, seen in self._observations.items() if seen.watch == watch]

    def _lose_report(self, seen: Observation | None) -> None:
        """Note that a watch's report is dropped that it would otherwise only confirm."""
        if seen is not None and seen.watch:
            self._incomplete_watches |= {seen.watch}
            self._watched_not_up = self._own(self._watched_not_up)
            if seen.watch in self._watched_not_up:
                self._own_row(self._watched_not_up, seen.watch).pop(seen.node, None)

    def _on_clock_set_back(self) -> None:
        # Expired observations and holds may be valid again.  The age of an observation or a probe that
        # was made later than now is unknown, so it is dropped.
        for seen in self._observations.values():
            if seen.at > self.now:
                self._lose_report(seen)
        self._observations = {node: seen for node, seen in self._observations.items() if seen.at <= self.now}
        # The next confirmation comes within seconds.
        self._confirmed_at, self._covering_watches = {}, {}
        self._traffic = {key: found for key, found in self._traffic.items() if found.at <= self.now}
        for hold in self._holds.values():
            if hold.until is not None:
                self._pool_index.schedule_reevaluation(hold.node, hold.until, improves=True)
        self._pool_index.judge_again(self._nodes)
        self.pending_groups.mark_all()

    def _schedule_reevaluation(self, observation: Observation) -> None:
        # A good observation that grows old makes its node worse, so that instant can start nothing.
        self._pool_index.schedule_reevaluation(
            observation.node, observation.at + self.limits.observe_within_s, improves=not observation.is_up
        )
