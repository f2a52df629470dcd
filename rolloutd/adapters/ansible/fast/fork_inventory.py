"""Inventory of a generation, read by the fork server before the forks.

It knows no run: its path and the vault secrets of its variables are a run's, and are set in the fork.  If
Ansible prints anything about it, or if plugins of the user may add variables to it, each run reads it itself.
"""

from __future__ import annotations

import os
import types
from typing import Any

VARS_PLUGINS = {"ansible.builtin.host_group_vars"}
"""Plugins that find nothing for an inventory in a run's directory."""


class PreparedInventory:
    """The inventory that a fork may adopt instead of its first source."""

    def __init__(self, path: str, module: types.ModuleType) -> None:
        """Read the file by the plugin in `module`."""
        from ansible.inventory.data import InventoryData

        self._data = InventoryData()
        self._path = module.__file__
        self._plugin = module.InventoryModule()
        self._plugin.parse(self._data, None, path)
        self._data.reconcile_inventory()
        self._data.get_groups_dict()  # fills a cache, as the next line does
        self._data.groups["all"].get_hosts()
        self._manager: Any = None

    def install(self) -> None:
        """Make Ansible's inventory manager begin with it; call it in a fork."""
        from ansible.inventory.manager import InventoryManager

        parse_sources = InventoryManager.parse_sources

        def parse_or_adopt(manager: Any, cache: bool = False) -> None:
            if not self._adopt(manager):
                parse_sources(manager, cache=cache)

        InventoryManager.parse_sources = parse_or_adopt

    def _adopt(self, manager: Any) -> bool:
        """Give a manager the inventory and read its other sources; return False if it has to read all."""
        from ansible.plugins.loader import inventory_loader
        from ansible.utils.display import Display
        from ansible.vars import plugins

        # A plugin of the tree may make managers of its own, with sources of its own.
        if self._manager not in (None, manager) or not manager._sources:
            return False
        first, *others = manager._sources
        if os.path.dirname(os.path.abspath(first)) != os.environ.get("ROLLOUTD_RUN_DIR"):  # noqa: PTH100, PTH120
            return False
        if Display().verbosity or inventory_loader.find_plugin(self._plugin.NAME) != self._path:
            return False
        if plugins.vars_loader._paths is None:
            plugins._prime_vars_loader()
        if set(plugins.vars_loader._plugin_instance_cache) != VARS_PLUGINS:
            return False
        self._manager, manager._inventory = manager, self._data
        self._plugin.adopt(manager._loader, os.path.abspath(first))  # noqa: PTH100
        for source in others:  # variables of the run's node, but no other hosts
            manager.parse_source(source)
        self._answer_patterns(manager._hosts_patterns_cache)
        return True

    def _answer_patterns(self, cache: dict[tuple[str, ...], list[Any]]) -> None:
        """Put the hosts of `all`, and those that `--limit` leaves of them, where Ansible searches first.

        To find them it would read every host, and each that a fork reads is a copy of a page of memory.
        """
        from ansible import context

        limit = context.CLIARGS.get("subset")
        cache["all",] = self._data.groups["all"].get_hosts()
        if limit in self._data.hosts:
            # In a play, Ansible's key also has the play's hosts, so the limit occurs twice.
            cache["all", limit] = cache["all", limit, limit] = [self._data.hosts[limit]]
