"""What people vote for: every key counts once, and how it is written does not count at all."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from rolloutd.planfile import canonical_json, digest, read, selector_digest
from rolloutd.planfile.content import OPTIONAL_CHANGE_KEYS, OPTIONAL_POLICY_KEYS
from tests.rolloutd.planfile.plan_samples import DESIGN_PLAN, FULL_PLAN, SMALLEST_PLAN

PIN = {"kind": "git", "pin": "0f" * 20}
TARGETS = ["n1", "n2"]
PARTS = ("change", "scope", "policy")
SPELLINGS = {
    "2h": ["120m", "1h60m", "7200s"],
    "5m": ["300s"],
    "30m": ["1800s"],
    "10m": ["600s"],
    "2m": ["120s"],
}
SELECTORS = {
    "role=worker,site in (ams,fra)": [
        "site in (fra, ams), role == worker",
        "role=worker , site in (ams,fra,ams)",
    ],
    "canary=true": ["canary in (true)", "canary == true"],
}
OTHER_SPELLINGS = {**SPELLINGS, **SELECTORS, "mon-fri": ["fri,mon-thu"], "09:00": ["9:00"]}
PEOPLES = {("metadata", "ticket"), ("metadata", "description")}
CONSTANTS = {("apiVersion",), ("kind",)}
PINNED = {("spec", "source", key) for key in ("git", "ref", "path")}

Path = tuple[Any, ...]


def content_of(text: str) -> dict[str, Any]:
    return read(text.encode(), "plan.yaml").content


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every single value, and of every empty or absent one."""
    match value:
        case dict() if value:
            for key, child in value.items():
                yield from leaves(child, (*path, key))
        case list() if value:
            for index, child in enumerate(value):
                yield from leaves(child, (*path, index))
        case _:
            yield path


def changed(content: dict[str, Any], path: Path) -> dict[str, Any]:
    altered = copy.deepcopy(content)
    place: Any = altered
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = {"another": "value"} if place[path[-1]] != {"another": "value"} else None
    return altered


@pytest.mark.parametrize(
    "path", list(leaves(content_of(FULL_PLAN))), ids=lambda path: ".".join(map(str, path))
)
def test_every_key_is_in_exactly_one_part(path: Path) -> None:
    before = digest(content_of(FULL_PLAN), PIN, TARGETS)
    after = digest(changed(content_of(FULL_PLAN), path), PIN, TARGETS)
    moved = [part for part in PARTS if before[part] != after[part]]
    if path in PEOPLES | CONSTANTS | PINNED:
        assert moved == []
        assert after["whole"] == before["whole"]
    else:
        assert len(moved) == 1
        assert after["whole"] != before["whole"]


def test_the_sample_with_everything_has_every_key() -> None:
    """Else the test above would prove less than it says."""
    spec = content_of(FULL_PLAN)["spec"]
    optional = {*OPTIONAL_CHANGE_KEYS, *OPTIONAL_POLICY_KEYS, "prepare"}
    assert set(spec) | {"pilot"} == set(content_of(SMALLEST_PLAN)["spec"]) | optional
    assert all(spec[key] for key in spec)


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (("spec", "maintain", 0, "vars"), "change"),
        (("spec", "prepare", "stages", 0, "build", "playbook"), "change"),
        (("spec", "prepare", "cleanup", "playbook"), "change"),
        (("spec", "prepare", "windows"), "policy"),
        (("spec", "prepare", "tolerate"), "policy"),
        (("spec", "probation"), "change"),
        (("spec", "guard", "after"), "change"),
        (("spec", "targets"), "scope"),
        (("spec", "canary", "select"), "scope"),
        (("spec", "waves", 0, "select"), "scope"),
        (("metadata", "name"), "scope"),
        (("spec", "canary", "max_parallel"), "policy"),
        (("spec", "waves", 0, "soak"), "policy"),
        (("spec", "gates", "start", "owner"), "policy"),
        (("metadata", "owner"), "policy"),
        (("spec", "traffic", 0, "kubernetes", "pods"), "policy"),
    ],
)
def test_keys_are_in_the_part_people_expect(path: Path, part: str) -> None:
    content = content_of(FULL_PLAN)
    before, after = digest(content, PIN, TARGETS), digest(changed(content, path), PIN, TARGETS)
    assert [name for name in PARTS if before[name] != after[name]] == [part]


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        (DESIGN_PLAN, "5421b24c0e155b73b694400895a270811f042c81ae4b5cdc244605242ec77b61"),
        (SMALLEST_PLAN, "93b2ca7c3b4dca40d015ed593499c5a37b41f9aaef3e2e820e2833838d9e8a3d"),
    ],
)
def test_digest_of_plan_without_prepare_is_that_of_earlier_versions(text: str, whole: str) -> None:
    assert digest(content_of(text), PIN, TARGETS)["whole"] == whole


