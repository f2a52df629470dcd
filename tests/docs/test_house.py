"""The house is as CONTRIBUTING.md says, where a reader could not trust their eyes alone."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LONGEST_FILE = 400
REASON = "Longer than 400 lines"
"""A longer file of the tests says in its essay why it is; of the rest none is."""

SOURCES = sorted(
    path
    for place in ("machines", "rolloutd", "tui", "bench", "tests")
    for path in (ROOT / place).rglob("*.py")
)


@pytest.mark.parametrize("source", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in SOURCES])
def test_a_file_says_what_it_is_for_and_is_not_too_long(source: Path) -> None:
    text = source.read_text()
    essay = ast.get_docstring(ast.parse(text))
    if source.name != "__init__.py" or text.strip():
        assert essay, "it opens with a docstring"
    if len(text.splitlines()) > LONGEST_FILE:
        assert source.is_relative_to(ROOT / "tests"), f"{len(text.splitlines())} lines"
        assert REASON in " ".join((essay or "").split()), f"{len(text.splitlines())} lines"


def test_the_map_has_every_place_and_no_other() -> None:
    rows = [line.split("|")[1] for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines() if "|" in line]
    named = set(re.findall(r"`((?:machines|rolloutd|tui)/[\w/.]*)`", " ".join(rows)))
    there = {
        f"rolloutd/{path.name}" for path in (ROOT / "rolloutd").glob("*.py") if not path.name.startswith("__")
    }
    there |= {f"rolloutd/{path.parent.name}/" for path in (ROOT / "rolloutd").glob("*/__init__.py")}
    assert named == there | {"machines/", "tui/"}


def test_locks_name_packages_and_hashes_only() -> None:
    for name in ("requirements.lock", "requirements-dev.lock"):
        for line in (ROOT / name).read_text().splitlines():
            assert "://" not in line
            assert re.match(r"\s*#|[\w.\-\[\]]+==|    --hash=sha256:[0-9a-f]{64}", line), line


def test_nothing_generated_is_tracked() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert not re.search(r"__pycache__|\.egg-info|^build/|^\.venv", listed.stdout, re.MULTILINE)
