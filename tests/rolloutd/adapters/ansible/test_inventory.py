"""Real ansible-inventory on real files: what becomes a node, and what is refused."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from rolloutd.adapters.ansible.inventory import AnsibleInventory
from rolloutd.errors import SourceFailed
from rolloutd.ports import GROUPS, Host

STATIC = """
all:
  vars: {ansible_user: ops, motd: "welcome to {{ inventory_hostname }}"}
  children:
    web:
      children:
        edge: {hosts: {n1: {team: red, canary: true, rack: 12, weight: 1.5}}}
      hosts: {n2: {team: blue, canary: false, ansible_port: 2222}}
  hosts: {n3: {}}
"""


def write(path: Path, text: str, mode: int = 0o644) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


async def test_hosts_variables_labels_and_groups(tmp_path: Path) -> None:
    labels = ["team", "canary", "rack", "weight"]
    inventory = AnsibleInventory(write(tmp_path / "hosts.yml", STATIC), labels)
    found = {node.name: node for node in await inventory.refresh()}
    assert found["n1"].labels == {"team": "red", "canary": "true", "rack": "12", "weight": "1.5"}
    assert found["n2"].labels == {"team": "blue", "canary": "false"}
    assert found["n3"].labels == {}
    assert found["n2"].connection["ansible_port"] == 2222
    assert found["n2"].connection["motd"] == "welcome to {{ inventory_hostname }}"
    assert found["n1"].source == inventory.source == f"ansible:{tmp_path / 'hosts.yml'}"
    groups = {name: node.connection[GROUPS] for name, node in found.items()}
    assert groups == {"n1": ["web", "edge"], "n2": ["web"], "n3": []}


async def test_listing_is_read_outside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, load = [], json.loads

    def load_here(text: bytes) -> Any:
        threads.append(threading.current_thread())
        return load(text)

    monkeypatch.setattr(json, "loads", load_here)
    listing = '{"_meta": {"hostvars": {"n1": {}}}}'
    program = write(tmp_path / "ansible-inventory", f"#!/bin/sh\necho '{listing}'\n", 0o755)
    assert [node.name for node in await AnsibleInventory(tmp_path, (), str(program)).refresh()] == ["n1"]
    assert threads != [threading.main_thread()]


async def test_directories_and_scripts(tmp_path: Path) -> None:
    folder = tmp_path / "inventory"
    folder.mkdir()
    write(folder / "static.ini", "[db]\nn1 team=red\n")
    script = (
        '#!/bin/sh\necho \'{"cloud": {"hosts": ["n2"]}, "_meta": {"hostvars": {"n2": {"team": "blue"}}}}\'\n'
    )
    write(folder / "cloud.sh", script, 0o755)
    found = await AnsibleInventory(folder, ["team"]).refresh()
    assert [(node.name, node.labels["team"]) for node in found] == [("n1", "red"), ("n2", "blue")]


@pytest.mark.parametrize(
    ("name", "text", "mode", "says"),
    [
        ("broken.yml", "all:\n  hosts:\n    n1: {x: 1\n", 0o644, "YAML parsing failed"),
        ("empty.yml", "all: {hosts: {}}\n", 0o644, "it names no host"),
        ("fails.sh", "#!/bin/sh\nexit 3\n", 0o755, "non-zero exit code 3"),
        ("list.yml", "all: {hosts: {n1: {team: [a, b]}}}\n", 0o644, "variable team of host n1 is a list"),
        ("map.yml", "all: {hosts: {n1: {team: {a: b}}}}\n", 0o644, "variable team of host n1 is a mapping"),
        (
            "tmpl.yml",
            "all: {hosts: {n1: {team: '{{ x }}'}}}\n",
            0o644,
            "team of host n1 is a template",
        ),
    ],
)
async def test_a_bad_source_is_refused_and_says_why(
    tmp_path: Path, name: str, text: str, mode: int, says: str
) -> None:
    path = write(tmp_path / name, text, mode)
    with pytest.raises(SourceFailed, match=says) as caught:
        await AnsibleInventory(path, ["team"]).refresh()
    assert str(path) in str(caught.value)


async def test_vaulted_inventory_without_password_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("all: {hosts: {n1: {}}}\n")
    (tmp_path / "host_vars").mkdir()
    (tmp_path / "host_vars" / "n1.yml").write_text("$ANSIBLE_VAULT;1.1;AES256\n36313233\n")
    source = AnsibleInventory(tmp_path / "hosts.yml", ["team"])
    with pytest.raises(SourceFailed, match="; name vault_password_file in"):
        await source.refresh()


async def test_the_first_mistakes_are_named_and_the_rest_is_counted(tmp_path: Path) -> None:
    hosts = "\n".join(f"    n{number}: {{team: [a], rack: {{b: c}}, row: r}}" for number in range(1, 5))
    path = write(tmp_path / "hosts.yml", f"all:\n  hosts:\n{hosts}\n")
    with pytest.raises(SourceFailed) as caught:
        await AnsibleInventory(path, ["team", "rack", "row"]).refresh()
    said = str(caught.value)
    assert "variable team of host n1 is a list; variable rack of host n1 is a mapping" in said
    assert "team of host n3 is a list; and 3 more; a label is one text" in said
    assert "n4" not in said
    assert said.count("give each host one value for team") == 1


async def test_one_invalid_label_leaves_out_its_node_only(tmp_path: Path) -> None:
    path = write(tmp_path / "hosts.yml", "all: {hosts: {n1: {team: {a: b}}, n2: {team: red}}}")
    inventory = AnsibleInventory(path, ["team"])
    assert [node.name for node in await inventory.refresh()] == ["n2"]
    problem = inventory.left_out["n1"]
    assert "variable team of host n1 is a mapping" in problem
    write(path, "all: {hosts: {n1: {team: blue}, n2: {team: red}}}")
    assert len(await inventory.refresh()) == 2
    assert not inventory.left_out


async def test_a_vaulted_label_is_called_vaulted(tmp_path: Path) -> None:
    vaulted = "!vault |\n        $ANSIBLE_VAULT;1.1;AES256\n        3132\n"
    path = write(tmp_path / "hosts.yml", f"all:\n  hosts:\n    n1:\n      team: {vaulted}")
    with pytest.raises(SourceFailed, match="team of host n1 is a vaulted value"):
        await AnsibleInventory(path, ["team"]).refresh()


async def test_a_half_readable_directory_is_refused_whole(tmp_path: Path) -> None:
    write(tmp_path / "good.ini", "n1\n")
    write(tmp_path / "bad.yml", "all:\n  hosts:\n    n1: {x: 1\n")
    with pytest.raises(SourceFailed, match=r"bad\.yml"):
        await AnsibleInventory(tmp_path).refresh()


async def test_a_source_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    path = write(tmp_path / "slow.sh", "#!/bin/sh\nexec sleep 600\n", 0o755)
    with pytest.raises(SourceFailed, match="did not end in 2 s"):
        await AnsibleInventory(path, timeout_s=2.0).refresh()


async def test_missing_file_and_missing_program(tmp_path: Path) -> None:
    with pytest.raises(SourceFailed, match="there is no inventory"):
        await AnsibleInventory(tmp_path / "nowhere.yml").refresh()
    path = write(tmp_path / "hosts.ini", "n1\n")
    with pytest.raises(SourceFailed, match="No such file"):
        await AnsibleInventory(path, binary=str(tmp_path / "no-ansible")).refresh()


PLUGIN = """\
from ansible.plugins.inventory import BaseInventoryPlugin

