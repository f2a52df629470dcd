"""The known nodes and the sources that tell of them."""

from __future__ import annotations

from typing import TypedDict


class InventoryNode(TypedDict):
    """A known node, where it is known from, and what was last seen of it."""

    node: str
    kind: str
    team: str | None
    labels: dict[str, str]
    pools: list[str]
    sources: list[str]
    sight: str
    seen_at: str | None
    why: str | None


class Source(TypedDict):
    """An inventory source and how its last refresh went."""

    source: str
    refreshed_at: str | None
    nodes: int
    error: str | None


class Inventory(TypedDict):
    """All known nodes and where they come from."""

    nodes: list[InventoryNode]
    sources: list[Source]


class Refreshing(TypedDict):
    """The inventory sources that are being asked again."""

    sources: list[str]
