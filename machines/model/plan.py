"""A valid, resolved plan as values.

It knows no YAML: rolloutd.planfile validates the file, rolloutd.settings.compile makes these values.
All durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from machines.model.node import NodeKind
from machines.model.preparation import PrepareStage
from machines.model.selector import Selector
from machines.model.windows import Window

DEFAULT_EXPECTED_S = 15 * 60.0
DEFAULT_DRIFT_EVERY_S = 3600.0
"""Interval of the drift checks of a plan that keeps its change: each is a run on every node."""

DEFAULT_POLL_S = 15.0
"""Interval between probes of a candidate: a long request takes some seconds."""

DEFAULT_TIMEOUT_S = 30 * 60.0

JsonValue = Any  # JSON as it was read: None, bool, int, float, str, list, dict

RUN_PREFIX = "run."
"""Stands in the ids of steps before the name of a stage that is run."""

PLAYBOOK_RUN: Final = ""
"""The kind of a run of a playbook: it has none, because kinds are those of changes."""


class EnrolPolicy(StrEnum):
    """What happens to nodes that appear while a rollout runs."""

    AUTO = "auto"
    ASK = "ask"
    NEVER = "never"


class OnUnknownPolicy(StrEnum):
    """What to do when the result of a run is unknown."""

    VERIFY = "verify"
    RERUN = "rerun"
    PAUSE = "pause"


class OnFailure(StrEnum):
    """What is rolled back without asking when a node fails; the rollout pauses in any case."""

    PAUSE = "pause"
    ROLLBACK_NODE = "rollback-node"
    ROLLBACK_WAVE = "rollback-wave"
    ROLLBACK_ALL = "rollback-all"


class GateName(StrEnum):
    PILOT = "pilot"
    START = "start"
    CONTINUE = "continue"
    PROCEED = "proceed"


ADMINS: Final = "@admins"
"""Stands among the teams of a vote that an admin gave as an admin; no team has such a name."""


@dataclass(frozen=True, slots=True)
class VoteRequirement:
    """Votes that a gate needs: from owners, each team with a target, and admins who are other people."""

    owner: int = 0
    each_team: int = 0
    four_eyes: bool = False
    per_team: bool = False
    admin: int = 0


class Capability(StrEnum):
    """What an adapter can do beyond its port, so that the core decides without knowing adapters."""

    CORDON_ONLY = "cordon-only"
    """An isolator that can keep new work away without driving running work off."""
    DRY_RUN = "dry-run"
    """An isolator that can say beforehand, changing nothing, whether a node could be isolated."""
    JUDGES_LIVENESS = "judges-liveness"
    """A check that holds whatever change the node carries, and so after a rollback too."""
    STARTS_RUN = "starts-run"
    """An isolator or a check that is a run, so that it waits for one of the runner's slots.

    A check's run is named by the step's key: it outlives the daemon, and a user can stop it.
    """
    STAYS_IN_SERVICE = "stays-in-service"
    """An isolator that is only the plan's word that a node needs no isolation."""
    PROGRESS_REPORTS = "progress-reports"
    """An isolator that shows in its own system what happens to a node."""
    RECORDS_PREVIOUS = "records-previous"
    """A change that records what it replaces, so that its rollback needs no playbook."""


@dataclass(frozen=True, slots=True)
class StepDef:
    """One traffic probe, isolator or check of a plan.

    `name` is unique in its list (`isolate.0.command`, `team.payments.0.ssh`).  Templates in `params`, such as
    `{{ node.name }}`, are not yet rendered.  `where` and `node_kinds` (empty: any) limit the nodes that it is
    for (target_plan.py).  Of a check, `baseline`: it also runs before the isolation, and need not pass if it
    failed then; `repair`: the playbook that is run once when it fails; `accepts_unknown`: a result that stays
    unknown passes.  Of an isolator, `drain_timeout_s`: its limit of isolating, None for the plan's.
    `commands`: the parameters that are shell commands.
    """

    name: str
    kind: str
    params: Mapping[str, JsonValue] = field(default_factory=dict)
    timeout_s: float = 300.0
    in_service: bool = False
    team: str | None = None
    capabilities: frozenset[Capability] = frozenset()
    where: Selector | None = None
    node_kinds: frozenset[NodeKind] = frozenset()
    baseline: bool = False
    repair: str = ""
    accepts_unknown: bool = False
    drain_timeout_s: float | None = None
    commands: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class MaintainStage:
    """One run on a node: a playbook, or a change of another kind, which has `params` and no playbook.

    `node_kinds` (empty: any) limits the nodes that it can change.  `undoes` is the step whose recorded state
    before it a rollback restores, empty for every other stage.
    """

    name: str
    playbook: str = ""
    variables: Mapping[str, JsonValue] = field(default_factory=dict)
    timeout_s: float = DEFAULT_TIMEOUT_S
    on_unknown: OnUnknownPolicy = OnUnknownPolicy.VERIFY
    kind: str = PLAYBOOK_RUN
    params: Mapping[str, JsonValue] = field(default_factory=dict)
    node_kinds: frozenset[NodeKind] = frozenset()
    undoes: str = ""

    @property
    def step(self) -> str:
        """Name under which the runs of this stage are recorded."""
        return f"{RUN_PREFIX}{self.name}"


