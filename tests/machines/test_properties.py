"""Properties of random fleets: no violation, one truth, and an end."""

from __future__ import annotations

import math
from dataclasses import fields

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from machines.facts.projection import Projection
from machines.model.decision import (
    AbortIsolation,
    Admit,
    CheckIfCurrent,
    Decision,
    EndRollout,
    Observe,
    OpenGate,
    ProbeTraffic,
)
from machines.scheduler.decide import decide
from machines.scheduler.why import why, why_nodes
from machines.states import IN_FLIGHT_PHASES
from machines.states import Phase as NodePhase
from rolloutd.texts.reason_text import describe
from tests.machines.fleet_simulator import FleetSimulator
from tests.oracle import check_log
from tests.support.recount import wrong_counts
from tests.support.snapshot_judge import violations

EXAMPLES = settings(
    deadline=None,
    derandomize=True,
    max_examples=100,
    # A smaller seed is no simpler world, so shrinking would only take time.
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
MORE_EXAMPLES = settings(EXAMPLES, max_examples=250)
COMPARED_FIELDS = [each.name for each in fields(Decision) if each.name not in {"wake_at", "backoffs"}]
"""All that is decided.

A kept index may ask for an earlier wake-up than a new one, in which no group has backed off.
"""

SEEDS = st.integers(0, 2**32)
STEPS = st.integers(25, 60)
ROUNDS_TO_END = 400
"""Rounds of peace in which every rollout must end: some ten nodes, three phases, backoffs and a soak."""


def rebuilt(index: Projection) -> Projection:
    """Return an index built afresh from what the other one knows."""
    fresh = Projection.build(index.snapshot(), index.limits)
    fresh.record_observations_of(index)
    for told in index.traffic:
        fresh.record_traffic(told)
    return fresh


def requeue(decision: Decision) -> float:
    return math.inf if decision.wake_at is None else decision.wake_at


def is_work(decision: Decision) -> bool:
    """Say whether carrying the decision out may change the next one."""
    observed = bool(decision.of(Observe) or decision.of(ProbeTraffic))
    return observed or bool(
        decision.of(Admit)
        or decision.of(CheckIfCurrent)
        or decision.of(AbortIsolation)
        or decision.of(OpenGate)
    )


def run_judged_by_invariants(seed: int, steps: int) -> FleetSimulator:
    """Run a random fleet; every event and every decision must keep the invariants."""
    world = FleetSimulator.from_seed(seed)
    for _ in range(steps):
        world.step()
        before = world.index.snapshot()
        seen, told = world.index.observations, world.index.traffic
        decision = world.decide()
        after = world.index.snapshot()
        if not decision.of(Observe):
            known = {"limits": world.index.limits, "observations": seen, "traffic": told}
            found = violations(before, after, now=world.now, **known)
            assert found == []
    return world


@MORE_EXAMPLES
@given(SEEDS, STEPS)
def test_invariants_and_oracle_find_nothing_forbidden(seed: int, steps: int) -> None:
    assert check_log(run_judged_by_invariants(seed, steps).log) == []


@EXAMPLES
@given(SEEDS, STEPS)
def test_updated_index_equals_rebuilt_index(seed: int, steps: int) -> None:
    world = FleetSimulator.from_seed(seed)
    world.index.judged_at_once = 1
    for _ in range(steps):
        world.step()
        mine = decide(world.index, world.now)
        index = rebuilt(world.index)
        assert index.snapshot() == world.index.snapshot()
        assert wrong_counts(world.index) == []
        fresh = decide(index, world.now)
        for name in COMPARED_FIELDS:
            assert getattr(mine, name) == getattr(fresh, name), name
        assert requeue(mine) <= requeue(fresh)
        world.decide()


@EXAMPLES
@given(SEEDS, STEPS)
def test_explanation_matches_decision(seed: int, steps: int) -> None:
    world = FleetSimulator.from_seed(seed)
    for _ in range(steps):
        world.step()
        starting, pending = set(), set()
        for rollout in world.index.rollouts:
            told = why_nodes(world.index, rollout, world.now)
            for target in world.index.targets(rollout):
                reason = told[target.node]
                assert reason == why(world.index, target, world.now)
                if target.phase is NodePhase.PENDING:
                    pending.add((rollout, target.node))
                    assert reason is not None
                    assert describe(reason)
                    if reason.code == "starting":
                        starting.add((rollout, target.node))
        decision = world.decide()
        begun = {(each.rollout, each.node) for each in (*decision.of(Admit), *decision.of(CheckIfCurrent))}
        assert starting == begun & pending


@EXAMPLES
@given(SEEDS, STEPS, st.floats(0.0, 1.0))
def test_nothing_starts_before_requeue_time(seed: int, steps: int, part: float) -> None:
    world = FleetSimulator.from_seed(seed)
    for _ in range(steps):
        world.step()
    decision = world.decide()
    while is_work(decision):
        decision = world.decide()
    until = min(requeue(decision), world.now + 3600.0)
    later = world.now + part * (until - world.now)
    if later < until:
        again = decide(rebuilt(world.index), later)
        assert (again.of(Admit), again.of(OpenGate), again.of(EndRollout)) == ((), (), ())


@EXAMPLES
@given(SEEDS, STEPS)
def test_everything_ends_without_faults(seed: int, steps: int) -> None:
    world = FleetSimulator.from_seed(seed)
    for _ in range(steps):
        world.step()
        world.decide()
    world.stop_faults()
    for _ in range(ROUNDS_TO_END):
        world.resolve_all_failures()
        decision = world.decide()
        world.advance_some()
        moving = is_work(decision) or any(
            target.phase in IN_FLIGHT_PHASES for target in world.index.needing_driver()
        )
        asleep_until = max(world.now + 1.0, min(requeue(decision), world.now + 3600.0))
        world.now = world.now + 1.0 if moving else asleep_until
        if all(rollout.closed for rollout in world.index.rollouts.values()):
            break
    left = [rollout for rollout in world.index.rollouts.values() if not rollout.closed]
    told = {each.id: why_nodes(world.index, each.id, world.now) for each in left}
    assert left == [], told
    assert check_log(world.log) == []
