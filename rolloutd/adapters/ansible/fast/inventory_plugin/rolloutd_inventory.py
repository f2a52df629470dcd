"""Inventory plugin for the file that rolloutd writes for its runs; it runs inside ansible-playbook.

The yaml plugin decodes, tags and copies each variable of each host.  A run uses those of few hosts, so here a
host's variables are decoded when something first reads them, by the same decoder.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import cached_property
from typing import Any

from ansible.inventory.group import Group
from ansible.inventory.host import Host
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.inventory import BaseInventoryPlugin
from ansible.utils.path import basedir
from ansible.utils.vars import isidentifier

try:
    from ansible.template import trust_as_template
except ImportError:  # before ansible-core 2.19 every text is a template

    def trust_as_template(text: str) -> str:
        return text


DOCUMENTATION = """
name: rolloutd_inventory
short_description: Reads the inventory of a run of rolloutd
description: [Reads the inventory of a run of rolloutd.]
options: {}
"""

IMPLICIT_GROUP = "all"

Variables = Mapping[str, Any]


class DeferredVariables(MutableMapping[str, Any]):
    """Variables of a host, decoded at their first use."""

    def __init__(
        self, encoded: Variables, source_variables: Variables, decode: Callable[[Variables], dict[str, Any]]
    ) -> None:
        self._encoded, self._source_variables, self._decode = encoded, source_variables, decode

    @cached_property
    def _decoded(self) -> dict[str, Any]:
        return {**self._source_variables, **self._decode(self._encoded)}

    def __or__(self, other: dict[str, Any]) -> Mapping[str, Any]:
        # Ansible merges each host with what vars plugins found for it, which is mostly nothing.
        return self._decoded | other if other else self

    def __ror__(self, other: dict[str, Any]) -> dict[str, Any]:
        return other | self._decoded

    def copy(self) -> dict[str, Any]:
        return self._decoded.copy()

    def __getitem__(self, name: str) -> Any:
        return self._decoded[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._decoded[name] = value

    def __delitem__(self, name: str) -> None:
        del self._decoded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded)

    def __len__(self) -> int:
        return len(self._decoded)


class InventoryModule(BaseInventoryPlugin):  # type: ignore[misc]  # Ansible has no types
    """Reads `{"all": {"hosts": {NAME: VARIABLES}, "children": {GROUP: {"hosts": {NAME: {}}}}}}`."""

    NAME = "rolloutd_inventory"

    def verify_file(self, path: str) -> bool:
        return bool(super().verify_file(path) and path.endswith(".json"))

    def parse(self, inventory: Any, loader: DataLoader | None, path: str, cache: bool = True) -> None:
        """Fill the inventory, in the order of the yaml plugin; without a loader, adopt() must follow."""
        self.loader = loader
        self.inventory = inventory
        with open(path, "rb") as file:  # noqa: PTH123 - as cheap as possible
            text = file.read()
        gc.disable()  # it would inspect all hosts again and again
        try:
            self._fill(json.loads(text)[IMPLICIT_GROUP])
        finally:
            # No gc.freeze(): at exit Python finalizes frozen cycles in another order, and a file that a
            # user's plugin leaves open would lose what it has not flushed.
            gc.enable()

    def adopt(self, loader: DataLoader, source: str) -> None:
        """Read the rest as this source, by this loader: it has the run's vault secrets."""
        self.loader = loader
        self.inventory.processed_sources.append(source)
        self._source_variables.update(_source_variables(source))

    def _fill(self, root: Variables) -> None:
        inventory = self.inventory
        source_variables = self._source_variables = _source_variables(inventory.current_source)
        everyone = inventory.groups[IMPLICIT_GROUP]
        known_names: set[str] = set()
        hosts = inventory.hosts
        for name, variables in root["hosts"].items():
            if not variables.keys() <= known_names:
                known_names.update(filter(isidentifier, variables))
            if name in hosts or not variables.keys() <= known_names:
                if self.loader is None:
                    raise ValueError("Ansible's own warnings are a run's")
                # Ansible itself merges the variables, and warns of their names.
                self._populate_host_vars([name], self._decode(variables), IMPLICIT_GROUP)
                continue
            hosts[name] = host = Host(name)
            host.vars = DeferredVariables(variables, source_variables, self._decode)
            _add_host(everyone, host)
        everyone.clear_hosts_cache()
        for number, (group, content) in enumerate(root.get("children", {}).items(), start=1):
            added = inventory.groups[inventory.add_group(group)]
            for name in content["hosts"]:
                _add_host(added, hosts[name])
            added.clear_hosts_cache()
            inventory.add_child(IMPLICIT_GROUP, added.name)
            # The file has no nested groups, only their order of precedence.
            added.depth = number

    def _decode(self, variables: Variables) -> dict[str, Any]:
        """Return the values that the yaml plugin makes of these, vaulted ones included."""
        assert self.loader is not None
        # Where Ansible cannot decode JSON it reads it as YAML, in which no text is marked as no template.
        decoded: dict[str, Any] = self.loader.load(
            trust_as_template(json.dumps(variables)), self.inventory.current_source, json_only=True
        )
        return decoded


def _source_variables(source: str | None) -> dict[str, str | None]:
    return {"inventory_file": source, "inventory_dir": basedir(source) if source else None}


def _add_host(group: Group, host: Host) -> None:
    """Do what Group.add_host() does for a new host, without walking through all groups each time."""
    group.host_names.add(host.name)
    group.hosts.append(host)
    host.groups.append(group)
