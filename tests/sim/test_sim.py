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

from tests.sim.planting import is_caught, patches

ROOT = Path(__file__).resolve().parents[2]

LIMIT_S = 600.0
"""Some twenty seconds of work, on a machine that may be busy with much else."""

TRACED = "seed 35"
"""A seed with two rollouts, crashes and a lost answer: its trace has everything in it."""


def simulate(*arguments: str, hash_seed: str = "0") -> str:
    """Run simulations in a process of their own; return what they say."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.sim", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_the_corpus_and_some_seeds_show_nothing_forbidden() -> None:
    told = simulate("--first", "0", "--seeds", "60", "--small", "none", "--jobs", "1")
    assert ", 0 failed," in told


def test_effects_of_small_plans_may_go_any_way() -> None:
    told = simulate("--seeds", "0", "--small", "some", "--no-corpus", "--jobs", "1")
    assert ", 0 failed," in told


def test_a_seed_is_one_execution_whatever_the_hash_seed() -> None:
    first, second = (simulate("--replay", TRACED, hash_seed=hash_seed) for hash_seed in ("1", "2"))
    assert first == second
    assert len(first.splitlines()) > 50


@pytest.mark.parametrize("patch", patches(), ids=lambda patch: patch.stem)
def test_a_planted_bug_can_still_be_planted(patch: Path) -> None:
    applied = subprocess.run(
        ["git", "apply", "-C1", "--check", patch], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert applied.returncode == 0, applied.stderr


@pytest.mark.long
@pytest.mark.parametrize("patch", patches(), ids=lambda patch: patch.stem)
def test_a_planted_bug_is_found(patch: Path) -> None:
    assert is_caught(patch)
