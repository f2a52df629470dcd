"""Every mistake of prepare stages: at the line of its file, and with the stage that has it."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

from rolloutd.errors import Diagnostic, InvalidFile
from rolloutd.planfile import manifest, prepare, prepare_source, read
from rolloutd.planfile.playbooks import playbook_diagnostics
from rolloutd.planfile.prepare import Build, Cleanup, Install, StageArtifacts
from rolloutd.planfile.prepare_source import ForcedStages, resolve_prepare
from tests.rolloutd.planfile.plan_samples import SMALLEST_PLAN

DIGEST = hashlib.sha256(b"app").hexdigest()
ARTIFACT = f'{{name: app, version: "1", path: app.tar, sha256: "{DIGEST}", size: 3}}'
FIRST_STAGE = "    - stage: {name: early, manifest: good.yml}\n"

STAGE_LINE = SMALLEST_PLAN.count("\n") + 3
"""The line of the plan's second stage."""

PLAN_MISTAKES = {
    "two kinds": "stage: {name: late}, install: {name: other, playbook: configure.yml}",
    "no kind": "",
    "outside": "stage: {name: late, manifest: ../artifacts.yml}",
    "relative": "stage: {name: late, to: var/cache}",
    "no playbook": "stage: {name: late, method: playbook}",
    "unused playbook": "stage: {name: late, playbook: configure.yml}",
    "unknown key": "install: {name: late, playbook: configure.yml, paralel: 2}",
    "no such playbook": "install: {name: late, playbook: gone.yml}",
    "no such manifest": "stage: {name: late, manifest: gone.yml}",
    "large manifest": "stage: {name: late, manifest: large.yml}",
}
"""What the second stage says that is wrong in the plan file."""

MANIFEST_MISTAKES = {
    "form": ARTIFACT.replace('"1"', '"1/2"'),
    "digest": ARTIFACT.replace(DIGEST, DIGEST.upper()),
    "outside": ARTIFACT.replace("app.tar", "../app.tar"),
    "no place": ARTIFACT.replace("path: app.tar, ", ""),
    "unpack": ARTIFACT.replace("size: 3", "size: 3, unpack: true"),
    "twice": f"{ARTIFACT}\n  - {ARTIFACT}",
    "size": ARTIFACT.replace("size: 3", "size: 4"),
    "altered": ARTIFACT.replace(DIGEST, "0" * 64),
    "missing": ARTIFACT.replace("app.tar", "gone.tar"),
    "not yaml": "{",
}
"""What the second stage's manifest has that is wrong."""

UNREACHED = {"diagnostic"}
"""Functions that build the mistakes of others."""


def mistakes(tree: Path, item: str, *force: str) -> tuple[Diagnostic, ...]:
    """Return the mistakes of a plan with a sound stage and this one, as validate and submit report them."""
    text = f"{SMALLEST_PLAN}  prepare:\n{FIRST_STAGE}    - {{{item}}}\n"
    try:
        plan = read(text.encode(), "plan.yaml")
        resolve_prepare(plan, tree, ForcedStages(force, ()))
    except InvalidFile as invalid:
        return invalid.diagnostics
    return playbook_diagnostics(plan, tree)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "app.tar").write_bytes(b"app")
    for playbook in ("configure.yml", "site.yml"):
        (tmp_path / playbook).write_text("- hosts: all\n")
    (tmp_path / "good.yml").write_text(f"artifacts:\n  - {ARTIFACT}\n")
    (tmp_path / "large.yml").write_bytes(b"#" * (manifest.MAX_MANIFEST_BYTES + 1))
    return tmp_path


def require_place(found: tuple[Diagnostic, ...]) -> None:
    """Require that the second stage, and it alone, is blamed at its line."""
    assert found
    of_plan = [each for each in found if each.file == "plan.yaml"]
    assert {each.line for each in of_plan} == {STAGE_LINE}, found
    assert all(each.path.startswith("spec.prepare[1]") for each in of_plan), found


@pytest.mark.parametrize("item", PLAN_MISTAKES.values(), ids=PLAN_MISTAKES)
def test_mistake_of_plan_is_at_its_stage(tree: Path, item: str) -> None:
    require_place(mistakes(tree, item))


