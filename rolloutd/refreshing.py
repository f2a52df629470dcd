"""Brings the inventory up to date: a node is the union of what the sources say of its name.

A source that fails changes nothing: its nodes stay as they were last known, and
everybody can see since when it fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from machines.events import Event, NodesGone, NodesSeen
from machines.node import Kind, Node
from rolloutd.errors import RolloutdError, SourceFailed, StoreFailed
from rolloutd.ports import GROUPS, Found, Inventory
from rolloutd.state import SourceState, State

log = logging.getLogger("rolloutd.refreshing")


class Refreshing:
    """The inventory sources, and what they said last."""

    def __init__(
        self, state: State, inventories: Sequence[Inventory], amend: Callable[[], Awaitable[None]]
    ) -> None:
        self._state = state
        self._inventories = tuple(inventories)
        self._amend = amend
        self._found: dict[str, Sequence[Found]] = {}
        self._one_at_a_time = asyncio.Lock()

    async def refresh(self) -> None:
        """Ask all sources; commit what changed; amend the rollouts."""
        async with self._one_at_a_time:
            for inventory in self._inventories:
                await self._ask(inventory)
            if len(self._found) < len(self._inventories) and not self._state.index.nodes:
                log.warning("no node is known yet: an inventory source has never answered")
            try:
                await self._commit()
                await self._amend()
            except StoreFailed as failure:
                log.error("the inventory could not be written: %s", failure)
                self._state.trouble = str(failure)
            self._state.refreshed.set()
            self._state.poke()

    async def _ask(self, inventory: Inventory) -> None:
        now = self._state.now()
        source = self._state.sources.setdefault(inventory.source, SourceState(inventory.source))
        try:
            found = await inventory.refresh()
            if not found:
                raise SourceFailed(
                    f"{inventory.source} answered with no node at all; its nodes stay as last known"
                )
        except RolloutdError as error:
            source.error = str(error)
            source.failing_since = source.failing_since or now
            log.error("inventory %s: %s", inventory.source, error)
            return
        self._found[inventory.source] = found
        source.error, source.failing_since = "", None
        source.refreshed_at, source.nodes = now, len(found)

    def _order(self) -> list[str]:
        return [inventory.source for inventory in self._inventories]

    async def _commit(self) -> None:
        known = self._state.index.nodes
        silent = {source for source in self._order() if source not in self._found}
        nodes, connections = merge(f for source in self._order() for f in self._found.get(source, ()))
        for name, node in known.items():
            if name in nodes and self._may_still_say(node, silent):
                # A source that has not answered in this life may still have its say: nothing is taken back.
                nodes[name] = node
                connections[name] = dict(self._state.connections.get(name, connections[name]))
        changed = tuple(
            node
            for name, node in nodes.items()
            if known.get(name) != node or self._state.connections.get(name) != connections[name]
        )
        gone = tuple(
            name
            for name, node in known.items()
            if name not in nodes and not self._may_still_say(node, silent)
        )
        events: list[Event] = []
        if changed:
            events.append(NodesSeen(changed, {node.name: connections[node.name] for node in changed}))
        if gone:
            events.append(NodesGone(gone))
        if events:
            await self._state.commit(events, cause="inventory refreshed")
        self._state.connections.update(connections)
        for name in gone:
            self._state.connections.pop(name, None)

    def _may_still_say(self, node: Node, silent: set[str]) -> bool:
        """Say whether a configured source that has not answered yet may be one that told of the node.

        A source that the settings no longer name has no say; while another is
        silent, that one may be the same under a new name.
        """
        return bool(silent) and any(s in silent or s not in self._order() for s in node.sources)


def merge(found: Iterable[Found]) -> tuple[dict[str, Node], dict[str, dict[str, Any]]]:
    """Return nodes and connections by name; where two sources differ, the first one named wins."""
    nodes: dict[str, Node] = {}
    connections: dict[str, dict[str, Any]] = {}
    for one in found:
        known = nodes.get(one.name)
        if known is None:
            nodes[one.name] = Node(one.name, one.kind, (one.source,), dict(one.labels))
            connections[one.name] = dict(one.connection)
            continue
        kind = Kind.KUBERNETES if Kind.KUBERNETES in (known.kind, one.kind) else known.kind
        nodes[one.name] = Node(one.name, kind, (*known.sources, one.source), {**one.labels, **known.labels})
        groups = {*_groups(connections[one.name]), *_groups(one.connection)}
        connections[one.name] = {**one.connection, **connections[one.name]}
        if groups:
            connections[one.name] |= {GROUPS: sorted(groups)}
    return nodes, connections


def _groups(connection: Mapping[str, Any]) -> Sequence[str]:
    named: Sequence[str] = connection.get(GROUPS, ())
    return named
