"""A small part of the simulation, for every change: the corpus, some seeds, some of the small plans.

In processes of its own: a simulation wants the whole interpreter, and one seed
is run under two hash seeds, which must not matter.  `make sim` runs the rest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.mutants import MUTANTS, read_found
from tests.support.mutation import Mutant

ROOT = Path(__file__).resolve().parents[2]

LIMIT_S = 3600.0
"""Only a run that hangs reaches it: on a busy machine a minute of work takes more than ten."""

MUTANT_PROCESSES = 5
"""For the cores: each is busy for a quarter of a minute."""

REPLAYED_SEED = "seed 35"
"""A seed with two rollouts, crashes and a lost answer: its trace has everything in it."""


def run_module(module: str, *arguments: str, hash_seed: str = "0") -> str:
    """Run a module of the simulation in its own process; return its output."""
    run = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_corpus_finds_no_violation() -> None:
    assert ", 0 failed," in run_module("tests.sim", "--seeds", "0", "--small", "none", "--jobs", "1")


@pytest.mark.long
def test_seeds_find_no_violation() -> None:
    seeds = ("--first", "0", "--seeds", "50", "--no-corpus", "--small", "none")
    assert ", 0 failed," in run_module("tests.sim", *seeds, "--jobs", "1")


@pytest.mark.long
def test_large_fleet_comes_to_its_end() -> None:
    assert "500 of 500 nodes changed" in run_module("tests.sim", "--nodes", "500")


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (25, 50))])
def test_small_plans_survive_every_effect_outcome(first: int) -> None:
    small = ("--seeds", "0", "--small", "few", "--small-first", str(first), "--no-corpus")
    assert ", 0 failed," in run_module("tests.sim", *small, "--jobs", "1")


def test_seed_is_deterministic_across_hash_seeds() -> None:
    first, second = (
        run_module("tests.sim", "--replay", REPLAYED_SEED, hash_seed=hash_seed) for hash_seed in ("1", "2")
    )
    assert first == second
    assert len(first.splitlines()) > 50


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_applies(mutant: Mutant) -> None:
    assert mutant.compile() != mutant.function.__code__


def test_bugs_found_are_planted() -> None:
    assert read_found().keys() <= {mutant.name for mutant in MUTANTS}


@pytest.mark.long
@pytest.mark.parametrize("first", range(MUTANT_PROCESSES))
def test_mutants_are_detected(first: int) -> None:
    names = [mutant.name for mutant in MUTANTS[first::MUTANT_PROCESSES]]
    output = run_module("tests.sim.mutants", *names)
    assert [name for name in names if f"{name}: " not in output] == []
