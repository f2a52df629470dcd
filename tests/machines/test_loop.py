"""The core's loop on one page, without ports and a store: decide, apply, act, record."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from machines.facts.projection import Projection
from machines.model.actions import Transition, Wait
from machines.model.events import StepRecorded
from machines.model.limits import Budget, Limits, PoolRule
from machines.model.plan import StepDef
from machines.model.step_record import Failed, Ok, StepRecord
from machines.scheduler.decide import decide
from machines.scheduler.decided_events import events_of
from machines.scheduler.isolation_aborts import record_giving_way
from machines.states import Outcome, Phase
from machines.workflow.next_action import next_action
from machines.workflow.phase_transitions import transition
from machines.workflow.recording import intent_of, is_isolated_after, record_of
from machines.workflow.records import upsert
from machines.workflow.situation import Situation
from tests.machines.builders import T0, index_of, nodes_of, observed_up, submit

STEP_S = 60.0
"""Each step takes as long."""


@dataclass
class Loop:
    """A fleet in virtual time: every node is up, and every step takes a minute."""

    index: Projection
    fails: float = 0.0
    random: Random = field(default_factory=lambda: Random(1))
    now: float = T0
    records: dict[tuple[str, str], tuple[StepRecord, ...]] = field(default_factory=dict)
    most_at_once: int = 0

    def run(self) -> None:
        """Walk until every rollout has ended, or only people can go on."""
        while any(not rollout.closed for rollout in self.index.rollouts.values()):
            self.index.record_observations(observed_up(self.index.nodes, self.now), self.now)
            decision = decide(self.index, self.now)
            record_giving_way(self.index, decision)
            groups = events_of(self.index, decision, self.now, lambda causes: "")
            for event in (event for group in groups for event in group.events):
                self.index.apply(event)
            at_work = self.index.needing_driver()
            self.most_at_once = max(self.most_at_once, len(at_work))
            if not at_work and not groups and decision.wake_at is None:
                return
            self.now += STEP_S
            for target in at_work:
                self.act(target.rollout, target.node)

    def act(self, rollout: str, node: str) -> None:
        """Take the node's next step, and record what a random world makes of it."""
        target, done = self.index.target(rollout, node), self.records.get((rollout, node), ())
        plan, elapsed_s = self.index.plan_for(target), self.now - target.since
        match next_action(Situation(plan, target, done, self.now, elapsed_s)):
            case Wait():
                pass
            case Transition() as action:
                end = {"outcome": action.outcome, "step": action.step, "code": action.code}
                moved = transition(target, action.trigger, self.now, **end)
                self.index.apply(moved)
            case action:
                intent = intent_of(action, target, self.now)
                result = Failed("drawn") if self.random.random() < self.fails else Ok("drawn")
                record = record_of(intent, result, self.now)
                self.records[rollout, node] = upsert(done, record)
                # The intent first: from then on the node counts as isolated.
                for isolated in (is_isolated_after(action, None), is_isolated_after(action, result)):
                    self.index.apply(StepRecorded(record, isolated))


def fleet(**more: float) -> Loop:
    index = index_of(
        nodes_of({"a": ["n1", "n2", "n3"], "b": ["n4", "n5", "n6"]}),
        Limits(pools={"team": PoolRule(Budget(1, None))}),
    )
    submit(index, isolate=(StepDef("isolate.0.command", "command"),), max_parallel=9)
    return Loop(index, **more)


def test_fleet_is_walked_one_node_of_each_pool_at_a_time() -> None:
    loop = fleet()
    loop.run()
    assert {target.outcome for target in loop.index.targets("R")} == {Outcome.CHANGED}
    assert loop.index.rollout("R").ended_at is not None
    assert loop.most_at_once == 2
    assert not any(target.isolated for target in loop.index.targets("R"))


def test_failed_step_stops_the_walk() -> None:
    loop = fleet(fails=1.0)
    loop.run()
    phases = [target.phase for target in loop.index.targets("R")]
    assert Phase.FAILED in phases
    assert Phase.PENDING in phases
    assert loop.index.rollout("R").ended_at is None
