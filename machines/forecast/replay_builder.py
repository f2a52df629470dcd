"""The replay of a walk: its attempts as items, and what each waited for.

The causes are read from the facts before the walk and from what the walk noted; what the walk waited for
without one of them is the item's slack.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from machines.facts.index import Index
from machines.facts.preparations import BUILD_NODE
from machines.forecast.attempt import Attempt, NodeKey, Part, WalkedStep
from machines.forecast.distributions import Distributions
from machines.forecast.replay import TOLERANCE_S, Failure, Item, Openings, Replay, Turn
from machines.forecast.timeline import own_bound
from machines.forecast.walk import Walk
from machines.rules.start_blockers import window_groups
from machines.states import Phase

_RUNS_OF = " "
"""Begins the names of the slots of a runner or inventory; no pool has a name with spaces."""


def replay_of(walk: Walk, before: Index) -> Replay:
    """Return the replay of a walk that has ended; `before` are the facts that it began with."""
    assumed = walk.assumptions
    distributions = Distributions(assumed.common_deviation, assumed.are_samples)
    replay = Replay(before.now, distributions, approve_after_s=assumed.approve_after_s)
    return _Builder(walk, before, replay).build()


@dataclass(slots=True)
class _Builder:
    walk: Walk
    before: Index
    replay: Replay
    _slots: dict[str, int] = field(default_factory=dict)
    _openings: dict[tuple[str, str | None], Openings | None] = field(default_factory=dict)
    _first_start: dict[str, float] = field(default_factory=dict)
    _last_stage: dict[NodeKey, int] = field(default_factory=dict)
    _stage_first: dict[tuple[str, str], int] = field(default_factory=dict)
    _turn_of: dict[tuple[str, int], int] = field(default_factory=dict)
    _next_epoch: dict[str, int] = field(default_factory=dict)
    _following: dict[int, Part] = field(default_factory=dict)
    """The part after each part of the same attempt, by its id() as an object."""
    _last_part: dict[int, int] = field(default_factory=dict)
    """The number of the last part of each attempt, by its id() as an object."""
    _ends_last: dict[int, Attempt] = field(default_factory=dict)
    """The attempt of each outage that ends last: with it the node gives its slots back."""
    _held: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The slots that are free when an attempt ends, by its id() as an object."""
    _in_outage: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def build(self) -> Replay:
        # A runner that always had a slot delays nothing.
        has_runs = self.walk.agenda.most_runs >= self.walk.assumptions.parallel_runs
        begun = [
            part
            for part in self.walk.agenda.begun
            if part.attempt.ends_at is not None and (has_runs or not part.is_run)
        ]
        self._link_parts(begun)
        shared = self._shared_nodes()
        for part in begun:
            attempt = part.attempt
            if attempt.stage:
                if not part.is_run:
                    self._add_stage(attempt, has_runs=has_runs)
            elif id(attempt) not in self._last_part:
                self._add_head(part, shared)
            elif part.is_run:
                self._add_run(part)
            else:
                self._add_rest(part, part.step, part.began_at, self._woken_by(part.attempt, part.began_at))
        for gate, asked_at in self.walk.approvals.asked_at.items():
            self.replay.gates[gate] = self._turn(gate[0], asked_at)
        for rollout in self.before.rollouts.values():
            ended_at = self.walk.index.rollout(rollout.id).ended_at
            if ended_at is None:
                ends = (each.attempt.ends_at for each in begun if each.attempt.rollout == rollout.id)
                ended_at = max((each for each in ends if each is not None), default=self.before.now)
            self.replay.ends[rollout.id] = self._turn(rollout.id, ended_at)
        self.replay.settle()
        self.replay.failure_rate = self.walk.assumptions.failure_rate
        self.replay.follows_arrival = has_runs or self.replay.failure_rate > 0.0
        if self.replay.follows_arrival:
            self.replay.link()
        return self.replay

    def _link_parts(self, begun: Sequence[Part]) -> None:
        before: dict[int, Part] = {}
        for part in begun:
            attempt = part.attempt
            if id(attempt) in before:
                self._following[id(before[id(attempt)])] = part
            elif not attempt.is_running and not attempt.stage:
                self._first_start.setdefault(attempt.node, attempt.starts_at)
            before[id(attempt)] = part
            last = self._ends_last.setdefault(attempt.outage, attempt)
            if (attempt.ends_at or 0.0) > (last.ends_at or 0.0):
                self._ends_last[attempt.outage] = attempt

    def _shared_nodes(self) -> frozenset[str]:
        """Return the nodes that are targets of two open rollouts: only one of them works on a node."""
        counts: dict[str, int] = defaultdict(int)
        for rollout in self.before.rollouts.values():
            if not rollout.closed:
                for target in self.before.targets(rollout.id):
                    counts[target.node] += target.phase is not Phase.DONE
        return frozenset(node for node, count in counts.items() if count > 1)

    # items

    def _part(self, attempt: Attempt, since: float, until: float, steps: Sequence[WalkedStep]) -> Item:
        drawn = [each for each in steps if len(each.durations) > 1]
        drawn_s = sum(each.duration_s for each in drawn)
        fixed_s = until - since - drawn_s
        drawn_of = self.replay.distributions.drawn_of
        durations = tuple((drawn_of(each.durations, each.stretch), len(each.durations)) for each in drawn)
        return Item(attempt, since, fixed_s, drawn_s, durations, attempt.rollout)

    def _append(self, item: Item) -> int:
        self.replay.items.append(item)
        return len(self.replay.items) - 1

    def _add_part(self, item: Item, following: Part | None) -> None:
        """Add a part of an attempt; without a following one its slots are free at its end."""
        attempt, number = item.attempt, self._append(item)
        self._last_part[id(attempt)] = number
        self._in_outage[attempt.outage].append(number)
        self.replay.parts[attempt.key] = (self.replay.parts.get(attempt.key, (number, number))[0], number)
        if following is None:
            held = self._held[id(attempt)]
            # The same tuple says that the part takes and frees the same slots.
            item.freed = item.slots if item.slots == held else (*item.freed, *held)
            item.failure = self._failure(attempt)

    def _add_head(self, part: Part, shared: frozenset[str]) -> None:
        """Add an attempt, or what it does before it first waits."""
        attempt, following = part.attempt, self._following.get(id(part))
        assert attempt.ends_at is not None
        until = attempt.ends_at if following is None else following.asked_at
        steps = attempt.steps if following is None else attempt.steps[: following.step]
        item = self._part(attempt, attempt.starts_at, until, steps)
        item.needed_s, item.is_running, item.keeps_order = attempt.needed_s, attempt.is_running, True
        item.slots = self._take_slots(attempt, shared)
        if item.is_running:
            item.bound = attempt.starts_at
        else:
            target = self.before.target(*attempt.key)
            item.bound = own_bound(self.before, target, self.before.now)[0]
            item.after = self._woken_by(attempt, attempt.starts_at)
            if attempt.key in self._last_stage:
                item.after += (self._last_stage[attempt.key],)
            if not attempt.is_rollback:
                item.turn = self._turn_number(attempt)
                item.openings = self._openings_of(attempt)
        self._add_part(item, following)

    def _take_slots(self, attempt: Attempt, shared: frozenset[str]) -> tuple[int, ...]:
        """Return the slots that an attempt takes: those of its node only if it begins the outage."""
        own, of_node = self._limits(attempt), [*_limits_of_node(attempt), "fleet"]
        if attempt.outage_of is not None:
            taken = _limits_of_node(attempt.outage_of)
            of_node = [each for each in _limits_of_node(attempt) if each not in taken]
        elif attempt.node in shared:
            of_node.append(f"node/{attempt.node}")
        for names, releaser in ((own, attempt), (of_node, self._ends_last[attempt.outage])):
            slots = tuple(self._slot(name, attempt) for name in names)
            self._held[id(releaser)] = (*self._held.get(id(releaser), ()), *slots)
        return tuple(self._slot(name, attempt) for name in (*own, *of_node))

    def _woken_by(self, attempt: Attempt, at: float) -> tuple[int, ...]:
        """Return the parts of others in the outage whose end is the cause of what begins at an instant."""
        items = self.replay.items
        others = [each for each in self._in_outage[attempt.outage] if items[each].attempt is not attempt]
        return tuple(each for each in others if abs(items[each].walked_end - at) <= TOLERANCE_S)

    def _add_run(self, part: Part) -> None:
        """Add a run of an attempt, and what comes between it and the next one or the end."""
        attempt, step = part.attempt, part.attempt.steps[part.step]
        run_ends_at = step.ends_at
        item = self._part(attempt, step.began_at, run_ends_at, [step])
        item.is_running = attempt.is_running and step.began_at < self.before.now
        item.bound = step.began_at if item.is_running else 0.0
        item.after = (self._last_part[id(attempt)],)
        item.slots = item.freed = (self._runner_slot(),)
        self._add_part(item, part)
        self._add_rest(part, part.step + 1, run_ends_at, ())

    def _add_rest(self, part: Part, first: int, since: float, after: tuple[int, ...]) -> None:
        """Add what an attempt does from an instant until it waits again, or until its end."""
        attempt, following = part.attempt, self._following.get(id(part))
        assert attempt.ends_at is not None
        until = attempt.ends_at if following is None else following.asked_at
        steps = attempt.steps[first:] if following is None else attempt.steps[first : following.step]
        item = self._part(attempt, since, until, steps)
        item.after = (self._last_part[id(attempt)], *after)
        self._add_part(item, following)

    def _failure(self, attempt: Attempt) -> Failure:
        assert attempt.ends_at is not None
        runs = [number for number, step in enumerate(attempt.steps) if step.is_run]
        steps = attempt.steps
        failed_at = steps[runs[-1]].ends_at if runs else attempt.ends_at
        whole = self._part(attempt, attempt.starts_at, attempt.ends_at, steps)
        waited_s = sum(each.began_at - each.asked_at for each in steps)
        return Failure(attempt.ends_at - failed_at, whole.fixed_s - waited_s, whole.drawn)

    def _add_stage(self, attempt: Attempt, *, has_runs: bool) -> None:
        assert attempt.ends_at is not None
        began_at = attempt.steps[0].began_at if attempt.steps else attempt.starts_at
        item = self._part(attempt, began_at, attempt.ends_at, attempt.steps)
        item.is_running = attempt.is_running and began_at < self.before.now
        item.bound = began_at if item.is_running else self.before.now
        number = self._append(item)
        rollout = self.before.rollout(attempt.rollout)
        stage = next((each for each in rollout.prepare_stages if each.name == attempt.stage), None)
        first = self._stage_first.setdefault((attempt.rollout, attempt.stage), number)
        build = (attempt.rollout, BUILD_NODE)
        after = {self._last_stage.get(key, number) for key in (attempt.key, build)}
        # An install runs on one node alone first.
        first_end = self.replay.items[first].attempt.ends_at if first != number else None
        if first_end is not None and attempt.starts_at >= first_end - TOLERANCE_S:
            after.add(first)
        item.after = tuple(sorted(after - {number}))
        if stage is not None:
            name = f"prepare/{attempt.rollout}/{stage.name}"
            if name not in self._slots:
                self._add_slots(name, [-math.inf] * stage.max_parallel)
            item.slots = (self._slots[name],)
        if has_runs and any(each.is_run for each in attempt.steps):
            item.slots += (self._runner_slot(),)
        item.freed = item.slots
        self._last_stage[attempt.key] = number

    # slots

    def _limits(self, attempt: Attempt) -> list[str]:
        plan = self.before.rollout(attempt.rollout).plan
        names = []
        if plan.max_parallel is not None:
            names.append(f"rollout/{attempt.rollout}")
        wave = next((each for each in plan.waves if each.name == attempt.wave), None)
        if wave is not None and wave.max_parallel is not None and not attempt.is_rollback:
            names.append(f"wave/{attempt.rollout}/{wave.name}")
        return names

    def _slot(self, name: str, attempt: Attempt) -> int:
        if name in self._slots:
            return self._slots[name]
        plan = self.before.rollout(attempt.rollout).plan
        match name.partition("/")[0]:
            case "fleet" if name == "fleet":
                return self._add_slots(name, [-math.inf] * self.before.limits.max_parallel)
            case "rollout" if name == f"rollout/{attempt.rollout}":
                return self._add_slots(name, [-math.inf] * (plan.max_parallel or 1))
            case "wave" if name == f"wave/{attempt.rollout}/{attempt.wave}":
                most = next(each.max_parallel for each in plan.waves if each.name == attempt.wave)
                return self._add_slots(name, [-math.inf] * (most or 1))
            case "node" if name == f"node/{attempt.node}":
                return self._add_slots(name, [-math.inf])
            case _ if name.startswith(_RUNS_OF):
                return self._add_slots(name, [-math.inf] * attempt.bounds[name.removeprefix(_RUNS_OF)])
            case _:
                return self._add_slots(name, self._pool_slots(name))

    def _runner_slot(self) -> int:
        if "runner" in self._slots:
            return self._slots["runner"]
        return self._add_slots("runner", [-math.inf] * int(self.walk.assumptions.parallel_runs))

    def _add_slots(self, name: str, free_at: list[float]) -> int:
        self._slots[name] = len(self.replay.slots)
        self.replay.slots.append(sorted(free_at))
        return self._slots[name]

    def _pool_slots(self, name: str) -> list[float]:
        """Return when each slot of a pool is free of what takes it before the walk and is not of it."""
        pool = self.before.pool(name)
        budget = self.before.budget(pool)
        targets_on = self.before.targets_on
        at_rest = (node for node in pool.down if not any(each.needs_driver for each in targets_on(node)))
        taken = [self._released_at(node) for node in at_rest]
        # Of a pool over its budget the last ones count: a node starts once fewer are down than may be.
        return sorted([-math.inf] * budget + taken)[-budget:] if budget else [math.inf]

    def _released_at(self, node: str) -> float:
        if node in self._first_start:
            return self._first_start[node]
        untils = [math.inf if each.until is None else each.until for each in self.before.holds_on(node)]
        is_kept = any(t.phase is Phase.FAILED or t.isolated for t in self.before.targets_on(node))
        return math.inf if is_kept or not untils else max(untils)

    # turns

    def _turn_number(self, attempt: Attempt) -> int:
        epochs = self.walk.timeline.epochs.get(attempt.rollout, [])
        number = self._next_epoch.get(attempt.rollout, 0)
        while number + 1 < len(epochs) and epochs[number + 1].begins_at <= attempt.starts_at + TOLERANCE_S:
            number += 1
        self._next_epoch[attempt.rollout] = number
        key = (attempt.rollout, number)
        if number >= len(epochs):
            return -1
        if key not in self._turn_of:
            self._turn_of[key] = len(self.replay.turns)
            self.replay.turns.append(self._turn(attempt.rollout, epochs[number].begins_at))
        return self._turn_of[key]

    def _turn(self, rollout: str, at: float) -> Turn:
        """Return an instant of a rollout as so long after the attempts that had ended by then."""
        items = self.replay.items
        ended = [
            number
            for number in self._last_part.values()
            if items[number].attempt.rollout == rollout
            and (items[number].attempt.ends_at or math.inf) <= at + TOLERANCE_S
        ]
        last = max((items[number].attempt.ends_at or 0.0 for number in ended), default=None)
        return Turn([], at) if last is None else Turn(ended, max(0.0, at - last))

    # windows

    def _openings_of(self, attempt: Attempt) -> Openings | None:
        key = (attempt.rollout, attempt.team)
        if key not in self._openings:
            rollout = self.before.rollout(attempt.rollout)
            groups = tuple(
                tuple(group) for _, group in window_groups(self.before, rollout, attempt.team) if group
            )
            self._openings[key] = Openings(groups, self.before.now) if groups else None
        return self._openings[key]


def _limits_of_node(attempt: Attempt) -> list[str]:
    return [*attempt.pools, *(f"{_RUNS_OF}{name}" for name in attempt.bounds)]
