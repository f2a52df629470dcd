"""Arguments of an adapter's factory, and the ports of time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rolloutd.ports.nodes import Shell
from rolloutd.ports.runs import Runs, StaleRuns
from rolloutd.ports.types import JSON, PinnedSource


class Clock(Protocol):
    def now(self) -> float:
        """Return the wall clock, epoch seconds."""

    async def sleep(self, seconds: float) -> None: ...


class Timers(Protocol):
    """Timers by key: each calls the daemon back at an instant, or at an interval."""

    def call_at(self, key: str, instant: float, callback: Callable[[], None]) -> None:
        """Schedule the callback; a later call with the same key replaces it."""

    def call_every(self, key: str, seconds: float, callback: Callable[[], None]) -> None:
        """Call the callback every `seconds`."""

    def cancel(self, key: str) -> None:
        """Cancel the callback of a key; an unknown key is ignored."""

    def close(self) -> None:
        """Cancel all callbacks."""


@dataclass(frozen=True, slots=True)
class InventorySnapshot:
    """The inventory of the last refresh: host variables by node, nodes by group.

    Each refresh with a change has another `generation`.
    """

    hosts: Mapping[str, Mapping[str, JSON]]
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    generation: int | None = None


@dataclass(frozen=True, slots=True)
class AdapterContext:
    """The services that every adapter may use, and its own `params` from the settings.

    `shared` holds by name what the adapters of one external system share; the daemon awaits each value's
    `close()` when it stops.
    """

    shell: Shell
    clock: Clock
    runner: Runs
    inventory: Callable[[], InventorySnapshot]
    settings: Any
    params: Mapping[str, JSON] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunnerContext:
    """The services that every runner may use, and its own `params` from the settings.

    The runner of a change has neither a `name` nor `params`: each run has those of its stage.

    `find_tree` returns the directory of a source or raises NotFound.  On `inherited_nodes` runs of another
    machine may be under way.  Daemons with the same `marks` end each other's leftovers.  `stale_runs` is
    None for the runner of this machine, which is it.
    """

    name: str
    shell: Shell
    clock: Clock
    inventory: Callable[[], InventorySnapshot]
    settings: Any
    find_tree: Callable[[PinnedSource], Path]
    params: Mapping[str, JSON] = field(default_factory=dict)
    machine: str = ""
    inherited_nodes: Collection[str] = ()
    marks: str = ""
    stale_runs: StaleRuns | None = None
    shared: dict[str, Any] = field(default_factory=dict)
