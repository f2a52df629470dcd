"""Texts of other sources than Ansible's: typed at the border, stored as text, never rendered by a run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import rolloutd.adapters as adapters_package
from machines.model.node import Node
from rolloutd.adapters.ansible.environment import (
    RunPaths,
    TreeConfig,
    build_environment,
    build_inventory,
    build_node_inventory,
)
from rolloutd.adapters.ansible.launcher import LocalRun
from rolloutd.configuration.sealed_variables import unseal
from rolloutd.engine.background.inventory_refresh import InventoryRefresher
from rolloutd.engine.state import State
from rolloutd.ports import (
    GROUPS,
    HOST_KEY,
    MACHINE_ID,
    PROVIDER_ID,
    ConnectionDefaults,
    Host,
    InvalidVariable,
    InventorySnapshot,
    RunRequest,
    is_marked_form,
    plain_variables,
    without_templates,
)
from rolloutd.service.metrics import MetricsCollector
from tests.contracts.fakes.sources import SOURCE
from tests.rolloutd.control_environment import NODES, control_environment
from tests.rolloutd.engine.background.test_inventory_trust import Source

LABELS = {node.name: dict(node.labels) for node in NODES}

PLAY = """\
- hosts: all
  gather_facts: false
  tasks:
    - ansible.builtin.debug: {msg: "{{ hostvars[inventory_hostname] | to_json }}"}
    - ansible.builtin.debug: {var: machine_id}
    - ansible.builtin.ping:
