"""Templates fill in names of the node and the plan, and can do nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from rolloutd.plugin import CHECKS, GUARDS, ISOLATORS, PROBES, command_parameters, installed_adapters
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


COMMANDS = {
    (ISOLATORS, "command"): {"do", "undo", "look"},
    (PROBES, "command"): {"run"},
    (CHECKS, "ssh"): {"run"},
    (GUARDS, "ssh"): {"commands"},
}
HOSTILE = (
    "$(touch canary)",
    "`touch canary`",
    "; touch canary",
    "x' ; touch canary ; '",
    'x" ; touch canary ; "',
    "\ntouch canary\n",
    "| touch canary",
    "& touch canary",
    "\\",
    "-n",
    "a b",
    "*",
    "",
    "a[$(touch canary)]",
)
PLACES = (
    "echo {{ X }}",
    "echo {{ X | quote }}",
    "echo '{{ X }}'",
    'echo "{{ X }}"',
    'echo "{{ X | quote }}"',
    "echo $(echo {{ X }})",
    'echo "$(echo {{ X }})"',
    'echo "$(echo "{{ X }}")"',
    "echo `echo {{ X }}`",
    "cat <<END\n{{ X }}\nEND",
    "true # it isn't {{ X }}",
    "true # it isn't\necho {{ X }}",
    "echo $'it\\'s' {{ X }}",
    'x=1; echo "${x:-{{ X }}}"',
    "echo ${x#it's} {{ X }}",
    "echo \\'{{ X }}\\'",
    "echo 'a'{{ X }}\"b\"",
    "echo {{ 'a' ~ X }}",
    "echo {{ X | lower }}",
    "echo $(( {{ X }} + 1 ))",
    "echo $[ {{ X }} ]",
    "(( {{ X }} > 0 ))",
    "[[ {{ X }} -gt 0 ]]",
    "a[{{ X }}]=1",
    "echo ${a[{{ X }}]}",
    "let n={{ X }}",
    "su -c {{ X }} nobody",
    "eval echo {{ X }}",
    "true && eval echo a {{ X }}",
    "sh -c {{ X }}",
    "bash -ec {{ X }}",
    "sh -c 'echo \"{{ X }}\"'",
    "trap {{ X }} EXIT",
)


@pytest.mark.parametrize("place", PLACES)
def test_no_value_becomes_a_command(tmp_path: Path, place: str) -> None:
    filled = [value for value in HOSTILE if run_with_label(tmp_path, place, value)]
    assert filled, "some value can be filled in everywhere"
    assert not (tmp_path / "canary").exists()


def run_with_label(directory: Path, place: str, value: str) -> bool:
    """Run a command with a label's value in two shells; return whether it could be filled."""
    text, labels = place.replace("X", "node.labels.evil"), {"evil": value}
    try:
        params = render({"run": text}, node="n1", address="", labels=labels, variables={}, commands=("run",))
    except RenderFailed:
        return False
    for shell in ("/bin/sh", "/bin/bash"):
        subprocess.run([shell, "-c", params["run"]], cwd=directory, check=False, capture_output=True)
    return True


@pytest.mark.parametrize(
    "text",
    [
        "curl {{ X }}",
        'curl "{{ X }}"',
        "curl '{{ X }}'",
        "true; {{ X }}",
        "x $({{ X }})",
        "x {{ X | lower }}",
    ],
)
def test_value_of_inventory_is_no_option(text: str) -> None:
    def fill(value: str, place: str) -> None:
        params = {"run": text.replace("X", place)}
        names = {"labels": {"evil": value}, "variables": {"evil": value}}
        render(params, node="n1", address="", commands=("run",), **names)

    with pytest.raises(RenderFailed, match="an option; put -- before it"):
        fill("-o/etc/cron.d/x", "node.labels.evil")
    fill("o-x", "node.labels.evil")
    fill("-sS", "vars.evil")


