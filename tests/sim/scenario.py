"""What a simulation begins with, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rolloutd.settings import Settings
from tests.sim.random_streams import Coverage
from tests.sim.sim_node import SimNode


@dataclass(slots=True)
class SimResult:
    """The result of one simulation: its violations, if any."""

    name: str
    violations: list[str]
    coverage: Coverage
    trace: list[str]
    steps: int = 0
    effects: list[str] = field(default_factory=list)
    end: dict[str, str] = field(default_factory=dict)
    """What every node has in the end, and how each of its rollouts ended for it."""


@dataclass(slots=True)
class Scenario:
    """What a simulation begins with."""

    machines: list[SimNode]
    settings: Settings
    specs: list[dict[str, Any]]
    fault_period_s: float
    action_interval_s: float = 0.0
    approve_probability: float = 0.0
    fault_probability: float = 0.0
    maybe_current: bool = False
    is_train: bool = False
    """Whether all rollouts are in one train, which people remove and make again."""
    releases: tuple[str, ...] = ()
    """Artifacts that the first plan brings in further rollouts; then its nodes are cleaned."""
