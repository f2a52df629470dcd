"""What the daemon asks the forecast's process for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machines.model.events import Event
from machines.model.limits import Limits
from machines.model.rollout import Rollout, Target
from rolloutd.ports import PostgresqlAddress, RunLoad

DEFAULT_DRAWS = 200
"""Draws of a forecast: the 90th percentile of so many is off by some 2 % of the draws."""

MAX_DRAWS = 2_000
"""Most draws: ten times as many are hardly better, and take ten times as long."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Changes to try; all at once.

    `limits` are those of the changed settings, None without a change there.  `plan` are changes of the plan
    as (path, value), such as (("soak",), "30m").  `freezes` are `SCOPE:WHEN`.  `at` is when the rollout goes
    on (epoch seconds).
    """

    limits: Limits | None = None
    plan: tuple[tuple[tuple[str, ...], Any], ...] = ()
    freezes: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()
    at: float | None = None

    def __bool__(self) -> bool:
        changes = (self.limits, self.at)
        is_changed = any(change is not None for change in changes)
        return is_changed or bool(self.plan or self.freezes or self.without or self.failing)


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan that is not submitted: the rollout that it would open, and its canonical content.

    `train` are the events by which its submit makes or changes a train.
    """

    rollout: Rollout
    targets: tuple[Target, ...]
    content: Mapping[str, Any]
    train: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class TeamChecks:
    """A team's own checks, as plans are compiled with them."""

    checks: Sequence[Mapping[str, Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class ForecastRequest:
    """One question to the forecast's process; it is pickled, because both are this program.

    The fields up to `host_class` are what the settings say.  `rollouts` are those to answer about, empty for
    all that are open.  `not_up` are the nodes that are not known to be up.
    `parallel_runs` is how many runs the runner executes at once, `run_load` what they need of its machine,
    `run_starts` when those of nodes at work began (epoch seconds, by rollout and node).
    `approve_after_s` None: no gate gets its votes.  `failure_rate` None: the rate that the plan's rollouts
    have had.
    """

    state_dir: Path
    postgresql: PostgresqlAddress | None
    limits: Limits
    teams: Mapping[str, TeamChecks]
    host_class: tuple[str, ...]
    now: float
    parallel_runs: int
    run_load: RunLoad | None
    run_starts: Mapping[tuple[str, str], float]
    rollouts: tuple[str, ...] = ()
    draft: Draft | None = None
    not_up: frozenset[str] = frozenset()
    draws: int = DEFAULT_DRAWS
    seed: int = 0
    approve_after_s: float | None = 0.0
    failure_rate: float | None = None
    what_if: WhatIf = WhatIf()
