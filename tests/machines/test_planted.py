"""The judges see what they should: eight faults planted in a copy of the core, each caught by both.

The invariants and the oracle are asked apart, so that neither hides that the
other is blind.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PLANTED = sorted((HERE / "planted").glob("*.patch"))
PROPERTIES = "tests/machines/test_properties.py"
LIMIT_S = 300.0
"""A planted fault is found within seconds; this is for a machine that is doing much else."""


def properties_in(root: Path) -> subprocess.CompletedProcess[str]:
    """Run the properties against the core that lies under `root`."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "forbidden", PROPERTIES],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.fixture
def core(tmp_path: Path) -> Path:
    """A copy of the core and of what judges it."""
    shutil.copytree(ROOT / "machines", tmp_path / "machines", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "tests" / "machines").mkdir(parents=True)
    for name in ("__init__.py", "oracle.py", "machines/__init__.py", "machines/worlds.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests" / name)
    for name in ("fleets.py", "interpreter.py", "test_properties.py"):
        shutil.copy(HERE / name, tmp_path / "tests" / "machines" / name)
    return tmp_path


def test_there_are_eight() -> None:
    assert len(PLANTED) == 8


def test_the_copy_is_sound_before_anything_is_planted(core: Path) -> None:
    ran = properties_in(core)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("patch", PLANTED, ids=lambda patch: patch.stem)
def test_a_planted_fault_is_caught(core: Path, patch: Path) -> None:
    planted = subprocess.run(
        ["git", "apply", "--verbose", str(patch)],
        cwd=core,
        env=os.environ | {"GIT_CEILING_DIRECTORIES": str(core.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert planted.returncode == 0, planted.stderr
    ran = properties_in(core)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "FAILED tests/machines/test_properties.py::test_the_invariants_find" in ran.stdout, ran.stdout
    assert "FAILED tests/machines/test_properties.py::test_the_oracle_alone" in ran.stdout, ran.stdout
