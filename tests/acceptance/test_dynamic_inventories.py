"""Dynamic inventories over real nodes: of a plugin, of `constructed` over two sources, of NetBox."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.contracts.netbox.backends import open_fake
from tests.support.daemon_environment import (
    CHANGE_PLAYBOOK,
    DaemonEnvironment,
    fleet_labels,
    plan,
)
from tests.support.fake_netbox import Fleet as Netbox
from tests.support.fake_netbox.fleet import device
from tests.support.sshd import Sshd

pytestmark = [pytest.mark.servers, pytest.mark.long]

NODES = fleet_labels(4, 2, 2)

PLUGIN = """\
import json
from pathlib import Path
from ansible.plugins.inventory import BaseInventoryPlugin

DOCUMENTATION = "name: cloud\\nshort_description: a cloud\\ndescription: [a cloud]\\noptions: {}"


class InventoryModule(BaseInventoryPlugin):
    NAME = "cloud"

    def verify_file(self, path):
        return path.endswith("cloud.json")

    def parse(self, inventory, loader, path, cache=True):
        for name, variables in json.loads(Path(path).read_text()).items():
            inventory.add_host(name)
            for key, value in variables.items():
                inventory.set_variable(name, key, value)
"""

CONFIG = """\
[defaults]
inventory_plugins = plugins
[inventory]
enable_plugins = cloud, constructed, yaml
"""

WORK = """\
    - name: a module, with the interpreter and the ssh arguments of the inventory
      ansible.builtin.copy: {content: "{{ provider_id }}", dest: "{{ seen }}.{{ inventory_hostname }}"}
"""

LABELS = ["team", "rack", "role", "canary"]


class Fleet4(DaemonEnvironment):
    """Nodes of which each has an address of its own, and that a source of templates reports."""

    @property
    def canary(self) -> Path:
        """What the sources' templates would make on the controller."""
        return self.directory / "canary"

    @property
    def attack(self) -> str:
        return f'{{{{ lookup("pipe", "touch {self.canary}") }}}}'

    def make_sshd(self, name: str) -> Sshd:
        return Sshd([f"127.0.0.{list(self.labels).index(name) + 1}"])

    def variables(self) -> dict[str, dict[str, Any]]:
        """Return the nodes' variables, as the static inventory has them."""
        listing: dict[str, Any] = yaml.safe_load((self.directory / "hosts.yml").read_text())
        hosts: dict[str, dict[str, Any]] = listing["all"]["hosts"]
        return hosts

    def walk(self, sources: Sequence[Mapping[str, Any]]) -> None:
        """Walk all nodes of these sources to done."""
        self.write_settings(inventory=sources)
        self.start_daemon()
        variables = {"log_file": str(self.log_file), "seen": str(self.directory / "seen")}
        spec = plan("dynamic", maintain={"playbook": "change.yml", "vars": variables}, soak="1s")
        rollout = self.submit(spec, {"change.yml": CHANGE_PLAYBOOK + WORK})
        self.vote(rollout, "start")
        self.finish(rollout)
        outcomes = {name: node["outcome"] for name, node in self.nodes(rollout).items()}
        assert outcomes == dict.fromkeys(NODES, "changed")
        assert sorted(span.node for span in self.spans()) == sorted(NODES), "each once"
        for name in NODES:
            assert self.sshds[name].logins() > 0
            assert (self.directory / f"seen.{name}").read_text() == self.attack
        assert not self.canary.exists()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet4]:
    made = Fleet4(tmp_path, NODES)
    try:
        made.start_nodes()
        yield made
    finally:
        made.stop()


def write_plugin(directory: Path, hosts: Mapping[str, Mapping[str, Any]]) -> Path:
    """Write a dynamic inventory that gives these variables; return its directory."""
    (directory / "plugins").mkdir()
    (directory / "plugins/cloud.py").write_text(PLUGIN)
    (directory / "ansible.cfg").write_text(CONFIG)
    inventory = directory / "inventory"
    inventory.mkdir()
    (inventory / "01.cloud.json").write_text(json.dumps(hosts))
    return inventory


def test_plugin_inventory_walks_real_nodes(fleet: Fleet4) -> None:
    more = {"provider_id": fleet.attack, "ansible_ssh_common_args": "-o ServerAliveInterval=30"}
    hosts = {name: {**variables, **more} for name, variables in fleet.variables().items()}
    path = write_plugin(fleet.directory, hosts)
    fleet.walk([{"ansible": {"path": str(path), "labels": LABELS}}])


def test_constructed_inventory_walks_real_nodes(fleet: Fleet4) -> None:
    """Two sources, and a third that makes the labels, the address and the team's group of both."""
    connections = {
        name: {**{key: value for key, value in each.items() if key not in LABELS}, "number": number}
        for number, (name, each) in enumerate(fleet.variables().items(), start=1)
    }
    for each in connections.values():
        del each["ansible_host"]
    path = write_plugin(fleet.directory, {name: connections[name] for name in ("n1", "n2")})
    static = {"all": {"hosts": {name: connections[name] for name in ("n3", "n4")}}}
    (path / "02.hosts.yml").write_text(yaml.safe_dump(static))
    compose = {
        "ansible_host": "'127.0.0.' ~ number",
        "team": "'t' ~ ((number - 1) % 2 + 1)",
        "role": "'worker' if number < 9 else 'spare'",
        "canary": "number < 2",
        "provider_id": f"'{fleet.attack}'",
    }
    constructed = {"plugin": "constructed", "strict": True, "compose": compose}
    (path / "03.constructed.yml").write_text(yaml.safe_dump(constructed))
    fleet.walk([{"ansible": {"path": str(path), "labels": LABELS}}])


async def test_netbox_inventory_walks_real_nodes(fleet: Fleet4) -> None:
    """NetBox has labels and addresses, a static inventory the ports and keys."""
    connections = {
        name: {key: value for key, value in each.items() if key not in (*LABELS, "ansible_host")}
        for name, each in fleet.variables().items()
    }
    path = fleet.directory / "hosts.yml"
    path.write_text(yaml.safe_dump({"all": {"hosts": connections}}))
    devices = [netbox_device(number, fleet.attack) for number in range(1, 5)]
    async with open_fake(
        fleet.directory, Netbox(devices, custom_fields=Netbox.of(0).custom_fields)
    ) as server:
        source = {
            "url": server.url,
            "token_file": str(server.token_file),
            "objects": ["devices"],
            "labels": {"team": "tenant", "role": "role", "rack": "rack", "canary": "tags.canary"},
            "provider_id": "custom_fields.note",
        }
        await asyncio.to_thread(fleet.walk, [{"ansible": {"path": str(path)}}, {"netbox": source}])


def netbox_device(number: int, note: str) -> dict[str, Any]:
    made = device(number)
    return {
        **made,
        "name": f"n{number}",
        "role": {**made["role"], "slug": "worker"},
        "tenant": {**(made["tenant"] or made["role"]), "slug": f"t{(number - 1) % 2 + 1}"},
        "primary_ip4": {**made["primary_ip4"], "address": f"127.0.0.{number}/24"},
        "custom_fields": {**made["custom_fields"], "note": note},
    }
