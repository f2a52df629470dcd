"""Whatever happens, in whatever order: nothing forbidden, one truth, and an end."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from machines.decision import Decision
from machines.invariants import violations
from machines.projection import Projection
from machines.schedule import decide, why, why_all
from machines.states import BUSY
from machines.states import Phase as NodePhase
from tests.machines.interpreter import World
from tests.oracle import judge

EXAMPLES = settings(
    deadline=None,
    derandomize=True,
    max_examples=100,
    # A smaller seed is no simpler world, so shrinking would only take time.
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
MORE_EXAMPLES = settings(EXAMPLES, max_examples=250)
SEEDS = st.integers(0, 2**32)
STEPS = st.integers(25, 60)
ROUNDS_TO_END = 400
"""Rounds of peace in which every rollout must end: some ten nodes, three phases, backoffs and a soak."""


def rebuilt(index: Projection) -> Projection:
    """Return an index built afresh from what the other one knows."""
    fresh = Projection.build(index.snapshot(), index.limits)
    fresh.observed(index.observations, index.now)
    for told in index.traffic:
        fresh.probed(told)
    return fresh


def wake(decision: Decision) -> float:
    return math.inf if decision.wake_at is None else decision.wake_at


def is_deed(decision: Decision) -> bool:
    """Say whether carrying the decision out may change the next one."""
    observed = bool(decision.observe or decision.probes)
    return observed or bool(decision.starts or decision.looks or decision.put_backs or decision.opens)


@MORE_EXAMPLES
@given(SEEDS, STEPS)
def test_the_oracle_alone_finds_nothing_forbidden(seed: int, steps: int) -> None:
    world = World.of(seed)
    world.trusting = True
    for _ in range(steps):
        world.step()
        world.decide()
    assert judge(world.log) == []


@MORE_EXAMPLES
@given(SEEDS, STEPS)
def test_the_invariants_find_nothing_forbidden(seed: int, steps: int) -> None:
    world = World.of(seed)
    for _ in range(steps):
        world.step()
        before = world.index.snapshot()
        seen, told = world.index.observations, world.index.traffic
        decision = decide(world.index, world.now)
        world.decide()
        after = world.index.snapshot()
        if not decision.observe:
            known = {"limits": world.index.limits, "observations": seen, "traffic": told}
            found = violations(before, after, now=world.now, **known)
            assert found == []


@EXAMPLES
@given(SEEDS, STEPS)
def test_an_index_kept_by_events_equals_one_built_afresh(seed: int, steps: int) -> None:
    world = World.of(seed)
    for _ in range(steps):
        world.step()
        mine, fresh = decide(world.index, world.now), decide(rebuilt(world.index), world.now)
        for name in ("starts", "looks", "probes", "put_backs", "opens", "ends", "observe", "reasons"):
            assert getattr(mine, name) == getattr(fresh, name), name
        assert wake(mine) <= wake(fresh)
        assert rebuilt(world.index).snapshot() == world.index.snapshot()
        world.decide()


@EXAMPLES
@given(SEEDS, STEPS)
def test_what_is_explained_is_what_is_done(seed: int, steps: int) -> None:
    world = World.of(seed)
    for _ in range(steps):
        world.step()
        decision = decide(world.index, world.now)
        begun = {(each.rollout, each.node) for each in (*decision.starts, *decision.looks)}
        for rollout in world.index.rollouts:
            told = why_all(world.index, rollout, world.now)
            for target in world.index.targets(rollout):
                reason = told[target.node]
                assert reason == why(world.index, rollout, target.node, world.now)
                if target.phase is NodePhase.PENDING:
                    assert (reason.code == "starting") == ((rollout, target.node) in begun), reason
                    assert reason.text
        world.decide()


@EXAMPLES
@given(SEEDS, STEPS, st.floats(0.0, 1.0))
def test_nothing_can_start_before_the_instant_at_which_to_ask_again(
    seed: int, steps: int, part: float
) -> None:
    world = World.of(seed)
    for _ in range(steps):
        world.step()
    decision = world.decide()
    while is_deed(decision):
        decision = world.decide()
    until = min(wake(decision), world.now + 3600.0)
    later = world.now + part * (until - world.now)
    if later < until:
        again = decide(rebuilt(world.index), later)
        assert (again.starts, again.opens, again.ends) == ((), (), ())


@EXAMPLES
@given(SEEDS, STEPS)
def test_everything_ends_once_there_is_peace(seed: int, steps: int) -> None:
    world = World.of(seed)
    for _ in range(steps):
        world.step()
        world.decide()
    world.make_peace()
    for _ in range(ROUNDS_TO_END):
        world.settle_all()
        decision = world.decide()
        world.work_some()
        moving = is_deed(decision) or any(target.phase in BUSY for target in world.index.busy())
        asleep_until = max(world.now + 1.0, min(wake(decision), world.now + 3600.0))
        world.now = world.now + 1.0 if moving else asleep_until
        if all(rollout.closed for rollout in world.index.rollouts.values()):
            break
    left = [rollout for rollout in world.index.rollouts.values() if not rollout.closed]
    told = {each.id: why_all(world.index, each.id, world.now) for each in left}
    assert left == [], told
    assert judge(world.log) == []
