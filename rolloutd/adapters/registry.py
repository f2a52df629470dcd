"""Creation of installed adapters, each when it is first needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pkgutil import resolve_name
from typing import Any

from rolloutd.errors import RolloutdError
from rolloutd.plugin import installed_adapters
from rolloutd.ports import AdapterContext, RunnerContext


class AdapterNotFound(RolloutdError):
    """No adapter of that kind is installed."""


class AdapterRegistry(Mapping[str, Any]):
    def __init__(self, group: str, context: AdapterContext | RunnerContext) -> None:
        self._group = group
        self._context = context
        self._instances: dict[str, Any] = {}

    def __getitem__(self, kind: str) -> Any:
        if kind not in self._instances:
            self._instances[kind] = create_adapter(self._group, kind, self._context)
        return self._instances[kind]

    def __contains__(self, kind: object) -> bool:
        return kind in installed_adapters(self._group)

    def __iter__(self) -> Iterator[str]:
        return iter(installed_adapters(self._group))

    def __len__(self) -> int:
        return len(installed_adapters(self._group))


def create_adapter(group: str, kind: str, context: AdapterContext | RunnerContext) -> Any:
    """Return a new adapter or runner; raises AdapterNotFound, which names those that are installed."""
    registrations = installed_adapters(group)
    if kind not in registrations:
        known = ", ".join(registrations) or "none"
        raise AdapterNotFound(
            f"adapter {kind} ({group}): not installed; install its package and restart rolloutd"
            f" (installed: {known})"
        )
    factory = registrations[kind].factory
    if factory is None:
        raise AdapterNotFound(
            f"adapter {kind} ({group}): a word of the plan, not an adapter; nothing calls it"
        )
    return resolve_name(factory)(context)
