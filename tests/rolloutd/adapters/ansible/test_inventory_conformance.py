"""What a playbook sees of an inventory through rolloutd, and what it sees bare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rolloutd.adapters.ansible.environment import RunPaths, build_inventory
from rolloutd.adapters.ansible.inventory import AnsibleInventory
from rolloutd.ports import GROUPS, ConnectionDefaults, DiscoveredNode
from tests.rolloutd.adapters.ansible.test_inventory import plugin_inventory
from tests.support.fast_environment import fast_environment

INVENTORIES = {
    "nested.yml": """\
all:
  vars: {from_all: all, level: all}
  hosts:
    solo: {own: 1}
  children:
    web:
      vars: {level: web, condition: "own_name == 'w10'"}
      hosts:
        w[10:12]: {http: 80}
        w2: {level: host, nested: {a: 1, b: [x, "{{ own_name }}", "{% raw %}{{ no }}{% endraw %}"]}}
      children:
        edge:
          vars: {level: edge}
          hosts: {w10: {}}
    db:
      hosts: {d1: {flag: true, nothing: null, ratio: 1.5, text: "ünïcode\\n: #"}, w2: {}}
    zone_a:
      children: {web: {}, db: {}}
""",
    "groups.ini": """\
[web]
w10 http=80 text="a b" flag=true
w2 level=host

[edge]
w10

[web:vars]
level=web
condition=own_name == 'w10'
[zone_a:children]
web
""",
}
NAMES = [
    "own",
    "http",
    "level",
    "from_all",
    "beside",
    "nested",
    "flag",
    "nothing",
    "ratio",
    "text",
    "condition",
]
PLAY = """\
- hosts: w10
  connection: local
  gather_facts: false
  tasks:
    - ansible.builtin.assert: {that: "{{ condition }}"}
    - delegate_to: localhost
      ansible.builtin.raw: |
        cat > '{{ out }}' <<'END'
        {{ seen | to_json }}
        END
      vars:
        seen:
          groups: "{{ groups }}"
          patterns: ["{{ query('inventory_hostnames', 'web:!edge') | sort }}",
            "{{ query('inventory_hostnames', 'zone_a:&web:w1*') | sort }}"]
          hosts: "{{ dict(groups.all | zip(groups.all | map('extract', hostvars) | map('dict2items')
            | map('selectattr', 'key', 'in', names) | map('items2dict'))) }}"
"""


def play(inventory: Path, tree: Path, out: Path, environment: dict[str, str]) -> Any:
    """Return what the playbook saw."""
    variables = json.dumps({"out": str(out), "ansible_python_interpreter": sys.executable})
    ended = subprocess.run(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", inventory, "-e", variables, "play.yml"],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    seen = json.loads(out.read_text())
    return {**seen, "groups": {name: sorted(hosts) for name, hosts in seen["groups"].items()}}


def play_through_rolloutd(directory: Path, tree: Path, nodes: Sequence[DiscoveredNode]) -> Any:
    """Return what the playbook saw of these nodes in a run of the daemon."""
    groups: dict[str, list[str]] = {}
    for node in nodes:
        for group in node.connection[GROUPS]:
            groups.setdefault(group, []).append(node.name)
    hosts = {node.name: node.connection for node in nodes}
    written = directory / "inventory.json"
    defaults = ConnectionDefaults(None, None, None)
    written.write_text(json.dumps(build_inventory(hosts, groups, defaults=defaults, common_args="")))
    paths = RunPaths("r", directory / "events", directory / "tmp", directory / "s", None)
    return play(written, tree, directory / "ours", fast_environment(paths, tree))


@pytest.mark.parametrize("name", INVENTORIES)
async def test_variables_and_groups_are_those_of_a_bare_run(tmp_path: Path, name: str) -> None:
    tree, inventory = tmp_path / "tree", tmp_path / name
    inventory.write_text(INVENTORIES[name])
    (tree / "group_vars").mkdir(parents=True)
    (tree / "play.yml").write_text(PLAY)
    (tree / "group_vars/all.yml").write_text(
        f"beside: all\nown_name: '{{{{ inventory_hostname }}}}'\nnames: {NAMES}\n"
    )
    for group in ("web", "edge", "db", "zone_a"):
        (tree / f"group_vars/{group}.yml").write_text(f"beside: {group}\n")
    (tree / "ansible.cfg").write_text("[defaults]\nhost_key_checking = true\n")
    nodes = await AnsibleInventory(inventory).refresh()
    ours = play_through_rolloutd(tmp_path, tree, nodes)
    assert ours == play(inventory, tree, tmp_path / "bare", dict(os.environ))
    assert ours["hosts"]["w10"]["beside"] == ("edge" if name == "nested.yml" else "web")


DUMP = """\
- hosts: all
  connection: local
  gather_facts: false
  tasks:
    - run_once: true
      delegate_to: localhost
      ansible.builtin.copy:
        dest: "{{ out }}"
        content: "{{ {'groups': groups, 'hosts': hosts} | to_json(vault_to_text=true) }}"
      vars:
        hosts: "{{ dict(groups.all | zip(groups.all | map('extract', hostvars))) }}"