"""


class TemplateSource(Source):
    """An inventory whose variables people wrote for Ansible."""

    gives_templates: ClassVar[bool] = True


def problem_of(state: State, source: str) -> str:
    return state.sources[source].error


def play(directory: Path, hosts: dict[str, Any], more: Sequence[str] = ()) -> str:
    """Run a playbook over the hosts as a run of the daemon reads them; return what it printed."""
    tree = directory / "tree"
    tree.mkdir()
    (tree / "play.yml").write_text(PLAY)
    inventory = directory / "inventory.json"
    defaults = ConnectionDefaults(Path("/known"), None, None)
    inventory.write_text(json.dumps(build_inventory(hosts, {}, defaults=defaults, common_args="")))
    paths = RunPaths("r", directory / "events", directory / "tmp", directory / "s", None)
    ended = subprocess.run(
        [
            *(Path(sys.executable).with_name("ansible-playbook"), "-i", inventory, "-c", "local"),
            *(more or ("-e", f"ansible_python_interpreter={sys.executable}")),
            "play.yml",
        ],
        cwd=tree,
        env={
            **os.environ,
            **build_environment(paths, TreeConfig.load(tree)),
            "ANSIBLE_STDOUT_CALLBACK": "default",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.stdout + ended.stderr


async def test_templates_of_sources_are_never_rendered(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    attack = f"{{{{ lookup('pipe', 'touch {canary}') }}}}"
    variables = {
        PROVIDER_ID: attack,
        MACHINE_ID: attack,
        "nested": {"list": [attack, {attack: attack}]},
        "block": f"{{% set x = lookup('pipe', 'touch {canary}') %}}",
    }
    async with control_environment(tmp_path) as inside:
        cluster = Source("cluster", dict(LABELS), {"p1": variables})
        await InventoryRefresher(inside.state, [cluster]).refresh()
        stored = await inside.state.store.load_connections()
        for connection in (inside.state.connections["p1"], unseal(stored["p1"], inside.state.redaction_key)):
            assert plain_variables(connection) == variables
        hosts = {"p1": inside.state.connections.snapshot().hosts["p1"]}
        assert inside.state.host("p1").connection == variables
    printed = play(tmp_path, hosts)
    assert attack in printed.replace("\\", "")
    assert not canary.exists()


async def test_templates_of_ansible_sources_are_rendered(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        own = TemplateSource("hosts", dict(LABELS), {"p1": {MACHINE_ID: "{{ 40 + 2 }}"}})
        await InventoryRefresher(inside.state, [own]).refresh()
        hosts = {"p1": inside.state.connections.snapshot().hosts["p1"]}
    printed = play(tmp_path, hosts)
    assert '"machine_id": 42' in printed
    assert "40 + 2" not in printed


@pytest.mark.parametrize(
    "address",
    [
        "{{ lookup('pipe', 'id') }}",
        "-oProxyCommand=touch /tmp/x",
        "10.0.0.1 -oProxyCommand=x",
        "n1\n",
        "a" * 64 + "b" * 200,
        "[::1]",
        "n1;id",
        "fe80::1%{{ lookup('pipe', 'id') }}",
        "fe80::1%eth0 -oProxyCommand=x",
        "10.0.0.1:22",
        "[::1]:22",
        "host.example:22",
        "root@10.0.0.1",
        "-h",
        "n1\0",
        "localhost\u202e",
        "",
        7,
        ["10.0.0.1"],
    ],
)
async def test_node_with_invalid_address_is_left_out(tmp_path: Path, address: Any) -> None:
    async with control_environment(tmp_path) as inside:
        labels = {"w1": {"team": "payments"}, "w2": {"team": "payments"}}
        cluster = Source("cluster", labels, {"w1": {"ansible_host": address}, "w2": {"ansible_host": "::1"}})
        refresher = InventoryRefresher(inside.state, [cluster])
        await refresher.refresh()
        assert "w1" not in inside.state.index.nodes
        assert inside.state.host("w2").address == "::1"
        assert "w1: ansible_host" in problem_of(inside.state, "cluster")
        cluster.variables["w1"] = {"ansible_host": "w1.example.com"}
        await refresher.refresh()
        assert inside.state.host("w1").address == "w1.example.com"
        assert problem_of(inside.state, "cluster") == ""


def test_only_inventory_of_ansible_gives_templates() -> None:
    adapters = Path(adapters_package.__file__).parent
    giving = [path for path in adapters.rglob("*.py") if "gives_templates" in path.read_text()]
    assert [str(path.relative_to(adapters)) for path in giving] == ["ansible/inventory.py"]


CONNECTION_VARIABLES = {
    "ansible_connection": "local",
    "ansible_ssh_common_args": "-o ProxyCommand='touch canary'",
    "ansible_ssh_executable": "/tmp/x",
    "ansible_python_interpreter": "/tmp/x",
    "ansible_become_exe": "/tmp/x",
    "ansible_shell_executable": "/tmp/x",
    "ansible_facts": {"python": "x"},
    "ansible_user": "-oProxyCommand=x",
    "ansible_ssh_user": "root\n",
    "ansible_port": "22 -oProxyCommand=x",
    "ansible_ssh_port": 70000,
}


async def test_other_source_names_no_program_of_a_connection(tmp_path: Path) -> None:
    typed = {"ansible_host": "::1", "ansible_port": "22", "ansible_user": "CORP\\ops", "rack": "a"}
    variables = {f"w-{name}": {name: value} for name, value in CONNECTION_VARIABLES.items()} | {"w": typed}
    async with control_environment(tmp_path) as inside:
        cloud = Source("cloud", {name: {} for name in variables}, variables)
        await InventoryRefresher(inside.state, [cloud]).refresh()
        assert inside.state.index.nodes.keys() & variables.keys() == {"w"}
        assert inside.state.host("w").connection == typed
        assert "w-ansible_connection: ansible_connection" in problem_of(inside.state, "cloud")
        own = TemplateSource("cloud", {name: {} for name in variables}, variables)
        await InventoryRefresher(inside.state, [own]).refresh()
        for name, value in variables.items():
            assert inside.state.host(name).connection == value


CONTROLS = ["a\0", "a\nb", "\x1b[2J", "a\u202eb", "a\x9b", "a\ud800"]


@pytest.mark.parametrize("place", ["label", "key", "id", PROVIDER_ID, MACHINE_ID, HOST_KEY])
async def test_text_of_other_source_has_no_control_character(tmp_path: Path, place: str) -> None:
    texts = {f"w{number}": text for number, text in enumerate(CONTROLS)}
    labels = {
        name: {"label": {"rack": text}, "key": {text: "r1"}}.get(place, {}) for name, text in texts.items()
    }
    variables = {name: {place: text} for name, text in texts.items()} if "_" in place else {}
    async with control_environment(tmp_path) as inside:
        nodes = {**labels, "w": {"rack": "Größe 1"}}
        cloud = Source("cloud", nodes, variables, ids=texts if place == "id" else {})
        await InventoryRefresher(inside.state, [cloud]).refresh()
        assert inside.state.index.nodes.keys() & {*texts, "w"} == {"w"}
        assert problem_of(inside.state, "cloud").startswith("w0: ")
        problem_of(inside.state, "cloud").encode()


@pytest.mark.parametrize(
    "groups", [["{{ lookup('pipe', 'id') }}"], ["web:!db"], ["a b"], [""], "web", [["web"]]]
)
async def test_other_source_names_groups_by_their_grammar(tmp_path: Path, groups: Any) -> None:
    async with control_environment(tmp_path) as inside:
        variables = {"w1": {GROUPS: groups}, "w2": {GROUPS: ["web", "db-1"]}}
        cloud = Source("cloud", {"w1": {}, "w2": {}}, variables)
        await InventoryRefresher(inside.state, [cloud]).refresh()
        assert "w1" not in inside.state.index.nodes
        assert inside.state.connections.snapshot().groups == {"web": ["w2"], "db-1": ["w2"]}


async def test_label_that_is_not_utf8_spoils_no_metric(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        labels = {**LABELS, "w1": {"team": "payments", "rack": "a\ud800"}, "w2": {"rack": 'a\n"} 1'}}
        await InventoryRefresher(inside.state, [TemplateSource("hosts", labels)]).refresh()
        assert "w1" not in inside.state.index.nodes
        await inside.start()
        text = (await MetricsCollector(inside.state, "1").render()).decode()
        pools = {s.labels.get("pool") for each in text_string_to_metric_families(text) for s in each.samples}
        assert "rack/r1" in pools


async def test_answer_stored_before_an_upgrade_is_text(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        hosts = {name: {PROVIDER_ID: "{{ 6 * 7 }}"} for name in LABELS}
        own = TemplateSource("cluster", dict(LABELS), hosts)
        await InventoryRefresher(inside.state, [own]).refresh()
        silent = Source("cluster", None)
        await InventoryRefresher(inside.state, [silent]).refresh()
        assert inside.state.connections["p1"][PROVIDER_ID] == {"__ansible_unsafe": "{{ 6 * 7 }}"}


def test_paths_that_nodes_and_plugins_give_are_text(tmp_path: Path) -> None:
    """A node says where its Python is, and a plugin's ssh arguments get ours."""
    canary = tmp_path / "canary"
    attack = f"{{{{ lookup('pipe', 'touch {canary}') }}}}"
    given = {"p1": {MACHINE_ID: 1, **without_templates({"ansible_ssh_common_args": attack})}}
    own = tmp_path / "own.json"
    own.write_text(json.dumps(build_node_inventory("p1", f"/usr/bin/{attack}")))
    printed = play(tmp_path, given, more=["-i", str(own)])
    assert f"{attack} -o UserKnownHostsFile=/known" in printed.replace("\\", "")
    assert not canary.exists()


