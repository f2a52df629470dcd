"""Plants known bugs and proves that the simulation finds each: `python -m tests.sim.planting`.

Each patch under planted/ is applied to a copy of the sources, and the
simulation of the copy must fail.  A patch that no longer applies is a failure
too: it then says nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATCHES = Path(__file__).with_name("planted")

COPIED = ("machines", "rolloutd", "tests")

SEEDS = 400
"""Within so many seeds every planted bug is found; most within twenty."""


def main() -> int:
    """Plant every bug, one by one; return 1 when one was not found."""
    missed = [patch.stem for patch in patches() if not is_caught(patch)]
    for name in missed:
        print(f"{name}: NOT FOUND")
    return 1 if missed else 0


def patches() -> list[Path]:
    """Return the bugs there are to plant."""
    return sorted(PATCHES.glob("*.patch"))


def is_caught(patch: Path) -> bool:
    """Plant one bug in a copy of the sources; say whether the simulation finds it, and nothing without it."""
    with tempfile.TemporaryDirectory(prefix="rolloutd-planted-") as directory:
        copy = Path(directory)
        for name in COPIED:
            shutil.copytree(
                ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        applied = _run(["git", "apply", "-C1", "--whitespace=nowarn", str(patch)], copy)
        if applied.returncode:
            print(f"{patch.name} does not apply any more: {applied.stderr}")
            return False
        command = [sys.executable, "-m", "tests.sim", "--stop", "--small", "some", "--first", "0"]
        found = _run([*command, "--seeds", str(SEEDS)], copy)
        said = [line.removeprefix("!! ") for line in found.stdout.splitlines() if line.startswith("!! ")]
        names = [line.removeprefix("== ") for line in found.stdout.splitlines() if line.startswith("== ")]
        if found.returncode != 1 or not said or not names:
            print(found.stdout[-2000:], found.stderr[-2000:])
            return False
        # Without the bug the very same simulation is well, so it is the bug that was found.
        well = _run([sys.executable, "-m", "tests.sim", "--replay", names[0]], ROOT)
        print(f"{patch.stem}: {names[0]}: {said[0]}", flush=True)
        return well.returncode == 0


def _run(command: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(directory),
        "GIT_CEILING_DIRECTORIES": str(directory.parent),
    }
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )


if __name__ == "__main__":
    sys.exit(main())