@pytest.mark.parametrize("entry", MANIFEST_MISTAKES.values(), ids=MANIFEST_MISTAKES)
def test_mistake_of_manifest_names_stage_and_lines(tree: Path, entry: str) -> None:
    (tree / "bad.yml").write_text(f"artifacts:\n  - {entry}\n")
    found = mistakes(tree, "stage: {name: late, manifest: bad.yml}")
    require_place(found)
    assert "stage late" in found[-1].message
    in_manifest = [each for each in found if each.file == "bad.yml"]
    assert in_manifest
    assert all(each.line >= 2 for each in in_manifest)


@pytest.mark.parametrize(
    ("kind", "key"),
    [(model, key) for model in (Build, StageArtifacts, Install) for key in model.model_fields],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_wrong_value_of_each_key_is_at_its_stage(tree: Path, kind: type[Any], key: str) -> None:
    name = {Build: "build", StageArtifacts: "stage", Install: "install"}[kind]
    values = {"playbook": "configure.yml", key: "[[1]]"}
    found = mistakes(tree, f"{name}: {{{', '.join(f'{each}: {value}' for each, value in values.items())}}}")
    assert any(each.path.startswith(f"spec.prepare[1].{name}.{key}") for each in found), found
    require_place(found)


@pytest.mark.parametrize("key", Cleanup.model_fields)
def test_wrong_value_of_cleanup_is_at_its_line(tree: Path, key: str) -> None:
    values = {"playbook": "configure.yml", key: "[[1]]"}
    written = ", ".join(f"{name}: {value}" for name, value in values.items())
    text = f"{SMALLEST_PLAN}  prepare:\n    stages: [{{stage: {{}}}}]\n    cleanup: {{{written}}}\n"
    with pytest.raises(InvalidFile) as invalid:
        read(text.encode(), "plan.yaml")
    assert {(each.line, each.path.split("[")[0]) for each in invalid.value.diagnostics} == {
        (STAGE_LINE, f"spec.prepare.cleanup.{key}")
    }


def test_forced_stage_that_is_unknown_is_named(tree: Path) -> None:
    (found,) = mistakes(tree, "stage: {name: late, manifest: good.yml}", "later")
    assert (found.line, found.found, found.allowed) == (STAGE_LINE - 1, "later", "one of: early, late")


def test_each_mistake_that_prepare_reports_has_a_case(tree: Path) -> None:
    """A new mistake fails here until it has a case above, which requires its stage and line."""
    reported: set[tuple[str, int]] = set()
    with executed_lines((prepare, manifest, prepare_source), reported):
        for item in PLAN_MISTAKES.values():
            mistakes(tree, item)
        for entry in MANIFEST_MISTAKES.values():
            (tree / "bad.yml").write_text(f"artifacts:\n  - {entry}\n")
            mistakes(tree, "stage: {name: late, manifest: bad.yml}")
        mistakes(tree, "stage: {name: late, manifest: good.yml}", "later")
    sites = {site for module in (prepare, manifest, prepare_source) for site in mistake_sites(module)}
    assert len(sites) > 10
    assert sites - reported == set()


def mistake_sites(module: ModuleType) -> Iterator[tuple[str, int]]:
    """Yield the place of each statement that makes a mistake."""
    for function in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(function, ast.FunctionDef) or function.name in UNREACHED:
            continue
        for statement in ast.walk(function):
            if isinstance(statement, ast.Raise | ast.Assign | ast.Expr) and any(
                isinstance(each, ast.Call) and makes_mistake(each.func) for each in ast.walk(statement)
            ):
                yield str(module.__file__), statement.lineno


def makes_mistake(called: ast.expr) -> bool:
    name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
    return name in ("InvalidValue", "InvalidFile", "diagnostic", "raise_invalid")


@contextmanager
def executed_lines(modules: tuple[ModuleType, ...], lines: set[tuple[str, int]]) -> Iterator[None]:
    """Collect the lines of these modules that run."""
    files = {str(module.__file__) for module in modules}

    def trace(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
