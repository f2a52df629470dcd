"""Templates fill in names of the node and the plan, and can do nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from rolloutd.plugin.templates import (
    MAX_RENDERED_CHARS,
    RenderFailed,
    TemplateInvalid,
    render,
    validate_template,
)

LABELS = {"site": "ams", "example.com/gpu": "a100", "evil": "x; rm -rf /"}
VARIABLES = {"somaxconn": 65535, "net": {"mtu": 9000}, "ports": [80, 443]}


def rendered(value: Any) -> Any:
    return render(value, node="n1", address="10.0.0.1", labels=LABELS, variables=VARIABLES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("uptime", "uptime"),
        ("host {{ node.name }}", "host n1"),
        ("http://{{ node.address }}:80", "http://10.0.0.1:80"),
        ("{{ node.labels.site | upper }}", "AMS"),
        ("{{ node.labels['example.com/gpu'] }}", "a100"),
        ("{{ vars.somaxconn }}", "65535"),
        ("{{ vars.net.mtu }} {{ vars.ports[1] }}", "9000 443"),
        ("{{ node.labels.rack | default('none') }}", "none"),
        ("check {{ node.labels.evil | quote }}", "check 'x; rm -rf /'"),
        ("{{ 'a' if node.labels.site == 'ams' else 'b' }}", "a"),
        ("${#list[@]} {% raw %} {# kept #}", "${#list[@]} {% raw %} {# kept #}"),
        ("two\nlines\n{{ node.name }}\n", "two\nlines\nn1\n"),
    ],
)
def test_texts_are_filled(text: str, expected: str) -> None:
    assert rendered(text) == expected


def test_values_of_other_kinds_stay_what_they_are() -> None:
    value = {"run": "{{ node.name }}", "list": ["{{ node.name }}", 1], "exit": 0, "none": None, "flag": True}
    assert rendered(value) == {"run": "n1", "list": ["n1", 1], "exit": 0, "none": None, "flag": True}


@pytest.mark.parametrize("text", ["{{ node.labels.rack }}", "{{ vars.other }}", "{{ vars.net.other }}"])
def test_what_is_not_there_is_said(text: str) -> None:
    with pytest.raises(RenderFailed, match=r"for node n1.*default"):
        rendered(text)


@pytest.mark.parametrize(
    "text",
    [
        "{{ other }}",
        "{{ node.connection }}",
        "{{ node['_x'] }}",
        "{{ node.__class__ }}",
        "{{ vars.x.__class__ }}",
        "{{ node.name.upper() }}",
        "{{ range(9) }}",
        "{{ 'x' * 1000000 }}",
        "{{ 2 ** 1000000 }}",
        "{{ node.name | replace('n', 'nnnn') }}",
        "{{ node.name is sameas 1 }}",
        "{{ node.name",
        "node.name }} {{",
        "{{ }}",
        "{{ " + "(" * 5000,
        "{{ " + "9" * 5000 + " }}",
    ],
)
def test_what_a_template_may_not_do_is_refused(text: str) -> None:
    with pytest.raises(TemplateInvalid) as raised:
        validate_template(text)
    assert raised.value.allowed


def test_a_text_that_grows_too_long_is_refused() -> None:
    with pytest.raises(RenderFailed, match="too long"):
        render(
            "{{ vars.long }}",
            node="n1",
            address="10.0.0.1",
            labels={},
            variables={"long": "x" * (MAX_RENDERED_CHARS + 1)},
        )
