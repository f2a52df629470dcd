"""The adapters that drivers and soaks work with, behind their ports."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rolloutd.ports import Check, Isolator, Runner, TrafficProbe


@dataclass(frozen=True, slots=True)
class Gear:
    """Adapters by kind; `tree` gives the pinned source of a rollout."""

    runner: Runner
    isolators: Mapping[str, Isolator]
    checks: Mapping[str, Check]
    tree: Callable[[str], Awaitable[Path]]
    probes: Mapping[str, TrafficProbe] = field(default_factory=dict)
