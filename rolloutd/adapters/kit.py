"""How adapters are found and what they are made from.

An adapter is one file that offers a `make(kit)` under an entry point of the
group of its port.  Only what the settings or a plan name is imported, so a
fleet without Kubernetes never pays for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from rolloutd.errors import RolloutdError
from rolloutd.ports import JSON, Clock, Runner, Shell

INVENTORIES = "rolloutd.inventories"
OBSERVERS = "rolloutd.observers"
ISOLATORS = "rolloutd.isolators"
CHECKS = "rolloutd.checks"
PROBES = "rolloutd.probes"
WATCHES = "rolloutd.watches"


@dataclass(frozen=True, slots=True)
class InventorySnapshot:
    """The whole static inventory of the last refresh: host variables by node, nodes by group.

    Another refresh that changed anything has another `generation`.
    """

    hosts: Mapping[str, Mapping[str, JSON]]
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class Kit:
    """What every adapter may use; `params` are its own, from the settings.

    `shared` is where the adapters of one outside system keep what they have in
    common, by the system's name; each such thing has an async `close`.
    """

    shell: Shell
    clock: Clock
    runner: Runner
    inventory: Callable[[], InventorySnapshot]
    settings: Any
    params: Mapping[str, JSON] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)


class NoAdapter(RolloutdError):
    """No adapter of that kind is installed."""


class Adapters(Mapping[str, Any]):
    """The adapters of one port by kind, each made when it is first asked for."""

    def __init__(self, group: str, kit: Kit) -> None:
        self._group = group
        self._kit = kit
        self._made: dict[str, Any] = {}

    def __getitem__(self, kind: str) -> Any:
        if kind not in self._made:
            self._made[kind] = make(self._group, kind, self._kit)
        return self._made[kind]

    def __iter__(self) -> Iterator[str]:
        return iter(entry_points(group=self._group).names)

    def __len__(self) -> int:
        return len(entry_points(group=self._group).names)


def kinds(group: str) -> frozenset[str]:
    """Return the kinds of a port that are installed."""
    return frozenset(entry_points(group=group).names)


def make(group: str, kind: str, kit: Kit) -> Any:
    """Return the adapter of this kind; raises NoAdapter, which names those there are."""
    found = [point for point in entry_points(group=group) if point.name == kind]
    if not found:
        known = ", ".join(sorted(entry_points(group=group).names)) or "none"
        raise NoAdapter(f"there is no adapter {kind!r} in {group}; installed: {known}")
    return found[0].load()(kit)