DOCUMENTATION = "name: cloud\\nshort_description: a cloud\\ndescription: [a cloud]\\noptions: {}"


class InventoryModule(BaseInventoryPlugin):
    NAME = "cloud"

    def verify_file(self, path):
        return path.endswith("cloud.yml")

    def parse(self, inventory, loader, path, cache=True):
        for name in ("c1", "c2"):
            inventory.add_host(name)
            inventory.set_variable(name, "ansible_host", "192.0.2." + name[1:])
            inventory.set_variable(name, "team", "red")
            inventory.set_variable(name, "tags", {"env": ["{{ 1 + 1 }}", {"deep": "text"}], "size": 3})
"""

CONSTRUCTED = """\
plugin: constructed
strict: true
compose: {rack: "'r' ~ inventory_hostname[1:]", motd: "'{{ 1 + 1 }}'"}
groups: {odd: inventory_hostname is search('1')}
keyed_groups: [{key: team, prefix: of}]
"""


def plugin_inventory(tmp_path: Path) -> Path:
    """Return a directory with a source of a plugin, a static one, and one of `constructed` over both."""
    folder = tmp_path / "inventory"
    folder.mkdir()
    (tmp_path / "plugins").mkdir()
    write(tmp_path / "plugins/cloud.py", PLUGIN)
    write(
        tmp_path / "ansible.cfg",
        f"[defaults]\ninventory_plugins = {tmp_path / 'plugins'}\n"
        "[inventory]\nenable_plugins = cloud, constructed, yaml\n",
    )
    write(folder / "01.cloud.yml", "{}")
    write(folder / "02.hosts.yml", "all: {hosts: {s1: {team: blue, ansible_host: 192.0.2.9}}}\n")
    write(folder / "03.constructed.yml", CONSTRUCTED)
    return folder


async def test_plugins_values_are_labels_and_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANSIBLE_CONFIG", str(tmp_path / "ansible.cfg"))
    nodes = await AnsibleInventory(plugin_inventory(tmp_path), ["team", "rack", "motd"]).refresh()
    found = {node.name: Host(node.name, connection=node.connection) for node in nodes}
    assert {node.name: node.labels for node in nodes} == {
        "c1": {"team": "red", "rack": "r1", "motd": "{{ 1 + 1 }}"},
        "c2": {"team": "red", "rack": "r2", "motd": "{{ 1 + 1 }}"},
        "s1": {"team": "blue", "rack": "r1", "motd": "{{ 1 + 1 }}"},
    }
    assert [host.address for host in found.values()] == ["192.0.2.1", "192.0.2.2", "192.0.2.9"]
    assert found["c1"].connection["tags"] == {"env": ["{{ 1 + 1 }}", {"deep": "text"}], "size": 3}
    assert found["c1"].connection[GROUPS] == ["odd", "of_red"]
    assert found["s1"].connection["motd"] == "{{ 1 + 1 }}"