def test_run_of_removed_node_renders_no_more(tmp_path: Path) -> None:
    """A refresh may remove the node between a run's request and its start."""
    given = without_templates({"note": "{{ 1 + 1 }}"})
    request = RunRequest("r", Host("n1", connection=given), SOURCE, "play.yml")
    run = LocalRun.resolve(request, tmp_path, InventorySnapshot({}))
    assert run.inventory.hosts == {"n1": given}
    assert run.variables == {"note": "{{ 1 + 1 }}"}


def test_keys_that_ansible_reads_as_types_are_refused() -> None:
    for value in ({"__ansible_vault": "x"}, [{"a": {"__ansible_type": "x"}}], {"__ansible_unsafe": ["x"]}):
        with pytest.raises(InvalidVariable, match="reserves"):
            without_templates({"nested": value})


UNREADABLE = {
    "unsafe list": {"__ansible_unsafe": ["x"]},
    "unsafe twice": [{"__ansible_unsafe": {"__ansible_unsafe": "x"}}],
    "unsafe and more": {"a": {"__ansible_unsafe": "x", "b": 1}},
    "vaulted number": {"__ansible_vault": 1},
    "not UTF-8": ["\ud800"],
    "key not UTF-8": {"\ud800": 1},
    "not a number": math.nan,
    "infinite": [{"a": math.inf}],
    "a date": date(2027, 1, 15),
    "key is a number": {1: "x"},
}

VARIABLES_OF_NODE = {problem: {"note": value} for problem, value in UNREADABLE.items()} | {
    f"named {name}": {name: "x", "note": "{{ 1 + 1 }}"} for name in ("__ansible_unsafe", "__ansible_vault")
}


@pytest.mark.parametrize("problem", VARIABLES_OF_NODE)
@pytest.mark.parametrize("kind", [Source, TemplateSource])
async def test_unreadable_variable_leaves_its_node_out(
    tmp_path: Path, kind: type[Source], problem: str
) -> None:
    """In a run Ansible would read all of the node's variables as templates, or fail for every node."""
    async with control_environment(tmp_path) as inside:
        labels: dict[str, dict[str, str]] = {"w1": {}, "w2": {}}
        source = kind("cloud", labels, {"w1": VARIABLES_OF_NODE[problem]})
        await InventoryRefresher(inside.state, [source]).refresh()
        assert "w1" not in inside.state.index.nodes
        assert "w2" in inside.state.index.nodes
        assert problem_of(inside.state, "cloud").startswith("w1: ")


def test_deeply_nested_variable_is_refused() -> None:
    value: Any = "x"
    for _ in range(10_000):
        value = [value]
    with pytest.raises(InvalidVariable, match="deeper"):
        without_templates({"nested": value})


def test_marking_twice_changes_nothing() -> None:
    once = without_templates({"a": "x", "b": [1, None, True, {"c": "{{ y }}"}], "group_names": ["web"]})
    assert without_templates(once) == once
    assert Host("n1", connection=once).connection["b"] == [1, None, True, {"c": "{{ y }}"}]
    assert Node("n1").labels == {}


VARIABLES = st.dictionaries(
    st.sampled_from(("a", "b", GROUPS)),
    st.recursive(
        st.sampled_from((None, True, 0, 1.5, "x", "{{ y }}", {"__ansible_unsafe": "x"})),
        lambda values: st.lists(values, max_size=2) | st.dictionaries(st.sampled_from("ab"), values),
        max_leaves=4,
    ),
)


@given(VARIABLES, VARIABLES)
def test_marked_form_is_recognised(variables: dict[str, Any], others: dict[str, Any]) -> None:
    marked = without_templates(variables)
    assert is_marked_form(variables, marked)
    assert is_marked_form(others, marked) == (without_templates(others) == marked)
