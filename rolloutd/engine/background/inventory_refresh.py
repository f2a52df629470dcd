"""Inventory refresh: a node is the union of what the sources report under its name.

A source that fails changes nothing: its nodes stay as last known, and the status shows since when it fails.
Settings without any source change nothing either: a typo must not remove every node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from machines.model.events import Event, NodesDiscovered, NodesRemoved
from machines.model.node import Node, NodeKind
from machines.scheduler.membership import membership_events
from rolloutd.engine.background.inventory_merge import MergedInventory, merge_inventories
from rolloutd.engine.state import SourceState, State
from rolloutd.errors import RolloutdError, SourceFailed, StoreFailed
from rolloutd.ports import JSON, DiscoveredNode, Inventory
from rolloutd.ports.guards import adapter_errors, validate_result
from rolloutd.secret_variables import storable_variables

log = logging.getLogger("rolloutd.engine.background.inventory_refresh")

FIRST_COMMIT_WAIT_S = 2.0
"""Wait for slower sources before the first commit: a new node is known within five seconds."""

SOURCE_TIMEOUT_S = 120.0
"""Time limit of one source: a dynamic inventory that queries a cloud takes a minute."""

NO_SOURCE_CONDITION = "inventory"
"""Key of the daemon's condition while the settings name no source."""


class InventoryRefresher:
    """The inventory sources and their latest nodes."""

    def __init__(self, state: State, inventories: Sequence[Inventory]) -> None:
        self._state = state
        self._inventories = tuple(inventories)
        self._discovered: dict[str, Sequence[DiscoveredNode]] = {}
        self._failing: set[str] = set()
        self._queued: set[str] = set()
        self._source_locks: dict[str, asyncio.Lock] = {}
        self._commit_lock = asyncio.Lock()

    async def refresh(self) -> None:
        """Query all sources at once, commit what changed and amend the rollouts.

        Early answers are committed together; a late source is committed when it answers, and no other
        source waits for it.
        """
        async with asyncio.TaskGroup() as tasks:
            late = {tasks.create_task(self._query_source(inventory)) for inventory in self._inventories}
            if late:
                _, late = await asyncio.wait(late, timeout=FIRST_COMMIT_WAIT_S)
            await self._commit_results()
            for answered in asyncio.as_completed(late):
                await answered
                await self._commit_results()
        self._state.inventory_refreshed.set()
        self._state.wake_up()

    async def _commit_results(self) -> None:
        """Commit the nodes that the sources have reported so far."""
        async with self._commit_lock:
            if len(self._discovered) < len(self._inventories) and not self._state.index.nodes:
                log.warning("no node is known yet: an inventory source has never answered")
            try:
                await self._commit_changes()
            except StoreFailed as failure:
                log.error("the inventory could not be written: %s", failure)
                self._state.last_write_error = str(failure)
            self._state.wake_up()

    async def _query_source(self, inventory: Inventory) -> None:
        """Query one source; return at once when another call already waits to query it next."""
        name = inventory.source
        if name in self._queued:
            return
        self._queued.add(name)
        async with self._source_locks.setdefault(name, asyncio.Lock()):
            # From here on a new call must query again: this query may already miss its change.
            self._queued.discard(name)
            source = self._state.sources.setdefault(name, SourceState(name))
            try:
                async with asyncio.timeout(SOURCE_TIMEOUT_S):
                    with adapter_errors(f"inventory {name}"):
                        response = list(await inventory.refresh())
                    discovered = [
                        validate_result(f"inventory {name}", each, DiscoveredNode) for each in response
                    ]
                if not discovered:
                    raise SourceFailed(f"{name} answered with no node at all; its nodes stay as last known")
            except (RolloutdError, TimeoutError) as error:
                _set_source_error(
                    source, str(error) or f"no answer within {SOURCE_TIMEOUT_S:.0f} s", self._state.now()
                )
                self._failing.add(name)
                return
            self._failing.discard(name)
            self._discovered[name] = discovered
            source.refreshed_at, source.nodes = self._state.now(), len(discovered)

    def _source_names(self) -> list[str]:
        return [inventory.source for inventory in self._inventories]

    async def _commit_changes(self) -> None:
        if not self._inventories:
            self._report_no_source()
            return
        known = self._state.index.nodes
        unanswered = {source for source in self._source_names() if source not in self._discovered}
        discovered = [one for source in self._source_names() for one in self._discovered.get(source, ())]
        merged = merge_inventories(discovered, known, self._state.connections, unanswered)
        self._report_rejected(merged)
        nodes, connections = merged.nodes, merged.connections
        for name, node in known.items():
            if name in nodes and self._may_be_reported_later(node, unanswered):
                # A source that has not answered since the start may still report the node: keep everything.
                nodes[name] = node
                connections[name] = dict(self._state.connections.get(name, connections[name]))
        for name in [name for name, node in nodes.items() if _has_left_cluster(known.get(name), node)]:
            # Another source may still list the machine: remove the node now; the next refresh adds a host.
            del nodes[name], connections[name]
        changed = tuple(
            node
            for name, node in nodes.items()
            if known.get(name) != node or self._is_changed(name, connections[name])
        )
        removed = tuple(
            name
            for name, node in known.items()
            if name not in nodes and not self._may_be_reported_later(node, unanswered)
        )
        events: list[Event] = []
        if changed:
            stored = {node.name: storable_variables(connections[node.name]) for node in changed}
            events.append(NodesDiscovered(changed, stored))
        if removed:
            events.append(NodesRemoved(removed))
        # No decision between the two commits: a target must have the team and pools of its node.
        async with self._state.exclusive_commit() as commit:
            await commit(events, "inventory refreshed")
            self._state.update_connections(connections, removed)
            await commit(membership_events(self._state.index, self._state.now()), "inventory changed")

    def _is_changed(self, node: str, connection: Mapping[str, JSON]) -> bool:
        """Return whether the stored variables change; secrets change in memory only."""
        known = self._state.connections.get(node)
        if known is None or known == connection:
            return known is None
        return storable_variables(known) != storable_variables(connection)

    def _report_no_source(self) -> None:
        if self._state.index.nodes:
            self._state.conditions[NO_SOURCE_CONDITION] = (
                "the settings name no inventory: nodes stay as last known; name one and restart the daemon"
            )

    def _report_rejected(self, merged: MergedInventory) -> None:
        """Report rejected nodes as errors of their sources, and update the canonical names."""
        self._state.canonical_names = merged.canonical_names
        for name in self._discovered:
            source, problems = self._state.sources[name], merged.rejected.get(name)
            if problems:
                more = f" (and {len(problems) - 1} more of its nodes)" if len(problems) > 1 else ""
                _set_source_error(source, problems[0] + more, self._state.now())
            elif name not in self._failing:
                source.error, source.failing_since = "", None

    def _may_be_reported_later(self, node: Node, unanswered: set[str]) -> bool:
        """Return whether a source that has not answered yet may report the node.

        A source that the settings no longer name may have been renamed to one that has not answered.
        """
        return bool(unanswered) and any(
            s in unanswered or s not in self._source_names() for s in node.sources
        )


def _set_source_error(source: SourceState, error: str, now: float) -> None:
    if source.error != error:
        log.error("inventory %s: %s", source.source, error)
    source.error = error
    source.failing_since = source.failing_since or now


def _has_left_cluster(known: Node | None, node: Node) -> bool:
    return known is not None and known.kind is NodeKind.KUBERNETES and node.kind is not NodeKind.KUBERNETES
