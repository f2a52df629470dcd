"""What a new part touches, measured: `make touches` makes each in a copy of the product and proves it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.docs.touch_kinds import NODE_KIND, PREPARE_KIND
from tests.docs.touch_parts import EVENT, FIELD, FRONT_END, ISOLATOR, PURPOSE, RUNNER, WORK, Part

ROOT = Path(__file__).resolve().parents[2]

PARTS: Final = (ISOLATOR, RUNNER, FRONT_END, NODE_KIND, PREPARE_KIND, WORK, PURPOSE, EVENT, FIELD)

COPIED = ("machines", "rolloutd", "tui", "tests")


@dataclass(frozen=True, slots=True)
class Touched:
    """Product files that exist and are changed, the lines in them, and the lines of new files."""

    files: tuple[str, ...]
    lines: int
    new_files: int
    new_lines: int


def main() -> None:
    """Print one row for each part."""
    print(f"{'part':<36}{'files':>6}{'lines':>7}{'new files':>11}{'lines':>7}")
    for part in PARTS:
        with tempfile.TemporaryDirectory() as directory:
            copy = Path(directory)
            touched = make_part(part, copy)
            prove(part, copy)
        row = (len(touched.files), touched.lines, touched.new_files, touched.new_lines)
        print(f"{part.name:<36}" + "{:>6}{:>7}{:>11}{:>7}".format(*row))
        for name in touched.files:
            print(f"    {name}")


def make_part(part: Part, copy: Path) -> Touched:
    """Copy the product to a directory, and make the part in it."""
    for name in COPIED:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    for name, before, added in part.edits:
        text = (copy / name).read_text()
        assert text.count(before) == 1, f"{part.name}: {name} has {before!r} {text.count(before)} times"
        (copy / name).write_text(text.replace(before, before + added))
    for name, text in part.files.items():
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text(text)
    # An edit within a line changes one.
    lines = sum(added.strip("\n").count("\n") + 1 for _, _, added in part.edits)
    names = tuple(dict.fromkeys(name for name, _, _ in part.edits))
    return Touched(names, lines, len(part.files), sum(text.count("\n") for text in part.files.values()))


def prove(part: Part, copy: Path) -> None:
    """Run the part's proof on the copy; raises CalledProcessError."""
    command = [sys.executable, "-c", part.proof]
    subprocess.run(command, cwd=copy, env={"PYTHONPATH": str(copy), "PATH": "/usr/bin:/bin"}, check=True)


if __name__ == "__main__":
    main()
