"""Rules of CONTRIBUTING.md that a script can check."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from machines.model.node import NodeKind

ROOT = Path(__file__).resolve().parents[2]

MAX_FILE_LINES = 500
LONG_FILE_REASON = "Longer than 500 lines"
"""Only a test file may be longer; its docstring then gives the reason."""

PRODUCT = ("machines", "rolloutd", "tui")

SOURCES = sorted(path for place in (*PRODUCT, "bench", "tests") for path in (ROOT / place).rglob("*.py"))
CORE = [path for path in SOURCES if path.is_relative_to(ROOT / "machines")]

ADAPTER_KINDS = {
    kind
    for group in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"].values()
    for kind in group
} - {"none", "node"}
"""Kinds of the installed adapters; `none` is a word of the plan without an adapter, `node` of the core."""


@pytest.mark.parametrize("source", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in SOURCES])
def test_file_has_docstring_and_is_short(source: Path) -> None:
    text = source.read_text()
    docstring = ast.get_docstring(ast.parse(text))
    if source.name != "__init__.py" or text.strip():
        assert docstring, "no docstring"
    if len(text.splitlines()) > MAX_FILE_LINES:
        assert source.is_relative_to(ROOT / "tests"), f"{len(text.splitlines())} lines"
        assert LONG_FILE_REASON in " ".join((docstring or "").split()), f"{len(text.splitlines())} lines"


def test_map_lists_every_folder() -> None:
    rows = [line.split("|")[1] for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines() if "|" in line]
    listed = set(re.findall(r"`([\w/]+/)`", " ".join(rows)))
    packages = {
        f"{path.parent.relative_to(ROOT)}/"
        for place in PRODUCT
        for path in (*(ROOT / place).glob("__init__.py"), *(ROOT / place).glob("*/__init__.py"))
    }
    assert listed == packages - {"rolloutd/"}


@pytest.mark.parametrize("source", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in CORE])
def test_core_names_no_command_line(source: Path) -> None:
    assert "rolloutctl" not in source.read_text(), "sentences are rendered outside the core"


@pytest.mark.parametrize("source", [pytest.param(p, id=str(p.relative_to(ROOT))) for p in CORE])
def test_core_names_no_adapter_kind(source: Path) -> None:
    nodes = ast.walk(ast.parse(source.read_text()))
    constants = {node.value for node in nodes if isinstance(node, ast.Constant)}
    node_kinds = set(NodeKind) if source.name == "node.py" else set()
    assert not constants & ADAPTER_KINDS - node_kinds, "an adapter's registration says what its kind can do"


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
