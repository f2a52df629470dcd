"""A plan as the core sees it: one change, whole, already checked and resolved.

The YAML file and its mistakes belong to rolloutd.planfile; rolloutd.compile
makes these values from a plan that has none.  All durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from machines.selector import Selector
from machines.windows import Window

DEFAULT_EXPECTED_S = 15 * 60.0
DEFAULT_TIMEOUT_S = 30 * 60.0

type_json = Any  # JSON as it was read: None, bool, int, float, str, list, dict


class Enrol(StrEnum):
    """What becomes of nodes that appear while a rollout runs."""

    AUTO = "auto"
    ASK = "ask"
    NEVER = "never"


class OnUnknown(StrEnum):
    """What to do when nobody can say how a run ended."""

    VERIFY = "verify"
    RERUN = "rerun"
    PAUSE = "pause"


class GateName(StrEnum):
    """The places where people must say yes."""

    START = "start"
    CONTINUE = "continue"
    PROCEED = "proceed"


@dataclass(frozen=True, slots=True)
class Need:
    """Who must vote at a gate: so many owners, so many of each team that owns a target."""

    owner: int = 0
    each_team: int = 0
    four_eyes: bool = False
    per_team: bool = False


@dataclass(frozen=True, slots=True)
class StepSpec:
    """One traffic probe, isolator or check of a plan: which adapter, with which parameters.

    `name` is unique within its list and readable (`isolate.0.command`,
    `verify.2.ssh`, `team.payments.0.ssh`); params are what the plan says, with
    templates such as `{{ node.name }}` not yet rendered.
    """

    name: str
    kind: str
    params: Mapping[str, type_json] = field(default_factory=dict)
    timeout_s: float = 300.0
    in_service: bool = False
    team: str | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """One playbook run of the maintaining phase."""

    name: str
    playbook: str
    variables: Mapping[str, type_json] = field(default_factory=dict)
    timeout_s: float = DEFAULT_TIMEOUT_S
    on_unknown: OnUnknown = OnUnknown.VERIFY


@dataclass(frozen=True, slots=True)
class WaveSpec:
    """A part of the targets in order; `select` None takes what earlier waves left."""

    name: str
    select: Selector | None = None
    max_parallel: int | None = None
    soak_s: float = 0.0
    gate: GateName | None = None


@dataclass(frozen=True, slots=True)
class Digest:
    """What people vote for: the hash over the hashes of change, scope and policy."""

    change: str
    scope: str
    policy: str
    whole: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One change, whole: what is done, where, by whose leave, and how it is judged."""

    name: str
    owner: str
    selector: Selector
    waves: tuple[WaveSpec, ...]
    stages: tuple[Stage, ...]
    verify: tuple[StepSpec, ...]
    traffic: tuple[StepSpec, ...] = ()
    isolate: tuple[StepSpec, ...] = ()
    rollback: Stage | None = None
    rollback_verify: tuple[StepSpec, ...] = ()
    gates: Mapping[GateName, Need] = field(default_factory=dict)
    windows: tuple[Window, ...] = ()
    max_parallel: int | None = None
    pool_keys: tuple[str, ...] = ()
    enrol: Enrol = Enrol.AUTO
    probation_s: float = 0.0
    isolate_timeout_s: float = 15 * 60.0
    expected_s: float = DEFAULT_EXPECTED_S
    vote_ttl_s: float | None = None