def test_list_of_prepare_stages_is_the_section_without_options() -> None:
    stages = "[{stage: {}}, {install: {playbook: a.yml}}, {install: {playbook: b.yml}}]"
    short = content_of(SMALLEST_PLAN + f"  prepare: {stages}\n")
    assert short == content_of(SMALLEST_PLAN + f"  prepare: {{stages: {stages}}}\n")
    names = [stage["name"] for item in short["spec"]["prepare"]["stages"] for stage in item.values()]
    assert names == ["stage", "install-1", "install-2"]


@pytest.mark.parametrize("key", ["skip_compliant", "train"])
def test_absent_and_false_are_one_digest(key: str) -> None:
    spec = "  targets:"
    absent, written, given = (
        parts(content_of(SMALLEST_PLAN.replace(spec, f"{line}{spec}", 1)))
        for line in ("", f"  {key}: false\n", f"  {key}: true\n")
    )
    assert written == absent
    assert {part for part in given if given[part] != absent[part]} == {"policy", "whole"}


def test_idle_for_of_zero_stays_in_digest() -> None:
    """A plan of an earlier version that has it must keep its digest."""
    spec = "  targets:"
    written = SMALLEST_PLAN.replace(spec, f"  idle_for: 0s\n{spec}", 1)
    assert content_of(written)["spec"]["idle_for"] == 0


def test_a_rollback_gets_the_variables_of_maintain_and_its_own_win() -> None:
    undo = "rollback: {playbook: undo.yml}"
    staged = SMALLEST_PLAN.replace("maintain: {playbook: site.yml}", f"maintain: [{STAGES}]\n  {undo}")
    assert staged != SMALLEST_PLAN
    assert content_of(staged)["spec"]["rollback"]["vars"] == {"file": "/a", "level": 1, "late": True}
    own = staged.replace(undo, "rollback: {playbook: undo.yml, vars: {level: null, back: to}}")
    assert content_of(own)["spec"]["rollback"]["vars"] == {
        "file": "/a",
        "level": None,
        "late": True,
        "back": "to",
    }
    written_out = "rollback: {playbook: undo.yml, vars: {late: true, level: 1, file: /a}}"
    assert parts(content_of(staged)) == parts(content_of(staged.replace(undo, written_out)))
    assert parts(content_of(own))["change"] != parts(content_of(staged))["change"]


STAGES = "{playbook: a.yml, vars: {file: /a, level: 1}}, {playbook: b.yml, vars: {level: 2, late: true}}"


def parts(content: dict[str, Any]) -> dict[str, str]:
    return digest(content, PIN, TARGETS)


def test_the_pin_is_change_and_the_targets_are_scope() -> None:
    content = content_of(DESIGN_PLAN)
    before = digest(content, PIN, TARGETS)
    repinned, retargeted = digest(content, {**PIN, "pin": "1a" * 20}, TARGETS), digest(content, PIN, ["n1"])
    assert [part for part in PARTS if before[part] != repinned[part]] == ["change"]
    assert [part for part in PARTS if before[part] != retargeted[part]] == ["scope"]
    required = digest(content, {**PIN, "requirements": "2b" * 32}, TARGETS)
    assert [part for part in PARTS if before[part] != required[part]] == ["change"]
    assert digest(content, PIN, reversed(TARGETS)) == before


def test_the_selector_digest_knows_no_targets() -> None:
    assert selector_digest(content_of(DESIGN_PLAN)) == selector_digest(content_of(DESIGN_PLAN))
    assert selector_digest(content_of(DESIGN_PLAN)) != selector_digest(content_of(SMALLEST_PLAN))


