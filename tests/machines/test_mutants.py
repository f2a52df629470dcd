"""The invariants and the oracle find known bugs of the core, each without the other's help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.machines.mutants import MUTANTS
from tests.machines.test_properties import (
    test_the_invariants_find_nothing_forbidden as check_invariants,
)
from tests.machines.test_properties import (
    test_the_oracle_alone_finds_nothing_forbidden as check_oracle,
)
from tests.support.mutation import Mutant, MutantOutdated


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