def test_value_behind_two_dashes_may_begin_with_one() -> None:
    params = {"run": ["grep -e x -- {{ node.labels.evil }}", "grep --x={{ node.labels.evil }}"]}
    found = render(params, node="n1", address="", labels={"evil": "-1"}, variables={}, commands=("run",))
    assert found == {"run": ["grep -e x -- -1", "grep --x=-1"]}


@pytest.mark.parametrize(
    "text",
    [
        "[[ -f x ]] && echo {{ X }}",
        "(( 1 + 1 )) ; echo {{ X }}",
        "ls x[0-9] {{ X }}",
        "eval x; echo {{ X }}",
        "sh -c 'echo \"$1\"' _ {{ X }}",
        "grep -c {{ X }} file",
        "[ {{ X }} = y ]",
    ],
)
def test_quotable_value_is_not_refused(text: str) -> None:
    params = {"run": text.replace("X", "node.labels.evil")}
    render(params, node="n1", address="", labels={"evil": "a b"}, variables={}, commands=("run",))


def test_value_of_arithmetic_may_be_a_number() -> None:
    params = {"run": "echo $(( {{ node.labels.n }} + 1 ))"}
    assert render(params, node="n1", address="", labels={"n": "41"}, variables={}, commands=("run",)) == {
        "run": "echo $(( 41 + 1 ))"
    }


def test_value_of_inventory_leads_out_of_no_directory() -> None:
    for value in ("..", "../../etc", "a/../..", "a/.."):
        with pytest.raises(RenderFailed, match=r"control characters or `\.\.`"):
            render("/var/cache/{{ node.labels.x }}", node="n", address="", labels={"x": value}, variables={})
    for value in ("a..b", "v1.2..", "a/b"):
        render("/var/cache/{{ node.labels.x }}", node="n", address="", labels={"x": value}, variables={})


@pytest.mark.parametrize("value", ['x"} or vector(0) #', "x'", "x\\", "a`b", "a\nb"])
def test_value_of_inventory_ends_no_string_of_a_query(value: str) -> None:
    for text, labels, variables in (
        ('up{rack="{{ node.labels.evil }}"}', {"evil": value}, {}),
        ('up{rack="{{ vars.rack }}"}', {}, {"rack": value}),
    ):
        names = {"node": "n1", "address": "", "labels": labels, "variables": variables}
        if labels:
            with pytest.raises(RenderFailed, match="a value of the inventory has quotes"):
                render({"query": text}, **names)
        else:
            assert value in render({"query": text}, **names)["query"]


def test_value_that_quotes_cannot_hold_is_refused() -> None:
    labels, params = {"evil": "$(touch canary)"}, {"run": 'echo "{{ node.labels.evil }}"'}
    with pytest.raises(RenderFailed, match="has characters that a shell interprets there; take it out"):
        render(params, node="n1", address="", labels=labels, variables={}, commands=("run",))


def test_values_of_commands_are_quoted_once() -> None:
    texts = ["echo {{ node.labels.evil }}", "echo {{ node.labels.evil | quote }}", "echo '{{ node.name }}'"]
    found = render({"run": texts}, node="n1", address="", labels=LABELS, variables={}, commands=("run",))
    assert found == {"run": ["echo 'x; rm -rf /'", "echo 'x; rm -rf /'", "echo 'n1'"]}


def test_raw_leaves_plan_variables_alone() -> None:
    text = "systemctl restart {{ vars.units | raw }}"
    found = render(
        {"run": text}, node="n1", address="", labels={}, variables={"units": "a b"}, commands=("run",)
    )
    assert found == {"run": "systemctl restart a b"}
    for value in ("node.name", "node.labels.site", "vars.x ~ node.address"):
        with pytest.raises(TemplateInvalid, match="not allowed for what the inventory gives"):
            validate_template(f"echo {{{{ ({value}) | raw }}}}")


def test_steps_know_their_commands() -> None:
    found = {
        (group, kind): set(command_parameters(adapter.params))
        for group in (ISOLATORS, PROBES, CHECKS, GUARDS)
        for kind, adapter in installed_adapters(group).items()
        if command_parameters(adapter.params)
    }
    assert found == COMMANDS