def test_content_survives_being_stored() -> None:
    for text in (DESIGN_PLAN, FULL_PLAN, SMALLEST_PLAN):
        content = content_of(text)
        assert json.loads(canonical_json(content)) == content


# -- harmless edits -----------------------------------------------------------


def scalar(value: Any, rng: random.Random) -> str:
    """Write a single value in one of the ways that mean the same."""
    if not isinstance(value, str):
        return json.dumps(value)
    text = rng.choice([value, *OTHER_SPELLINGS.get(value, [])])
    styles = [json.dumps(text), "'" + text.replace("'", "''") + "'"]
    if text.replace(".", "").replace("-", "").isalnum() and yaml.safe_load(f"[{text}]") == [text]:
        styles.append(text)
    return rng.choice(styles)


def flow(value: Any, rng: random.Random) -> str:
    match value:
        case dict():
            items = list(value.items())
            rng.shuffle(items)
            return "{" + ", ".join(f"{scalar(key, rng)}: {flow(child, rng)}" for key, child in items) + "}"
        case list():
            return "[" + ", ".join(flow(child, rng) for child in value) + "]"
        case _:
            return scalar(value, rng)


def block(value: Any, rng: random.Random, indent: str = "") -> str:
    """Write a value in block style, or here and there in flow style, with comments and blank lines."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return " " + flow(value, rng) + rng.choice(["", "   # a remark", "  "]) + "\n"
    inner = indent + " " * rng.choice([2, 4])
    text = rng.choice(["", " # a remark"]) + "\n"
    pairs = list(value.items()) if isinstance(value, dict) else [("-", child) for child in value]
    if isinstance(value, dict):
        rng.shuffle(pairs)
    for key, child in pairs:
        text += rng.choice(["", "", "\n", f"{indent}  # why\n"])
        lead = "-" if isinstance(value, list) else f"{scalar(key, rng)}:"
        text += f"{inner}{lead}{block(child, rng, inner)}"
    return text


def rewritten(text: str, rng: random.Random) -> str:
    lines = block(yaml.safe_load(text), rng, indent="")
    return (
        rng.choice(["", "# top\n", "---\n", "\ufeff"]) + lines.lstrip(" ") + rng.choice(["", "\n\n", "...\n"])
    )


@pytest.mark.parametrize("seed", range(200))
def test_a_harmless_edit_keeps_the_digest(seed: int) -> None:
    rng = random.Random(seed)
    text = [DESIGN_PLAN, FULL_PLAN][seed % 2]
    again = rewritten(text, rng)
    if rng.random() < 0.2:
        again = again.replace("\n", "\r\n")
    assert again != text
    assert digest(content_of(again), PIN, TARGETS) == digest(content_of(text), PIN, TARGETS)


def test_where_counts_only_when_written() -> None:
    plain = SMALLEST_PLAN.replace("{reachable: {}}", "{ssh: {run: is-new}}")
    limited = plain.replace("run: is-new", 'run: is-new, where: "role = web"')
    respelled = plain.replace("run: is-new", "run: is-new, where: role==web")
    assert "where" not in content_of(plain)["spec"]["verify"][0]["ssh"]
    hashes = [digest(content_of(text), PIN, TARGETS)["whole"] for text in (plain, limited, respelled)]
    assert hashes[0] != hashes[1] == hashes[2]


def test_plan_without_pilot_has_content_of_version_without_pilots() -> None:
    spec = content_of(SMALLEST_PLAN)["spec"]
    assert "pilot" not in spec
    assert set(spec["gates"]) == {"start", "continue", "proceed"}


@pytest.mark.parametrize("pilot", ["{node: n1}", "{waived: tried yesterday}"])
def test_pilot_is_policy(pilot: str) -> None:
    before = digest(content_of(SMALLEST_PLAN), PIN, TARGETS)
    after = digest(content_of(f"{SMALLEST_PLAN}  pilot: {pilot}\n"), PIN, TARGETS)
    assert [part for part in PARTS if before[part] != after[part]] == ["policy"]