"""

OF_THE_RUN = (
    "ansible_config_file",
    "ansible_inventory_sources",
    "inventory_file",
    "inventory_dir",
    "out",
    "omit",
)
"""Variables that say which files a run has, and a random one."""

SECRETS = """
all:
  hosts:
    s1:
      own: {plain: [x, "{{ team }}", 1.5, null], secret: [{deep: VAULTED}]}
      secret: VAULTED
      trusted: "{{ secret }} of {{ team }}"
      unsafe: !unsafe "{{ team }}"
"""


async def test_dynamic_variables_are_those_of_a_bare_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a plugin, of `constructed` over it and a file, vaulted, nested and templated ones."""
    monkeypatch.setenv("ANSIBLE_CONFIG", str(tmp_path / "ansible.cfg"))
    monkeypatch.setenv("ANSIBLE_VAULT_PASSWORD_FILE", str(tmp_path / "password"))
    (tmp_path / "password").write_text("a word\n")
    command = Path(sys.executable).with_name("ansible-vault"), "encrypt_string", "a secret {{ team }}"
    vaulted = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line.strip() for line in vaulted.splitlines()[1:]]
    vaulted_value = f"!vault {json.dumps(chr(10).join(lines))}"  # in one line of YAML
    inventory = plugin_inventory(tmp_path)
    (inventory / "02.more.yml").write_text(SECRETS.replace("VAULTED", vaulted_value))
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/play.yml").write_text(DUMP)
    nodes = await AnsibleInventory(inventory, ["team"]).refresh()
    ours = play_through_rolloutd(tmp_path, tmp_path / "tree", nodes)
    bare = play(inventory, tmp_path / "tree", tmp_path / "bare", dict(os.environ))
    for found in (ours, bare):
        for variables in found["hosts"].values():
            for name in (*OF_THE_RUN, "groups"):  # the groups are compared without the order of their hosts
                variables.pop(name, None)
    assert ours == bare
    assert ours["hosts"]["c1"]["tags"] == {"env": ["{{ 1 + 1 }}", {"deep": "text"}], "size": 3}
    assert ours["hosts"]["s1"]["trusted"] == "a secret {{ team }} of blue"
    assert ours["hosts"]["s1"]["unsafe"] == "{{ team }}"


