"""Brings the inventory up to date: a node is the union of what the sources say of its name.

A source that fails changes nothing: its nodes stay as they were last known, and
everybody can see since when it fails.  Nor does it when the settings name no source at
all: a slip of the pen would be the end of every rollout, for all its nodes had left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from machines.amend import amendments
from machines.events import Event, NodesGone, NodesSeen
from machines.node import Kind, Node
from rolloutd.errors import RolloutdError, SourceFailed, StoreFailed
from rolloutd.ports import Found, Inventory
from rolloutd.ports.border import answer_of, answering_for
from rolloutd.state import SourceState, State
from rolloutd.watching.merging import Merged, merge

log = logging.getLogger("rolloutd.watching.refreshing")

SOON_S = 2.0
"""How long the slower sources are waited for: a joiner is to be known within five seconds."""

SOURCE_LIMIT_S = 120.0
"""For one source: a dynamic inventory that asks a cloud takes a minute; one that hangs holds only itself."""


NO_SOURCE = "inventory"
"""The subject of what is said in the status while no source is named."""


class Refreshing:
    """The inventory sources, and what they said last."""

    def __init__(self, state: State, inventories: Sequence[Inventory]) -> None:
        self._state = state
        self._inventories = tuple(inventories)
        self._found: dict[str, Sequence[Found]] = {}
        self._failing: set[str] = set()
        self._next: set[str] = set()
        self._asking: dict[str, asyncio.Lock] = {}
        self._one_at_a_time = asyncio.Lock()

    async def refresh(self) -> None:
        """Ask all sources at once; commit what changed; amend the rollouts.

        What comes soon is committed together; a source that is late is
        committed when it answers, and no other waits for it.
        """
        async with asyncio.TaskGroup() as tasks:
            late = {tasks.create_task(self._ask(inventory)) for inventory in self._inventories}
            if late:
                _, late = await asyncio.wait(late, timeout=SOON_S)
            await self._take()
            for answered in asyncio.as_completed(late):
                await answered
                await self._take()
        self._state.refreshed.set()
        self._state.poke()

    async def _take(self) -> None:
        """Commit what the sources have said so far."""
        async with self._one_at_a_time:
            if len(self._found) < len(self._inventories) and not self._state.index.nodes:
                log.warning("no node is known yet: an inventory source has never answered")
            try:
                await self._commit()
            except StoreFailed as failure:
                log.error("the inventory could not be written: %s", failure)
                self._state.trouble = str(failure)
            self._state.poke()

    async def _ask(self, inventory: Inventory) -> None:
        """Ask one source; whoever comes while it is asked and another waits leaves it to that one."""
        name = inventory.source
        if name in self._next:
            return
        self._next.add(name)
        async with self._asking.setdefault(name, asyncio.Lock()):
            self._next.discard(name)
            source = self._state.sources.setdefault(name, SourceState(name))
            try:
                async with asyncio.timeout(SOURCE_LIMIT_S):
                    with answering_for(f"inventory {name}"):
                        said = list(await inventory.refresh())
                    found = [answer_of(f"inventory {name}", each, Found) for each in said]
                if not found:
                    raise SourceFailed(f"{name} answered with no node at all; its nodes stay as last known")
            except (RolloutdError, TimeoutError) as error:
                _fail(source, str(error) or f"no answer within {SOURCE_LIMIT_S:.0f} s", self._state.now())
                self._failing.add(name)
                return
            self._failing.discard(name)
            self._found[name] = found
            source.refreshed_at, source.nodes = self._state.now(), len(found)

    def _order(self) -> list[str]:
        return [inventory.source for inventory in self._inventories]

    async def _commit(self) -> None:
        if not self._inventories:
            self._miss_all()
            return
        known = self._state.index.nodes
        silent = {source for source in self._order() if source not in self._found}
        found = [one for source in self._order() for one in self._found.get(source, ())]
        merged = merge(found, known, self._state.connections, silent)
        self._tell(merged)
        nodes, connections = merged.nodes, merged.connections
        for name, node in known.items():
            if name in nodes and self._may_still_say(node, silent):
                # A source that has not answered in this life may still have its say: nothing is taken back.
                nodes[name] = node
                connections[name] = dict(self._state.connections.get(name, connections[name]))
        for name in [name for name, node in nodes.items() if _has_left_its_cluster(known.get(name), node)]:
            # Another source may list the machine for ever; at the next refresh it is a plain host.
            del nodes[name], connections[name]
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
        # Nobody decides between the two: a target's team and pools are those of its node.
        async with self._state.deciding() as commit:
            await commit(events, "inventory refreshed")
            self._state.connect(connections, gone)
            await commit(amendments(self._state.index, self._state.now()), "inventory changed")

    def _miss_all(self) -> None:
        if self._state.index.nodes:
            self._state.lasting[NO_SOURCE] = (
                "the settings name no inventory: nodes stay as last known; name one and restart the daemon"
            )

    def _tell(self, merged: Merged) -> None:
        """Let everybody see which sources have nodes that were refused, and what nodes are called."""
        self._state.names = merged.names
        for name in self._found:
            source, why = self._state.sources[name], merged.refused.get(name)
            if why:
                more = f" (and {len(why) - 1} more of its nodes)" if len(why) > 1 else ""
                _fail(source, why[0] + more, self._state.now())
            elif name not in self._failing:
                source.error, source.failing_since = "", None

    def _may_still_say(self, node: Node, silent: set[str]) -> bool:
        """Say whether a configured source that has not answered yet may be one that told of the node.

        A source that the settings no longer name has no say; while another is
        silent, that one may be the same under a new name.
        """
        return bool(silent) and any(s in silent or s not in self._order() for s in node.sources)


def _fail(source: SourceState, why: str, now: float) -> None:
    if source.error != why:
        log.error("inventory %s: %s", source.source, why)
    source.error = why
    source.failing_since = source.failing_since or now


def _has_left_its_cluster(known: Node | None, node: Node) -> bool:
    return known is not None and known.kind is Kind.KUBERNETES and node.kind is not Kind.KUBERNETES
