"""Containers that forks share until one of them writes.

A fork costs a few microseconds, whatever the size of the fleet: it takes the same dicts, lists and sets.
Each side copies a container once, before its first write to it after the fork.  So a write costs at most a
copy of the tables that it changes, and reading costs nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Protocol, Self, TypeVar


class Copyable(Protocol):
    def copy(self) -> Any:
        """Return a shallow copy, of which the original sees no change."""


T = TypeVar("T", bound=Copyable)
K = TypeVar("K")


class Forkable:
    """An object whose forks share its containers."""

    def __init__(self) -> None:
        # By id.  A container that a fork shares is alive, so no container that was made since has its id.
        self._owned_ids: set[int] = set()

    def fork(self) -> Self:
        """Return an object with the same content; a later change of one does not change the other."""
        made = copy.copy(self)
        self._owned_ids, made._owned_ids = set(), set()
        return made

    def _own(self, container: T) -> T:
        """Return the container, or a copy of it if a fork may have it."""
        if id(container) in self._owned_ids:
            return container
        made: T = container.copy()
        self._owned_ids.add(id(made))
        return made

    def _own_row(self, table: dict[K, T], key: K, empty: Callable[[], T] | None = None) -> T:
        """Return a row of a table that is owned, for writing; without the row, an `empty` one."""
        row = table.get(key)
        if row is not None and id(row) in self._owned_ids:
            return row
        made: T = table[key].copy() if row is not None or empty is None else empty()
        table[key] = made
        self._owned_ids.add(id(made))
        return made
