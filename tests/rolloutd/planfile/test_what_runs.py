"""What a plan runs is known from its schema: each parameter of each registered kind is judged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rolloutd import planfile
from rolloutd.planfile.schema import resolve_reference, schema_at
from rolloutd.plugin import CHECKS, GUARDS, ISOLATORS, PROBES, installed_adapters

JSON = dict[str, Any]

PLACES = (
    (ISOLATORS, ("spec", "isolate")),
    (CHECKS, ("spec", "verify")),
    (CHECKS, ("spec", "rollback", "verify")),
    (PROBES, ("spec", "traffic")),
    (GUARDS, ("spec", "guard")),
)
"""Where a plan names kinds of each port."""

NOT_RUN = {
    *("after", "backend", "balancers", "body", "dns", "drain_timeout", "equals", "grace_period", "icmp"),
    *("ignore", "leave_pods", "matches", "namespaces", "paths", "pods", "pods_ready", "prefer_no_schedule"),
    *("query", "server", "skip_terminating_after", "tcp", "timeout", "url", "wait_for_jobs", "where"),
    "within",
}
"""Texts that no shell and no Ansible runs; a new parameter needs a place here or a `format` in its type."""


def text_parameters(schema: JSON, section: JSON) -> Iterator[tuple[str, str | None]]:
    """Yield each free text of a section, or of its lists, with its format."""
    for name, field in resolve_reference(schema, section).get("properties", {}).items():
        for choice in (field, *field.get("anyOf", ())):
            choice = resolve_reference(schema, choice)
            choice = resolve_reference(schema, choice.get("items", choice))
            if "string" in str(choice.get("type")) and "enum" not in choice and "const" not in choice:
                yield name, choice.get("format")


def kinds() -> Iterator[Any]:
    for group, place in PLACES:
        for kind, adapter in installed_adapters(group).items():
            if adapter.params is not None:
                yield pytest.param(kind, place, id=f"{'.'.join(place[1:])}-{kind}")


def section_of(kind: str, place: tuple[str, ...]) -> tuple[JSON, JSON]:
    schema = planfile.schema()
    at = place if place[-1] == "guard" else (*place, 0, kind)
    section = schema_at(schema, at)
    assert section is not None, at
    return schema, section


@pytest.mark.parametrize(("kind", "place"), list(kinds()))
def test_each_text_is_run_or_listed_as_not_run(kind: str, place: tuple[str, ...]) -> None:
    schema, section = section_of(kind, place)
    undecided = {
        name
        for choice in (section, *section.get("anyOf", ()))
        for name, form in text_parameters(schema, choice)
        if form not in ("playbook", "command") and name not in NOT_RUN
    }
    assert not undecided


@pytest.mark.parametrize(("kind", "place"), list(kinds()))
def test_each_parameter_that_runs_is_found_in_content(kind: str, place: tuple[str, ...]) -> None:
    schema, section = section_of(kind, place)
    for choice in (section, *section.get("anyOf", ())):
        for name, form in text_parameters(schema, choice):
            if form not in ("playbook", "command"):
                continue
            is_list = "items" in resolve_reference(schema, choice)["properties"][name]
            params: Any = {name: ["marker"] if is_list else "marker"}
            content: Any = params if place[-1] == "guard" else [{kind: params}]
            for key in reversed(place):
                content = {key: content}
            found = planfile.run_by_plan(content, form)
            assert [value for _, value in found] == ["marker"], f"{kind}.{name}"
            if place == ("spec", "verify"):
                assert planfile.run_by_check(kind, params, form), f"{kind}.{name} of a team's check"


def test_isolators_and_checks_name_their_playbooks() -> None:
    content = {
        "spec": {
            "isolate": [{"playbook": {"file": "out.yml", "undo": "in.yml"}}],
            "maintain": [{"playbook": "site.yml", "vars": {"playbook": "a variable"}}],
            "verify": [{"playbook": {"file": "check.yml", "repair": "repair.yml"}}],
            "prepare": {"stages": [{"install": {"playbook": "install.yml"}}]},
        }
    }
    found = {value for _, value in planfile.run_by_plan(content, "playbook")}
    assert found == {"out.yml", "in.yml", "site.yml", "check.yml", "repair.yml", "install.yml"}
