"""Forks of the facts: both sides change, and neither sees the other's changes."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from hypothesis import given, settings

from machines.facts.sharing import Forkable
from machines.scheduler.decide import decide
from machines.scheduler.progress import rollout_progress
from machines.scheduler.why import why_nodes
from tests.machines.fleet_simulator import FleetSimulator
from tests.machines.test_properties import EXAMPLES, SEEDS

ANSWERS = {
    "_owned_ids",
    "_unresolved_failures",
    "recounted_failures",
    "due_rollbacks",
    "nodes_by_runner",
    "cached_reason",
    "_contents",
}
"""What is kept of answers and of the sharing itself: no facts."""


def content(value: Any) -> Any:
    """Return what an index has in all its containers, as values that later changes do not reach."""
    if isinstance(value, dict):
        return {key: content(each) for key, each in value.items()}
    if isinstance(value, list | set):
        return value.copy()
    # The facts themselves are frozen values.
    if isinstance(value, Forkable):
        names = list(vars(value))
    elif is_dataclass(value) and not type(value).__dataclass_params__.frozen:
        names = [each.name for each in fields(value)]
    else:
        return value
    return {name: content(getattr(value, name)) for name in names if name not in ANSWERS}


@settings(EXAMPLES, max_examples=30)
@given(SEEDS)
def test_a_changed_fork_or_origin_changes_only_itself(seed: int) -> None:
    world = FleetSimulator.from_seed(seed)
    for _ in range(3):
        for _ in range(10):
            world.step()
            world.decide()
        left = world.index
        before = content(left)
        world.index = left.fork()  # the fork changes, the origin must not
        assert content(world.index) == before
        for _ in range(6):
            world.step()
            world.decide()
        assert content(left) == before
        kept = world.index.fork()  # the origin changes, the fork must not
        before = content(kept)
        for _ in range(6):
            world.step()
            world.decide()
        assert content(kept) == before


@settings(EXAMPLES, max_examples=30)
@given(SEEDS)
def test_questions_change_no_fact(seed: int) -> None:
    world = FleetSimulator.from_seed(seed)
    for _ in range(30):
        world.step()
        index, later = world.index, world.now + world.rng.choice((-30.0, 0.0, 45.0, 600.0))
        before = content(index)
        for _ in range(2):
            decision = decide(index, later)
            for rollout in index.rollouts:
                why_nodes(index, rollout, later)
                rollout_progress(index, rollout, later)
            assert decision == decide(index.fork(), later)
        assert content(index) == before
        world.decide()
