"""Process that reads fuzzed listings of inventories, and lets Ansible template what a run would get.

It gets an input and prints what is wrong with it, a line each.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ansible import constants
from ansible._internal._datatag._tags import TrustedAsTemplate
from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import init_plugin_loader, inventory_loader
from ansible.template import Templar

from rolloutd.adapters.ansible.environment import build_inventory
from rolloutd.adapters.ansible.fast import fast_runs
from rolloutd.adapters.ansible.inventory import AnsibleInventory
from rolloutd.engine.background.inventory_merge import merge_inventories
from rolloutd.errors import RolloutdError
from rolloutd.ports import (
    ConnectionDefaults,
    DiscoveredNode,
    InvalidVariable,
    plain_value,
    require_readable,
    require_typed,
    unsafe_text,
    without_templates,
)

_NOT_COMPARED = {"ansible_ssh_common_args", "group_names", "inventory_hostname"}
"""Variables that a run adds to or that Ansible sets itself."""


def read_inputs(directory: Path) -> None:
    """Read inputs, a line each; print a line with what is wrong with each."""
    init_plugin_loader()
    inventory_loader.add_directory(str(fast_runs.HERE / "inventory_plugin"))
    constants.INVENTORY_ENABLED = ["rolloutd_inventory"]
    constants.INVENTORY_ANY_UNPARSED_IS_FAILED = True
    os.chdir(directory)
    source = AnsibleInventory(directory / "hosts.yml", ["team"])
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        problem = ""
        try:
            with contextlib.suppress(RolloutdError):
                nodes = source.parse_nodes(bytes.fromhex(json.loads(line)))
                _check_trust(nodes)
                _check_nothing_rendered(nodes)
        except Exception:
            problem = traceback.format_exc()
        print(json.dumps(problem), file=answers, flush=True)


def _check_trust(nodes: Sequence[DiscoveredNode]) -> None:
    """Require that a run trusts exactly the texts that Ansible's own source trusts."""
    connections = _valid(nodes, lambda node: (require_readable(node.connection), node)[1])
    for name, found, _ in _read(connections):
        given = connections[name]
        for key in found.keys() & given.keys() - _NOT_COMPARED:
            assert list(_trusted_texts(found[key])) == list(_templates(given[key])), (name, key)


def _check_nothing_rendered(nodes: Sequence[DiscoveredNode]) -> None:
    """Require that a run renders nothing of another source, and sees its texts as they are."""
    for node in nodes:
        with contextlib.suppress(InvalidVariable):
            require_typed(node.connection)
    connections = _valid(nodes, lambda node: replace(node, connection=without_templates(node.connection)))
    for name, found, templar in _read(connections):
        for key in found.keys() & connections[name].keys():
            rendered = templar.template(found[key])
            assert list(_trusted_texts(found[key])) == [], (name, key)
            if key not in _NOT_COMPARED:
                assert rendered == plain_value(connections[name][key]), (name, key)


def _valid(
    nodes: Sequence[DiscoveredNode], validate: Callable[[DiscoveredNode], DiscoveredNode]
) -> Mapping[str, Mapping[str, Any]]:
    valid = []
    for node in nodes:
        with contextlib.suppress(InvalidVariable):
            valid.append(validate(node))
    return merge_inventories(valid).connections


def _read(
    connections: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Yield each host with its variables and a templar, as a run reads the inventory that it gets."""
    defaults = ConnectionDefaults(Path("/known_hosts"), None, None)
    path = Path("inventory.json")
    path.write_text(json.dumps(build_inventory(connections, {}, defaults=defaults, common_args="")))
    loader = DataLoader()
    manager = InventoryManager(loader, sources=[str(path)])
    for name, host in manager.hosts.items():
        variables = host.get_vars()
        yield name, variables, Templar(loader, variables=variables)


def _trusted_texts(value: Any) -> Iterator[str]:
    """Yield the texts that Ansible would render."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from _trusted_texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from _trusted_texts(each)
    elif isinstance(value, str) and TrustedAsTemplate.is_tagged_on(value):
        yield value


def _templates(value: Any) -> Iterator[str]:
    """Yield the texts of a listing that are not marked."""
    if isinstance(value, Mapping):
        if unsafe_text(value) is None and not value.keys() & {"__ansible_vault"}:
            for each in value.values():
                yield from _templates(each)
    elif isinstance(value, list):
        for each in value:
            yield from _templates(each)
    elif isinstance(value, str):
        yield value


if __name__ == "__main__":
    read_inputs(Path(sys.argv[1]))
