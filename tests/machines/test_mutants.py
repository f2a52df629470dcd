"""The invariants and the oracle find known bugs of the core, each without the other's help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given

from tests.machines.fleet_simulator import FleetSimulator
from tests.machines.mutants import MUTANTS
from tests.machines.test_properties import MORE_EXAMPLES, SEEDS, STEPS, run_judged_by_invariants
from tests.oracle import check_log
from tests.support.mutation import Mutant, MutantOutdated


@MORE_EXAMPLES
@given(SEEDS, STEPS)
def check_invariants(seed: int, steps: int) -> None:
    run_judged_by_invariants(seed, steps)


@MORE_EXAMPLES
@given(SEEDS, STEPS)
def check_oracle(seed: int, steps: int) -> None:
    world = FleetSimulator.from_seed(seed)
    world.skips_invariants = True
    for _ in range(steps):
        world.step()
        world.decide()
    assert check_log(world.log) == []


def test_mutant_names_are_unique() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == 8


def test_outdated_mutant_raises() -> None:
    outdated = replace(MUTANTS[0], old="code_that_is_gone()")
    with pytest.raises(MutantOutdated, match=r"occurs 0 times in machines\.facts"):
        outdated.compile()


@pytest.mark.parametrize("check", [check_invariants, check_oracle], ids=["invariants", "oracle"])
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_detected(mutant: Mutant, check: Callable[[], None]) -> None:
    with mutant.applied(), pytest.raises(AssertionError):
        check()