COMPARE = """
import json, os, sys
from ansible import context
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import inventory_loader, init_plugin_loader
from ansible._internal._datatag._tags import TrustedAsTemplate
import ansible.constants as C
from rolloutd.adapters.ansible.fast.fork_inventory import PreparedInventory
init_plugin_loader()
inventory_loader.add_directory(sys.argv[1])

context.CLIARGS = {"subset": "n1"}
managers = []

def value(found):
    if isinstance(found, dict):
        return {key: value(each) for key, each in found.items()}
    if isinstance(found, list):
        return [value(each) for each in found]
    text = getattr(found, "_ciphertext", None) or str(found)
    return [type(found).__name__, text, TrustedAsTemplate.is_tagged_on(found)]

def find(manager, pattern, limit=None, batch=None):
    manager.subset(limit)
    manager.restrict_to_hosts(batch and [manager.hosts[name] for name in batch])
    return [host.name for host in manager.get_hosts(pattern)]

def read(plugin):
    C.INVENTORY_ENABLED = [plugin]
    manager = InventoryManager(DataLoader(), sources=sys.argv[2:])
    managers.append((manager, set(manager._hosts_patterns_cache)))
    hosts, groups = manager.hosts.items(), manager.groups.items()
    patterns = ("all", "g:!h", "~n.", "n1,n2")
    return {
        "hosts": {name: value(host.get_vars()) for name, host in hosts},
        "groups": {name: [each.name for each in group.get_hosts()] for name, group in groups},
        "of": {name: sorted(group.name for group in host.get_groups()) for name, host in hosts},
        "patterns": [find(manager, each) for each in patterns],
        "limited": [find(manager, each, limit) for each in ("all", "h") for limit in ("n1", "g", "n3,n1")],
        "in a play": [find(manager, each, "n1", ["n1"]) for each in ("all", ["all"], "g", "h")],
    }

ours, theirs = read("rolloutd_inventory"), read("ansible.builtin.yaml")
assert ours == theirs, json.dumps([ours, theirs], default=str)
plugin = sys.modules[type(inventory_loader.get("rolloutd_inventory")).__module__]
try:
    prepared = PreparedInventory(sys.argv[2], plugin)
except ValueError:
    assert "in-valid" in ours["hosts"]["n2"]
else:
    os.environ["ROLLOUTD_RUN_DIR"] = os.path.dirname(sys.argv[2])
    prepared.install()
    adopted = read("rolloutd_inventory")
    manager, answered = managers[-1]
    assert manager._inventory is prepared._data
    assert ("all", "n1", "n1") in answered, answered
    assert adopted == theirs, json.dumps([adopted, theirs], default=str)
print(len(ours["hosts"]), ours["hosts"]["n1"]["template"], ours["hosts"]["n1"]["unsafe"])
"""


@pytest.mark.parametrize("name", ["valid", "in-valid"])
def test_plugin_gives_the_values_of_the_yaml_plugin(tmp_path: Path, name: str) -> None:
    """Also what a fork adopts; a name of which Ansible warns is left to each run."""
    hosts = {
        "n1": {
            "template": "{{ x }}",
            "plain": "x",
            "unsafe": {"__ansible_unsafe": "{{ x }}"},
            "vault": {"__ansible_vault": "$ANSIBLE_VAULT;1.1;AES256\n3132\n"},
            "deep": {"list": [1, 2.5, None, True, {"k": "v"}]},
        },
        "n2": {
            name: 1,
            "ansible_host": "::1",
            "unsafe": {"__ansible_unsafe": "{{ x }}"},
            "template": "{{ x }}",
        },
        "n3": {},
    }
    children = {"g": {"hosts": {"n1": {}, "n2": {}}}, "h": {"hosts": {"n2": {}}}}
    (tmp_path / "a.json").write_text(json.dumps({"all": {"hosts": hosts, "children": children}}))
    own = {
        "n1": {"ansible_python_interpreter": {"__ansible_unsafe": "/{{ x }}"}, "deep": {"list": ["{{ x }}"]}}
    }
    (tmp_path / "own.json").write_text(json.dumps({"all": {"hosts": own}}))
    environment = fast_environment(RunPaths("r", tmp_path / "e", tmp_path, tmp_path, None), tmp_path)
    plugins = environment["ANSIBLE_INVENTORY_PLUGINS"].rpartition(":")[2]
    ended = subprocess.run(
        [sys.executable, "-c", COMPARE, plugins, tmp_path / "a.json", tmp_path / "own.json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.split()[0] == "3"
    assert "'{{ x }}', True" in ended.stdout
    assert "'{{ x }}', False" in ended.stdout
