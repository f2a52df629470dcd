"""Which node a machine is: by the settings, else by the id that its client makes of its machine id."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final

from machines.model.selector import parse_selector
from rolloutd.concurrency import threads
from rolloutd.engine.state import State
from rolloutd.errors import NotFound
from rolloutd.ports import MACHINE_ID
from rolloutd.settings.listeners import FleetLockGroup

APPLICATION_ID: Final = bytes.fromhex("de35106b6ec24688b63afddaa156679b")
"""Zincati's application id, https://github.com/coreos/zincati, src/identity/mod.rs."""

MACHINE_ID_BYTES = 16

MAX_AGE_S = 10.0
"""Age of the table from which a missing id makes it again; a hundred thousand ids take a quarter second."""


def client_id(machine_id: str) -> str | None:
    """Return the id that a client makes of its /etc/machine-id; None for something else.

    It is systemd's application-specific id (sd_id128_get_machine_app_specific): an HMAC, marked as a UUID of
    version 4.
    """
    try:
        key = bytes.fromhex(machine_id)
    except ValueError:
        return None
    if len(key) != MACHINE_ID_BYTES:
        return None
    digest = bytearray(hmac.new(key, APPLICATION_ID, hashlib.sha256).digest()[:MACHINE_ID_BYTES])
    digest[6] = digest[6] & 0x0F | 0x40
    digest[8] = digest[8] & 0x3F | 0x80
    return digest.hex()


class MachineIds:
    """The nodes by the ids of their clients, kept until an id is not among them."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._nodes: Mapping[str, Sequence[str]] = {}
        self._made_at: float | None = None
        self._making = asyncio.Lock()

    async def node(self, name: str, group: FleetLockGroup, machine_id: str) -> str:
        """Return the node of the group `name` that sends this id; raises NotFound."""
        listed = group.ids.get(machine_id)
        names = [listed] if listed is not None else await self._by_machine_id(machine_id)
        selector, nodes = parse_selector(group.nodes), self._state.index.nodes
        names = [node for node in names if node in nodes and selector.matches(nodes[node].labels)]
        if len(names) == 1:
            return names[0]
        problem = f"{len(names)} nodes have it" if names else f"no node of group {name} has it"
        raise NotFound(f"id {machine_id}: {problem}; list it under `fleetlock.groups.{name}.ids`")

    async def _by_machine_id(self, machine_id: str) -> Sequence[str]:
        async with self._making:
            names = self._nodes.get(machine_id, ())
            if not names or any(self._client_id_of(node) != machine_id for node in names):
                await self._make_again()
                names = self._nodes.get(machine_id, ())
        return names

    async def _make_again(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._made_at is not None and now - self._made_at < MAX_AGE_S:
            return
        pinned = [(node.name, node.identity.get(MACHINE_ID, "")) for node in self._state.index.nodes.values()]
        self._nodes = await threads.COMPUTATIONS.run(_by_client_id, pinned)
        self._made_at = now

    def _client_id_of(self, node: str) -> str | None:
        known = self._state.index.nodes.get(node)
        return None if known is None else client_id(known.identity.get(MACHINE_ID, ""))


def _by_client_id(pinned: Sequence[tuple[str, str]]) -> Mapping[str, Sequence[str]]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for node, machine_id in pinned:
        if machine_id and (made := client_id(machine_id)) is not None:
            found[made].append(node)
    return dict(found)
