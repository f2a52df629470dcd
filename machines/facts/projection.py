"""Keeps the index up to date by events, equal to one that is built from a snapshot.

How it works.  The daemon holds one Projection.  build() makes it from the stored facts; after every commit
apply() takes the writes of each event, and updates everything that is derived from a row: counters, the
queue of pending nodes, pools and availability.  Nothing else is recomputed, so an event costs the same in a
fleet of any size.

The invariant is that an index after any events equals build(index.snapshot()): both give the same decision.
The tests check it after every step of random fleets.  Three rules keep it true:

- Every change of a target goes through _store_target(), which removes the old version from all counters and
  adds the new one.  No counter is changed elsewhere.
- What cannot be updated by a difference is dropped and computed on demand (_unresolved_failures,
  recounted_failures, due_rollbacks, nodes_by_runner).
- Whatever may allow a waiting node to start must mark its group, so that it is ready again.  A forgotten
  mark is the worst error here: the node waits although nothing blocks it, until a restart.

What comes in without an event is in records.py.  Other parts see the index as the read-only Index, with two
exceptions: rules/rollbacks.py and invariants/vote_recount.py keep an answer in due_rollbacks and
recounted_failures, and scheduler/shared_outage.py records the progress of an outage with its next action.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Self, assert_never

from machines.facts import apply as changes
from machines.facts.apply import rollout_of, writes
from machines.facts.availability import target_unavailability
from machines.facts.counters import RolloutCounters
from machines.facts.fleet_facts import FactsSnapshot
from machines.facts.pending_groups import QueuePosition, queue_position
from machines.facts.preparations import RolloutPreparations, preparations_of
from machines.facts.records import Records
from machines.facts.votes import looks_ahead
from machines.model import events
from machines.model.events import ArtifactsBuilt, RolloutOpened, TeamRulesChanged
from machines.model.limits import Limits, runner_of
from machines.model.node import Node
from machines.model.plan import Plan
from machines.model.preparation import Preparation, PreparationState
from machines.model.reboots import RebootApproval
from machines.model.rollout import Failure, Hold, Rollout, Target
from machines.model.rows import Delete, NodeRemoval, RolloutPart, RolloutRow, Row, StoreRow, with_part
from machines.model.train import Train
from machines.model.windows import Freeze
from machines.states import IN_FLIGHT_PHASES, Outcome, Phase

PlanCompiler = Callable[[Mapping[str, Any]], Plan]
"""Makes a plan from its canonical content; the shell provides it."""


class Projection(Records):
    def __init__(self, limits: Limits, compile_plan: PlanCompiler | None = None) -> None:
        super().__init__(limits)
        self._compile = compile_plan

    @classmethod
    def build(
        cls,
        snapshot: FactsSnapshot,
        limits: Limits,
        compile: PlanCompiler | None = None,  # noqa: A002  # what it does, in the word of the plan file
    ) -> Self:
        """Return the index of a snapshot; `compile` makes the plans of later submits."""
        index = cls(limits, compile)
        index.epoch = snapshot.epoch
        for rollout in snapshot.rollouts:
            index._add_rollout(rollout)
        for name, targets in groupby(snapshot.targets, key=lambda target: target.rollout):
            index._load_targets(name, tuple(targets))
        index._nodes = {node.name: node for node in snapshot.nodes}
        index.worked_on = snapshot.worked_on
        index._load_preparations(snapshot.preparations)
        for hold in snapshot.holds:
            index._add_hold(hold)
        index._freezes = {freeze.id: freeze for freeze in snapshot.freezes}
        index._trains = {train.name: train for train in snapshot.trains}
        index._reboot_approvals = {each.id: each for each in snapshot.reboot_approvals}
        index.team_rules = {each.team: each for each in snapshot.team_rules}
        # Last, because whether a node is down follows from all of the above.
        index._rebuild_pools()
        return index

    def rebuilt(self, snapshot: FactsSnapshot) -> Self:
        """Return a new index of these stored facts, with the observations of this one."""
        index = type(self).build(snapshot, self.limits, self._compile)
        index.record_mismatches(self.mismatches)
        index.record_disk_shortage(self.disk_shortage)
        index.record_runner_problems(self.runner_problems)
        index.record_changed_values(self.changed_values)
        index.record_sources(tuple(self.sources.values()))
        # Without them every node would be unknown, and nothing would start before all are observed again.
        index.record_observations_of(self)
        # A settled row may be that of a node.
        index.node_changes = self.node_changes + 1
        index._recorded_work = self._recorded_work.copy()
        return index

    def apply(self, event: events.Event) -> None:
        """Apply one event; raises IllegalTransition or UnexpectedRow, and then nothing has changed.

        Those of verdicts, of configurations, and of a rollout that is deleted or was closed before the start,
        concern the store alone.
        """
        if isinstance(event, events.StoreEvent):
            return
        if isinstance(event, events.DaemonStarted):
            self.epoch = event.epoch
        rollout = rollout_of(event)
        if rollout is None or rollout in self._rollouts or isinstance(event, events.RolloutOpened):
            # writes() makes all writes before the first one is applied, so a refused event changes nothing.
            for write in writes(event, self, self.now):
                if isinstance(write, Delete):
                    self._delete(write.row)
                else:
                    self._write(write.row, write.owner)

    def load_rollout(
        self, rollout: Rollout, targets: Iterable[Target], preparations: Iterable[Preparation] = ()
    ) -> None:
        """Add a rollout without an event: a closed one of the store, or in a fork a draft."""
        self._add_rollout(rollout)
        for target in targets:
            self._store_target(target)
        for row in preparations:
            self._record_preparation(row)

    def forget_rollout(self, rollout: str) -> None:
        """Drop a closed rollout, as a restart does; the store still has it."""
        self._delete_rollout(rollout)

    def update_limits(self, limits: Limits, plans: Mapping[str, Plan] | None = None) -> None:
        """Apply new settings; `plans` are the rollouts' plans, compiled under them."""
        self.limits = limits
        self.nodes_by_runner = None
        self._pool_keys = tuple(limits.pools)
        self._rollouts = self._own(self._rollouts)
        for name, rollout in self._rollouts.items():
            if plans is not None and name in plans:
                self._rollouts[name] = replace(rollout, plan=plans[name])
                self._load_rollout_preparations(name)
            self._add_pool_keys(self._rollouts[name].plan)
        # The plans may ask for other votes now, and for other rollbacks.
        self._unresolved_failures.clear()
        self.recounted_failures.clear()
        self.due_rollbacks.clear()
        self._rebuild_pools()
        for observation in self._observations.values():
            self._schedule_reevaluation(observation)

    def _write(self, row: Row, owner: str) -> None:
        match row:
            case Target():
                self._store_target(row)
            case _ if isinstance(row, RolloutPart):
                self._write_part(owner, row)
            case RolloutOpened():
                if self._compile is None:
                    raise ValueError("this index was built without a way to compile plans")
                self._add_rollout(changes.new_rollout(row, self._compile(row.content)))
            case Preparation():
                self._record_preparation(row)
            case Node() | NodeRemoval():
                self._write_node(row)
            case Hold():
                self._add_hold(row)
                self._pool_index.reevaluate(self, (row.node,))
            case Freeze():
                self._freezes = {**self._freezes, row.id: row}
                self.pending_groups.mark_all()
            case Train():
                self._trains = {**self._trains, row.name: row}
                self.pending_groups.mark_all()
            case RebootApproval() | TeamRulesChanged():
                self._write_own_rule(row)
            case _ if isinstance(row, StoreRow):
                pass
            case _:
                assert_never(row)

    def _write_own_rule(self, row: RebootApproval | TeamRulesChanged) -> None:
        if isinstance(row, RebootApproval):
            # No node of a rollout waits for it, and a machine asks again by itself.
            self._reboot_approvals = {**self._reboot_approvals, row.id: row}
        else:
            self.team_rules = {**self.team_rules, row.rules.team: row.rules}
            self.pending_groups.mark_all()

    def _delete(self, row: Hold | Freeze | Train | RebootApproval | StoreRow) -> None:
        if isinstance(row, Freeze):
            self._freezes = self._own(self._freezes)
            del self._freezes[row.id]
            self.pending_groups.mark_all()
        elif isinstance(row, Train):
            self._trains = {name: each for name, each in self._trains.items() if name != row.name}
            self.pending_groups.mark_all()
        elif isinstance(row, RebootApproval):
            kept = self._reboot_approvals.items()
            self._reboot_approvals = {key: each for key, each in kept if key != row.id}
        elif isinstance(row, Hold):
            key = (row.node, row.source, row.id)
            self._holds, self._holds_by_node = self._own(self._holds), self._own(self._holds_by_node)
            del self._holds[key]
            del self._own_row(self._holds_by_node, row.node)[key]
            self._pool_index.reevaluate(self, (row.node,))

    def _write_node(self, row: Node | NodeRemoval) -> None:
        # A node that is gone cannot be rolled back, and one that is back can.
        self.due_rollbacks.clear()
        self.nodes_by_runner = None
        if any(target.phase in IN_FLIGHT_PHASES for target in self.targets_on(row.name)):
            self._mark_runner_of(row.name)  # by its labels as they were
        self.worked_on = {**self.worked_on, **self._work_on((row.name,))}  # it may come back
        self._nodes = self._own(self._nodes)
        self.node_changes += 1
        if isinstance(row, Node):
            self._nodes[row.name] = row
            self._pool_index.update_node(self, row, self._pool_keys)
        else:
            self._pool_index.remove_node(self, row.name)
            del self._nodes[row.name]
            self._observations = self._own(self._observations)
            self._lose_report(self._observations.pop(row.name, None))
            self._forget_measured(lambda rollout, node: node == row.name)
        for target in self.targets_on(row.name):  # its pools and labels may have changed
            if target.phase is Phase.PENDING:
                self.pending_groups.remove(target)
                self._enqueue(target)
            if (known := self._own_preparations(target.rollout)) is not None:
                known.place(target, self._nodes.get(row.name))

    def _write_part(self, rollout: str, row: RolloutPart) -> None:
        if isinstance(row, RolloutRow) and row.deleted_at is not None:
            self._delete_rollout(rollout)
            return
        before, unresolved = self._rollouts[rollout], self._unresolved_failures.get(rollout)
        after = with_part(before, row)
        self._update_rollout(rollout, after)
        # Votes cover what they were shown; only those that look ahead may cover a failure that comes later.
        if isinstance(row, Failure) and unresolved is not None and not looks_ahead(before):
            self._unresolved_failures[rollout] = (*unresolved, row)
        if isinstance(row, ArtifactsBuilt):
            # A node for which nothing was built has no stage left, and no row of its own will say so.
            self._load_rollout_preparations(rollout)
        # A failure lets no node start, and an amendment marks the groups of its targets alone.
        if not isinstance(row, Failure) and after.amendments == before.amendments:
            self.pending_groups.mark_rollout(rollout)
        self._mark_train(rollout)

    def _add_rollout(self, rollout: Rollout) -> None:
        self._own_rollout_tables()
        self._rollouts[rollout.id] = rollout
        self._targets[rollout.id] = {}
        self._counters[rollout.id] = RolloutCounters()
        self._pending[rollout.id] = {}
        if rollout.plan.prepare:
            self._preparations[rollout.id] = RolloutPreparations(rollout)
        if self._add_pool_keys(rollout.plan):
            self._rebuild_pools()

    def _update_rollout(self, rollout_id: str, rollout: Rollout) -> None:
        before = self._rollouts[rollout_id]
        is_closing = rollout.closed and not before.closed
        self._rollouts = self._own(self._rollouts)
        self._rollouts[rollout_id] = rollout
        self._forget_unresolved(rollout_id)
        self.due_rollbacks.pop(rollout_id, None)
        if is_closing:
            targets = self._targets[rollout_id].values()
            for target in targets:
                self.pending_groups.remove(target)
            self._forget_measured(lambda rollout, node: rollout == rollout_id)
            # A closed rollout accepts fewer commands, so the remedies for the nodes that it keeps down
            # change.
            self._pool_index.reevaluate(
                self, (target.node for target in targets if target_unavailability(self, target).code)
            )

    def _forget_unresolved(self, rollout: str) -> None:
        self._unresolved_failures.pop(rollout, None)
        self.recounted_failures.pop(rollout, None)

    def _delete_rollout(self, rollout: str) -> None:
        removed = list(self._targets[rollout].values())
        self.worked_on = {**self.worked_on, **self._work_on(target.node for target in removed)}
        self._own_rollout_tables()
        if (preparations := self._preparations.pop(rollout, None)) is not None:
            for node, stage in preparations.active:
                on = preparations.rollout.node_of_stage(node, stage)
                self._own_row(self._preparing, on).discard((rollout, node, stage))
        for target in removed:
            self.pending_groups.remove(target)
            others = tuple([each for each in self.targets_on(target.node) if each is not target])
            self._targets_by_node[target.node] = others
            self._needing_driver.discard((rollout, target.node))
            for measured in (self._isolations, self._aborts, self._outages, self._train_waits):
                measured.pop((rollout, target.node), None)
            if target.phase in IN_FLIGHT_PHASES:
                self._in_flight -= not self._shares_outage(target)
                self.nodes_by_runner = None
                self._mark_runner_of(target.node)
        rounds = self._next_rounds.items()
        self._next_rounds = {key: at for key, at in rounds if key[0] != rollout}
        self._forget_unresolved(rollout)
        own_keys = self._rollouts[rollout].plan.pool_keys
        by_rollout = (self._rollouts, self._targets, self._counters, self._pending, self.due_rollbacks)
        for table in by_rollout:
            table.pop(rollout, None)
        if own_keys and self._drop_pool_keys():
            self._rebuild_pools()
        self._pool_index.reevaluate(self, (target.node for target in removed))

    def _load_targets(self, rollout: str, targets: Sequence[Target]) -> None:
        """Store the targets of a snapshot in bulk, before the pools and the groups exist."""
        self._own_rollout_tables()
        self._counters[rollout].add_all(targets)
        by_node, pending = self._targets_by_node, self._pending[rollout]
        self._targets[rollout] |= {target.node: target for target in targets}
        for target in targets:
            by_node[target.node] = (*by_node.get(target.node, ()), target)
            if target.phase in IN_FLIGHT_PHASES:
                self._in_flight += not self._shares_outage(target)
            elif target.phase is Phase.PENDING:
                pending.setdefault(target.wave, []).append(queue_position(target))
            if target.needs_driver:
                self._needing_driver.add((rollout, target.node))
        for queue in pending.values():
            queue.sort()

    def _load_preparations(self, rows: Iterable[Preparation]) -> None:
        by_rollout: dict[str, list[Preparation]] = {}
        for row in rows:
            by_rollout.setdefault(row.rollout, []).append(row)
            known = self._rollouts.get(row.rollout)
            if known is not None and row.state is PreparationState.RUNNING:
                on = known.node_of_stage(row.node, row.stage)
                self._own_row(self._preparing, on, set).add((row.rollout, row.node, row.stage))
        for rollout in self._preparations:
            self._load_rollout_preparations(rollout, by_rollout.get(rollout, ()))

    def _load_rollout_preparations(self, rollout: str, rows: Iterable[Preparation] | None = None) -> None:
        """Make the preparations of a rollout again, by default from the rows that are known."""
        known = self._preparations.get(rollout)
        if known is not None:
            rows = known.rows.values() if rows is None else rows
            targets = self._targets[rollout].values()
            self._preparations = self._own(self._preparations)
            self._preparations[rollout] = preparations_of(self._rollouts[rollout], rows, targets, self._nodes)

    def _record_preparation(self, row: Preparation) -> None:
        self._preparing = self._own(self._preparing)
        on = self._rollouts[row.rollout].node_of_stage(row.node, row.stage)
        preparing, key = self._own_row(self._preparing, on, set), (row.rollout, row.node, row.stage)
        (preparing.add if row.state is PreparationState.RUNNING else preparing.discard)(key)
        self._preparations = self._own(self._preparations)
        known = self._own_row(self._preparations, row.rollout)
        known.record(row)
        target = self._targets[row.rollout].get(row.node)
        if target is not None:
            known.place(target, self._nodes.get(row.node))
        self._mark_targets_on(on)

    def _store_target(self, target: Target) -> None:
        rollout, node = target.rollout, target.node
        self._own_rollout_tables()
        # The old version is counted out by its own values.  A counter that is adjusted by what an event says
        # would be wrong for ever after one event that says too little.
        before = self._targets[rollout].get(node)
        expected = self.expected_s(rollout)
        if before is not None:
            self._uncount_target(before)
        self._own_row(self._targets, rollout)[node] = target
        on_node = self._targets_by_node.get(node, ())
        self._targets_by_node[node] = (
            (*on_node, target)
            if before is None
            else tuple([target if each is before else each for each in on_node])
        )
        self._count_target(target)
        if (preparations := self._own_preparations(rollout)) is not None:
            preparations.place(target, self._nodes.get(node))
        # A shorter expected time may let waiting nodes fit into their window.  Without windows each end of a
        # node would have the next decision try all groups again.
        has_windows = self._rollouts[rollout].plan.windows or self.team_rules or self.limits.team_windows
        if has_windows and self.expected_s(rollout) < expected:
            self.pending_groups.mark_rollout(rollout)
        (self._needing_driver.add if target.needs_driver else self._needing_driver.discard)((rollout, node))
        if (before is not None and before.phase in IN_FLIGHT_PHASES) != (target.phase in IN_FLIGHT_PHASES):
            self.nodes_by_runner = None
        # What was reported is of the isolation that ends with this.
        if target.phase is not Phase.ISOLATING:
            self._isolations.pop((rollout, node), None)
            self._aborts.pop((rollout, node), None)
        if target.phase is not Phase.VERIFYING:
            self._outages.pop((rollout, node), None)
        if target.phase is not Phase.PENDING:
            self._train_waits.pop((rollout, node), None)
        self._mark_train(rollout)
        # The teams that must vote are those that own a target which has not left.
        if before is None or _voting_team(before) != _voting_team(target):
            self._forget_unresolved(rollout)
        if before is not None and before.phase in IN_FLIGHT_PHASES and target.phase not in IN_FLIGHT_PHASES:
            self._mark_runner_of(node)
        # What a node in flight does changes no rollback that is due; dropping them costs a sort of all.
        is_at_work = {target.phase, before and before.phase} <= IN_FLIGHT_PHASES
        if before is None or not is_at_work or before.rolling_back != target.rolling_back:
            self.due_rollbacks.pop(rollout, None)
        self._pool_index.reevaluate(self, (node,))

    def _mark_runner_of(self, node: str) -> None:
        """Mark what may start when a node leaves its runner; a runner without a limit was not full by it."""
        at = self._nodes.get(node)
        rule = None if at is None else runner_of(self.limits.runners, at)
        has_workers = at is not None and not self.limits.workers.keys().isdisjoint(at.sources)
        if rule is None or rule.parallel is not None or has_workers:
            self.pending_groups.mark_all()

    def _count_target(self, target: Target) -> None:
        self._own_row(self._counters, target.rollout).adjust(target, 1)
        if target.phase in IN_FLIGHT_PHASES:
            self._in_flight += not self._shares_outage(target)
        if target.phase is Phase.PENDING:
            waves = self._own_row(self._pending, target.rollout)
            position = queue_position(target)
            insort(self._own_row(waves, target.wave, list), position)
            self._enqueue(target, position)

    def _uncount_target(self, target: Target) -> None:
        self._own_row(self._counters, target.rollout).adjust(target, -1)
        if target.phase in IN_FLIGHT_PHASES:
            self._in_flight -= not self._shares_outage(target)
        if target.phase is Phase.PENDING:
            queue = self._own_row(self._own_row(self._pending, target.rollout), target.wave)
            del queue[bisect_left(queue, queue_position(target))]
            self.pending_groups.remove(target)

    def _shares_outage(self, target: Target) -> bool:
        """Return whether another target of the node is in flight too: the node counts once."""
        others = self.targets_on(target.node)
        return any(t.rollout != target.rollout and t.phase in IN_FLIGHT_PHASES for t in others)

    def _mark_train(self, rollout: str) -> None:
        """Mark the other rollouts of a train: their nodes may have waited for this one."""
        train = self.train_of(rollout) if self._trains else None
        for other in () if train is None else train.rollouts:
            if other != rollout:
                self.pending_groups.mark_rollout(other)

    def _enqueue(self, target: Target, position: QueuePosition | None = None) -> None:
        # Nothing of a closed rollout starts, so each decision would examine its groups in vain.
        if self._rollouts[target.rollout].closed:
            return
        ids = self.pool_ids_for(target.rollout, target.node)
        self.pending_groups.enqueue(target, position or queue_position(target), ids)

    def _add_hold(self, hold: Hold) -> None:
        key = (hold.node, hold.source, hold.id)
        self._holds, self._holds_by_node = self._own(self._holds), self._own(self._holds_by_node)
        self._holds[key] = hold
        self._own_row(self._holds_by_node, hold.node, dict)[key] = hold
        if hold.until is not None:
            self._pool_index.schedule_reevaluation(hold.node, hold.until, improves=True)

    def _add_pool_keys(self, plan: Plan) -> bool:
        """Add the pool keys of a plan; return whether any was new."""
        added = tuple(key for key in plan.pool_keys if key not in self._pool_keys)
        self._pool_keys += added
        return bool(added)

    def _drop_pool_keys(self) -> bool:
        """Drop the pool keys that no plan of a rollout names any more; return whether there was one."""
        before, self._pool_keys = self._pool_keys, tuple(self.limits.pools)
        for rollout in self._rollouts.values():
            self._add_pool_keys(rollout.plan)
        return set(before) != set(self._pool_keys)

    def _rebuild_pools(self) -> None:
        self.pending_groups.clear()
        self._pool_index.rebuild(self, self._pool_keys)
        # A group is named by its pools, so other pools make other groups.
        for targets in self._targets.values():
            for target in targets.values():
                if target.phase is Phase.PENDING:
                    self._enqueue(target)


def _voting_team(target: Target) -> str | None:
    return None if target.outcome is Outcome.LEFT else target.team
