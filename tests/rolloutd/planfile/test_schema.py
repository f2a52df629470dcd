"""The JSON Schema says what the reader says, where JSON Schema can say it; the documents say both."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutd import planfile, settings
from rolloutd.planfile import manifest, schema
from rolloutd.planfile.schema import resolve_reference
from tests.docs.reference_tables import render_reference
from tests.rolloutd.planfile.plan_samples import DESIGN_PLAN, FULL_PLAN, SMALLEST_PLAN, diagnostics_of
from tests.rolloutd.planfile.test_broken_plans import misbuild

DOCS = Path(__file__).parents[3] / "docs"
TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


def accepts(whole: dict[str, Any], node: dict[str, Any], value: Any) -> bool:
    """Judge a value by the part of JSON Schema that our schemas use."""
    return all(_judgements(whole, resolve_reference(whole, node), value))


def _judgements(whole: dict[str, Any], node: dict[str, Any], value: Any) -> Iterator[bool]:
    if "type" in node:
        names = [node["type"]] if isinstance(node["type"], str) else node["type"]
        right = [isinstance(value, TYPES[name]) for name in names]
        yield any(right) and not (isinstance(value, bool) and "boolean" not in names)
    if "const" in node:
        yield value == node["const"]
    if "enum" in node:
        yield value in node["enum"]
    if "anyOf" in node:
        yield any(accepts(whole, choice, value) for choice in node["anyOf"])
    if "not" in node:
        yield not accepts(whole, node["not"], value)
    match value:
        case bool():
            return
        case int() | float():
            yield node.get("minimum", value) <= value <= node.get("maximum", value)
        case str():
            yield node.get("minLength", 0) <= len(value) <= node.get("maxLength", len(value))
            yield re.search(node.get("pattern", ""), value) is not None
        case list():
            yield node.get("minItems", 0) <= len(value) <= node.get("maxItems", len(value))
            yield all(accepts(whole, node.get("items", {}), item) for item in value)
        case dict():
            yield from _mapping(whole, node, value)


def _mapping(whole: dict[str, Any], node: dict[str, Any], value: dict[str, Any]) -> Iterator[bool]:
    yield set(node.get("required", ())) <= value.keys()
    yield node.get("minProperties", 0) <= len(value) <= node.get("maxProperties", len(value))
    known = node.get("properties", {})
    for key, child in value.items():
        named = [
            said for pattern, said in node.get("patternProperties", {}).items() if re.search(pattern, key)
        ]
        if key in known:
            yield accepts(whole, known[key], child)
        elif named:
            yield accepts(whole, named[0], child)
        elif isinstance(node.get("additionalProperties"), dict):
            yield accepts(whole, node["additionalProperties"], child)
        else:
            yield node.get("additionalProperties") is not False


@pytest.mark.parametrize("text", [DESIGN_PLAN, SMALLEST_PLAN, FULL_PLAN])
def test_the_schema_accepts_good_plans(text: str) -> None:
    assert accepts(schema(), schema(), yaml.safe_load(text))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("enrol: auto", "enroll: auto"),
        ("enrol: auto", "enrol: sometimes"),
        ("apiVersion: rolloutd/v1", "apiVersion: v1"),
        ("soak: 2h", "soak: 7200"),
        ("soak: 2h", "soak: 2 hours"),
        ("max_parallel: 8 ", "max_parallel: 0 "),
        ("max_parallel: 8 ", "max_parallel: '8' "),
        ("max_parallel: 8 ", "max_parallel: true "),
        ("name: somaxconn-2026-11", "name: So maxconn"),
        (", ref: v1.4.2}", "}"),
        (", ref: v1.4.2}", ", ref: v1, path: x}"),
        ("- reachable: {", "- traffics: {"),
        ("- playbook: {file", "- {command: {do: a, undo: b}, playbook: {file"),
        ('equals: "65535"', 'equals: "65535", exit: 0'),
        ('equals: "65535"', "exit: 256"),
        ("vars: {somaxconn", "vars: {so-max"),
        ("on_unknown: verify", "on_unknown: shrug"),
        ("  probation: 2m", "  prepare: []"),
        ("  probation: 2m", "  traffic: [{ssh: {}}]"),
        ("  probation: 2m", "  traffic: [{kubernetes: {}}]"),
        ("  probation: 2m", "  traffic: [{kubernetes: {pods: ''}}]"),
        ("  probation: 2m", "  traffic: [{kubernetes: {pods: a=b, namespaces: [B]}}]"),
        ("maintain: {playbook: sysctl.yml, ", "maintain: {"),
        ("maintain: {playbook", "maintain: []\n  x: {playbook"),
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(old: str, new: str) -> None:
    assert old in DESIGN_PLAN
    text = DESIGN_PLAN.replace(old, new, 1)
    if new.startswith("- {command"):
        text = text.replace("undo: deisolate.yml}", "undo: deisolate.yml}}", 1)
    assert diagnostics_of(text)
    assert not accepts(schema(), schema(), yaml.safe_load(text))


@pytest.mark.parametrize("seed", range(10))
def test_the_schema_never_refuses_a_plan_that_is_good(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(30):
        text = misbuild(rng.choice([DESIGN_PLAN, FULL_PLAN, SMALLEST_PLAN]).encode(), rng)
        if not diagnostics_of(text):
            assert accepts(schema(), schema(), yaml.safe_load(text)), text.decode()


@pytest.mark.parametrize("of", [planfile.schema, settings.schema])
def test_every_key_is_described(of: Any) -> None:
    whole = of()
    for node in [whole, *whole["$defs"].values()]:
        for key, child in node.get("properties", {}).items():
            assert resolve_reference(whole, child).get("description"), key


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        (lambda: render_reference(planfile.schema()), "plan-file.md"),
        (lambda: render_reference(settings.schema(), planfile.schema(), "plan-file.md"), "settings.md"),
        (lambda: render_reference(manifest.schema()), "artifacts.md"),
    ],
)
def test_the_documents_hold_the_reference(reference: Callable[[], str], name: str) -> None:
    assert reference() in (DOCS / name).read_text()


def test_references_have_each_table_once() -> None:
    # With the sentence above it: the gates have equal keys and mean different votes.
    tables = [
        table
        for name in ("plan-file.md", "settings.md", "artifacts.md")
        for table in re.findall(r"(?m)^.*\n\n\| key .*\n(?:\|.*\n)+", (DOCS / name).read_text())
    ]
    assert len(tables) > 50
    assert [table for table, count in Counter(tables).items() if count > 1] == []


def test_the_examples_of_the_documents_are_good() -> None:
    pages = "".join((DOCS / name).read_text() for name in ("plan-file.md", "how-a-plan-works.md"))
    examples = re.findall(r"```yaml\n(apiVersion.*?)```", pages, re.DOTALL)
    assert len(examples) == 2
    assert [diagnostics_of(example) for example in examples] == [(), ()]


def test_the_example_of_the_settings_is_good(tmp_path: Path) -> None:
    [example] = re.findall(r"```yaml\n(.*?)```", (DOCS / "settings.md").read_text(), re.DOTALL)
    file = tmp_path / "config.yaml"
    file.write_text(example)
    assert settings.load(file).ssh.known_hosts == tmp_path / "known_hosts"