@dataclass(frozen=True, slots=True)
class Guard:
    """A dead-man's switch: the node restores itself unless the daemon disarms it.

    `step` has the parameters of the node's part, with templates that are not yet rendered.  `after_s`: how
    long the node waits without a word from the daemon.  `confirm`: the checks before the guard is disarmed.
    """

    step: StepDef
    after_s: float
    confirm: tuple[StepDef, ...]


@dataclass(frozen=True, slots=True)
class WaveDef:
    """A part of the targets; `select` None takes what earlier waves left."""

    name: str
    select: Selector | None = None
    max_parallel: int | None = None
    soak_s: float = 0.0
    gate: GateName | None = None


PILOT_WAVE: Final = "pilot"
"""The wave of the pilot node, before all others; only a plan with a pilot has it."""


@dataclass(frozen=True, slots=True)
class Pilot:
    """The node that is changed and verified before all others; a waived one has a reason and no node."""

    node: str | None = None
    waived: str = ""


@dataclass(frozen=True, slots=True)
class Digest:
    """What people vote for: the hash over the hashes of change, scope and policy."""

    change: str
    scope: str
    policy: str
    whole: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One change: what is done, where, with whose approval, and how it is judged.

    A node starts once its traffic probes, each `poll_s`, have said idle for `idle_for_s` in a row.
    `rollback` has the stages that undo the change, in order, none if a plan has no rollback.
    `fallback_verify` judges a node that was rolled back if nothing in `rollback_verify` applies to it.
    With `skip_compliant` check mode decides before a node's first start whether it needs the change.
    After a failure at most `at_most` nodes of the rollout are rolled back as `on_failure` says, None: all.
    A node that cannot be reached before its run has begun is tried for `start_timeout_s`, None: once.
    With `drift_every_s` the rollout stays open and its done nodes are checked for drift that often; with
    `keep` a drifted one is changed again.  `prepare` runs on nodes in service, before their slots, inside
    `prepare_windows` if there are any; `prepare_cleanup` None removes staged artifacts.
    At most `max_unready` of its targets may be in flight, failed, or not ready after their change; None: any.
    With `bootstrap` a cluster that is not available yet starts too.  `values` are those of the targets at the
    submission, by node, step and name.  `shown_variables` are globs of the plan's variables whose values all
    users may see.  `joins_train`: at its submission the rollout joins the train of the live
    rollouts that say so too and share nodes with it.
    """

    name: str
    owner: str
    selector: Selector
    waves: tuple[WaveDef, ...]
    stages: tuple[MaintainStage, ...]
    verify: tuple[StepDef, ...]
    traffic: tuple[StepDef, ...] = ()
    isolate: tuple[StepDef, ...] = ()
    rollback: tuple[MaintainStage, ...] = ()
    rollback_verify: tuple[StepDef, ...] = ()
    on_failure: OnFailure = OnFailure.PAUSE
    at_most: int | None = None
    start_timeout_s: float | None = None
    fallback_verify: tuple[StepDef, ...] = ()
    gates: Mapping[GateName, VoteRequirement] = field(default_factory=dict)
    windows: tuple[Window, ...] = ()
    idle_for_s: float = 0.0
    poll_s: float = DEFAULT_POLL_S
    max_parallel: int | None = None
    pool_keys: tuple[str, ...] = ()
    enrol: EnrolPolicy = EnrolPolicy.AUTO
    probation_s: float = 0.0
    isolate_timeout_s: float = 15 * 60.0
    expected_s: float = DEFAULT_EXPECTED_S
    vote_ttl_s: float | None = None
    pilot: Pilot | None = None
    guard: Guard | None = None
    skip_compliant: bool = False
    keep: bool = False
    drift_every_s: float | None = None
    joins_train: bool = False
    prepare: tuple[PrepareStage, ...] = ()
    prepare_windows: tuple[Window, ...] = ()
    prepare_cleanup: MaintainStage | None = None
    shown_variables: tuple[str, ...] = ()
    bootstrap: bool = False
    max_unready: int | None = None
    values: Mapping[str, Mapping[str, Mapping[str, JsonValue]]] = field(default_factory=dict)
    run_kinds: frozenset[str] = field(init=False, repr=False, compare=False)
    """The kinds of all its runs, each of which needs its runner."""

    def __post_init__(self) -> None:
        kinds = {stage.kind for stage in (*self.stages, *self.rollback)}
        steps = (*self.isolate, *self.verify, *self.rollback_verify)
        if any(Capability.STARTS_RUN in step.capabilities or step.repair for step in steps):
            kinds.add(PLAYBOOK_RUN)
        object.__setattr__(self, "run_kinds", frozenset(kinds))

    @property
    def pilot_node(self) -> str | None:
        return None if self.pilot is None else self.pilot.node

    @property
    def entry_gate(self) -> GateName:
        """The gate before the first wave."""
        return GateName.START if self.pilot_node is None else GateName.PILOT

    @property
    def gates_in_order(self) -> tuple[tuple[GateName, str], ...]:
        """The gates that open once, each with the wave that distinguishes several."""
        entry = ((self.entry_gate, ""),)
        after_waves = ((w.gate, w.name if w.gate is GateName.CONTINUE else "") for w in self.waves if w.gate)
        return (*entry, *after_waves)
