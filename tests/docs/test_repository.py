"""Rules of CONTRIBUTING.md that a script can check."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from machines.model.node import NodeKind
from tests.conftest import DEAREST, SLOW

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


def test_files_have_docstrings_and_are_short() -> None:
    # One test for all files: every worker collects every test.
    assert {source: mistake for source in SOURCES if (mistake := _style_mistake(source))} == {}


def _style_mistake(source: Path) -> str:
    text = source.read_text()
    docstring, lines = ast.get_docstring(ast.parse(text)), len(text.splitlines())
    if not docstring and (source.name != "__init__.py" or text.strip()):
        return "no docstring"
    is_explained = source.is_relative_to(ROOT / "tests") and LONG_FILE_REASON in " ".join(
        (docstring or "").split()
    )
    return f"{lines} lines" if lines > MAX_FILE_LINES and not is_explained else ""


CATCHES_ALL_ERRORS = {
    *("engine/drivers/driver.py", "engine/outcomes.py", "engine/tasks.py", "engine/state.py"),
    *("service/reload.py", "control/server.py", "fleetlock/server.py"),
    *("operator/controller.py", "operator/vote_objects.py", "operator/votes.py"),
    *("ports/guards.py", "plugin/__init__.py"),
    *("adapters/ansible/fast/fork_server.py", "adapters/netbox/inventory.py"),
}
"""Files of rolloutd with `except Exception`: the borders where one piece of work must not end the others."""


def test_only_borders_catch_all_errors() -> None:
    product = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in PRODUCT]
    catching = {str(path.relative_to(ROOT)) for path in product if _catches_all(path)}
    assert catching == {f"rolloutd/{name}" for name in CATCHES_ALL_ERRORS}


def _catches_all(source: Path) -> bool:
    return re.search(r"except Exception\b", source.read_text()) is not None


def test_map_lists_every_folder() -> None:
    rows = [line.split("|")[1] for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines() if "|" in line]
    listed = set(re.findall(r"`([\w/]+/)`", " ".join(rows)))
    packages = {
        f"{path.parent.relative_to(ROOT)}/"
        for place in PRODUCT
        for path in (*(ROOT / place).glob("__init__.py"), *(ROOT / place).glob("*/__init__.py"))
    }
    assert listed == packages - {"rolloutd/"}


def test_core_names_no_command_line() -> None:
    named = [source for source in CORE if "rolloutctl" in source.read_text()]
    assert named == [], "sentences are rendered outside the core"


def test_loggers_are_named_after_their_modules() -> None:
    product = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in PRODUCT]
    named = {path: re.findall(r"getLogger\(f?\"rolloutd[^)]*", path.read_text()) for path in product}
    assert {path: names for path, names in named.items() if names} == {}


def test_core_names_no_adapter_kind() -> None:
    named = [source for source in CORE if _string_constants(source) & ADAPTER_KINDS - _node_kinds(source)]
    assert named == [], "an adapter's registration says what its kind can do"


def _string_constants(source: Path) -> set[object]:
    nodes = ast.walk(ast.parse(source.read_text()))
    return {node.value for node in nodes if isinstance(node, ast.Constant)}


def _node_kinds(source: Path) -> set[str]:
    return set(NodeKind) if source.name == "node.py" else set()


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


def test_slow_tests_are_there() -> None:
    missing = [name for name in (*SLOW, *DEAREST) if not (ROOT / name.partition("::")[0]).exists()]
    assert missing == [], "tests/conftest.py orders tests by these names"


def test_ci_ends_without_its_packages(tmp_path: Path) -> None:
    """They are installed in the background, and a bare `wait` loses the exit code."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    packages, make = tmp_path / ".ci" / "packages", tmp_path / "make"
    packages.write_text('#!/bin/sh\n[ "$1" = venv ] || [ "$1" = --try ]\n')
    make.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/made\n')
    packages.chmod(0o755)
    make.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run([tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "CI needs these packages" in done.stderr
    assert (tmp_path / "made").read_text() == ".venv-dev/installed\n"
