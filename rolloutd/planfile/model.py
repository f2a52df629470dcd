"""Models of the plan file: its keys, defaults, ranges and meanings.

The JSON Schema and the reference in docs/ are made from these.  A rule on several keys validates the last of
them, so that it also applies when another section is wrong.  All durations are seconds after reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from machines.model.timefmt import format_duration
from machines.model.windows import DAYS, Window, longest_opening
from rolloutd.planfile.change import Guard, MaintainStage, Rollback, module_cycles
from rolloutd.planfile.prepare import Cleanup, PrepareItem, stage_names
from rolloutd.planfile.steps import MAX_STEPS, IsolateStep, TrafficStep, VerifyStep
from rolloutd.planfile.strategy import MAX_PARALLEL, Strategy
from rolloutd.plugin import ABSENT, ChangeParams, Params, are_reversible, duration_field, field_types
from rolloutd.plugin.field_types import (
    MAX_ITEMS,
    MAX_VOTES,
    Duration,
    InvalidValue,
    PositiveDuration,
    SelectorText,
    clock_minute,
    raise_invalid,
    taken_names,
)

RESERVED_WAVES = ("canary", "fleet")

RESERVED_PREPARE_STAGES = ("cleanup",)
"""Stages of cancelled rollouts, in their records."""


class Metadata(Params):
    """What the plan is called and whose it is."""

    name: field_types.Name = Field(
        description="Name of the plan: small letters, digits, '-' and '.', at most 63."
    )
    owner: field_types.TeamName = Field(
        description="Team of the daemon's settings whose members are the owners."
    )
    ticket: field_types.TicketReference = Field(
        default=ABSENT, description="Ticket or change number; not part of the digest."
    )
    description: str = Field(
        default=ABSENT, max_length=4000, description="For people; not part of the digest."
    )


class Source(Params):
    """Where the playbooks come from: a git ref, or a directory next to the plan."""

    git: field_types.GitUrl = Field(default=ABSENT, description="URL of the repository.")
    ref: field_types.GitRef = Field(
        default=ABSENT, description="Tag, branch or commit; becomes a commit at submit."
    )
    path: str = Field(
        default=ABSENT,
        min_length=1,
        max_length=1000,
        description="Directory, relative to the plan file, at most 64 MiB.",
    )

    @model_validator(mode="after")
    def _require_git_or_path(self) -> Self:
        given = self.model_fields_set
        if {"path"} < given:
            problem = "a source is a git ref or a path, not both"
        elif not given:
            problem = "the source names neither git nor path"
        elif len(given) == 1 and "path" not in given:
            problem = f"the source lacks `{'ref' if 'git' in given else 'git'}`"
        else:
            return self
        raise InvalidValue(problem, "{git, ref}, or {path}", at_key=True)


class Canary(Params):
    """The nodes that go first."""

    select: SelectorText = Field(description="Label selector of the canaries, among the targets.")
    max_parallel: int = Field(default=1, ge=1, le=MAX_PARALLEL, description="Canaries at once.")


class Pilot(Params):
    """The node that is changed and verified before all others, or why there is none."""

    node: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        default=ABSENT, description="Name of the node, one of the targets."
    )
    waived: Annotated[str, Field(min_length=1, max_length=1000)] = Field(
        default=ABSENT, description="Why no pilot is needed; shown at the start gate."
    )

    @model_validator(mode="after")
    def _require_node_or_reason(self) -> Self:
        if len(self.model_fields_set) != 1:
            message = "a pilot is a node, or waived for a reason"
            raise InvalidValue(message, "{node}, or {waived}", at_key=True)
        return self


class Wave(Params):
    """A part of the targets, after the canaries and before the rest."""

    name: field_types.Name = Field(description="Name of the wave; `canary` and `fleet` are taken.")
    select: SelectorText = Field(description="Label selector of the wave, among the targets.")
    max_parallel: int = Field(default=ABSENT, ge=1, le=MAX_PARALLEL, description="Nodes of the wave at once.")
    soak: Duration = duration_field("0s", "Wait after the wave's last node.")
    gate: Literal["continue"] = Field(default=ABSENT, description="Ask for `continue` again after this wave.")


class WindowSpec(Params):
    """Days and hours in which a node may start."""

    days: field_types.Days = Field(
        default=["mon", "tue", "wed", "thu", "fri", "sat", "sun"],
        description="Days the window begins on.",
        json_schema_extra={"default": "mon-sun"},
    )
    from_: field_types.ClockText = Field(default="00:00", alias="from", description="First minute.")
    to: field_types.ClockText = Field(
        default="24:00", description="End; when it is not after `from`, it lies on the following day."
    )
    zone: field_types.TimeZone = Field(default="UTC", description="IANA time zone of the hours.")

    @model_validator(mode="after")
    def _require_duration(self) -> Self:
        if self.from_ == self.to:
            message = "the window ends when it begins; the whole day is 00:00 to 24:00"
            raise InvalidValue(message, "different `from` and `to`")
        return self

    def window(self) -> Window:
        """Return the window of the core."""
        return Window(
            days=frozenset(DAYS.index(day) for day in self.days),
            start_minute=clock_minute(self.from_),
            end_minute=clock_minute(self.to),
            zone=ZoneInfo(self.zone),
        )


class Prepare(Params):
    """What is done on every node before its slot, without disturbing it; a list stands for its `stages`."""

    stages: list[PrepareItem] = Field(
        min_length=1, max_length=MAX_ITEMS, description="The prepare stages, in order."
    )
    windows: list[WindowSpec] = Field(
        default=[],
        max_length=MAX_ITEMS,
        description="When nodes are prepared; from the start gate on if none is given.",
    )
    tolerate: field_types.NodeBudget = Field(
        default="10%",
        description="Nodes that may fail a stage; with more, no other node is prepared or isolated. No "
        "canary may fail.",
    )
    cleanup: Cleanup = Field(
        default=ABSENT,
        description="What removes the preparation when the rollout is cancelled; if not given, the staged "
        "artifacts are removed.",
    )

    @field_validator("stages")
    @classmethod
    def _require_own_names(cls, stages: list[PrepareItem]) -> list[PrepareItem]:
        names = stage_names([(item.kind, item.section.name) for item in stages])
        paths: list[tuple[str | int, ...]] = [
            (index, item.kind, *(("name",) if "name" in item.section.model_fields_set else ()))
            for index, item in enumerate(stages)
        ]
        raise_invalid(taken_names(zip(names, paths, strict=True), RESERVED_PREPARE_STAGES))
        return stages


class Needs(Params):
    """Who must say yes at a gate."""

    owner: int = Field(default=0, ge=0, le=MAX_VOTES, description="Votes of members of the owner team.")
    each_team: int = Field(
        default=0, ge=0, le=MAX_VOTES, description="Votes of every team that owns a target."
    )
    four_eyes: bool = Field(default=False, description="The submitter's vote does not count.")
    per_team: bool = Field(default=False, description="Each team's yes opens the gate for its own nodes.")


class Gates(Params):
    """The places where people must say yes."""

    pilot: Needs = Field(
        default=Needs(owner=1, each_team=1),
        description="Before the pilot; one owner and one of the team that owns the pilot if not given.",
    )
    start: Needs = Field(default=Needs(owner=1), description="Before the first node; one owner if not given.")
    continue_: Needs = Field(
        default=Needs(owner=1, each_team=1),
        alias="continue",
        description="After the canaries and their soak; one owner and one of each team if not given.",
    )
    proceed: Needs = Field(default=Needs(owner=1), description="After a failure; one owner if not given.")

    @field_validator("pilot", "start", "continue_", "proceed")
    @classmethod
    def _require_votes(cls, needs: Needs) -> Needs:
        if needs.owner == needs.each_team == 0:
            message = "the gate requires no vote"  # it would open at once
            raise InvalidValue(message, "owner or each_team of at least 1")
        return needs


class Pools(Params):
    """Further budgets, for this rollout only; the daemon's own pools always hold."""

    by: list[field_types.LabelKey] = Field(
        default=[], max_length=8, description="Label keys; at most one node of each value is down at once."
    )


class Limits(Params):
    """How long things may take that no other key names."""

    isolate: PositiveDuration = duration_field(
        "15m", "Limit of the isolation; after it the node returns to service and is retried later."
    )
    start: PositiveDuration = Field(
        default=ABSENT,
        description="How long a node that is unreachable is tried until its run begins; once if not given.",
    )
    votes: PositiveDuration = Field(
        default=ABSENT, description="How long a vote holds before its gate opens; for ever if not given."
    )


def _one_or_many(value: object) -> object:
    """Accept a single stage as a list of one."""
    return [value] if isinstance(value, dict) else value


def _stages_schema(schema: dict[str, Any]) -> None:
    """Let the schema accept a single stage as well as a list."""
    items = schema.pop("items")
    many = {
        "type": schema.pop("type"),
        "items": items,
        "minItems": schema.pop("minItems"),
        "maxItems": MAX_ITEMS,
    }
    schema.pop("maxItems", None)
    schema["anyOf"] = [items, many]


def _list_as_stages(value: object) -> object:
    """Accept a list of stages as a section that says nothing else."""
    return {"stages": value} if isinstance(value, list) else value


def _prepare_schema(schema: dict[str, Any]) -> None:
    """Let the schema accept the list of stages alone."""
    section = dict(schema)
    schema.clear()
    schema["description"] = section["description"]
    schema["anyOf"] = [section, section["properties"]["stages"]]


def _source_schema(schema: dict[str, Any]) -> None:
    """Make git and path exclude each other in the schema."""
    schema["anyOf"] = [
        {"required": ["git", "ref"], "not": {"required": ["path"]}},
        {"required": ["path"], "not": {"anyOf": [{"required": ["git"]}, {"required": ["ref"]}]}},
    ]


Prepare.model_config["json_schema_extra"] = _prepare_schema
Prepare.model_rebuild(force=True)
Source.model_config["json_schema_extra"] = _source_schema
Source.model_rebuild(force=True)

PrepareStages = Annotated[Prepare, BeforeValidator(_list_as_stages)]
Stages = Annotated[list[MaintainStage], BeforeValidator(_one_or_many)]


class Spec(Params):
    """What is done, where, who approves it, and which checks decide."""

    source: Source = Field(
        default=Source(path="."),
        description="Where the playbooks come from; if not given, the directory of the plan.",
    )
    targets: SelectorText = Field(description="Label selector of the nodes; an empty one means every node.")
    enrol: Literal["auto", "ask", "never"] = Field(
        default="auto", description="What becomes of matching nodes that appear while the rollout runs."
    )
    max_parallel: int = Field(
        default=ABSENT,
        ge=1,
        le=MAX_PARALLEL,
        description="Nodes of this rollout at once; the daemon's limit if not given.",
    )
    strategy: Strategy = Field(
        default=ABSENT,
        description="How many targets may be not ready at once; as `replace_all` if not given.",
    )
    pools: Pools = Field(default=Pools(), description="Further budgets for this rollout.")
    pilot: Pilot = Field(
        default=ABSENT,
        description="The node before all others, whose evidence the start gate shows; none if not given.",
    )
    canary: Canary = Field(
        default=ABSENT,
        description="The nodes that go first; if not given, each team's nominated or first node.",
    )
    soak: Duration = duration_field("0s", "Wait after the last canary.")
    waves: list[Wave] = Field(
        default=[],
        max_length=MAX_ITEMS,
        description="Parts of the fleet after the canaries, in order; then the rest.",
    )
    windows: list[WindowSpec] = Field(
        default=[], max_length=MAX_ITEMS, description="When a node may start; always if none is given."
    )
    traffic: list[TrafficStep] = Field(
        default=[],
        max_length=MAX_STEPS,
        description="How client traffic on a node is seen: a node starts only while every one of these says "
        "that there is none. If none is given, client traffic is not probed.",
    )
    idle_for: Duration = Field(
        default=ABSENT,
        description="How long all traffic probes must say idle in a row before a node starts; one probe each "
        "is enough if not given.",
    )
    poll: PositiveDuration = Field(
        default=ABSENT, description="Interval between the traffic probes of a candidate; 15s if not given."
    )
    skip_compliant: bool = Field(
        default=False,
        description="Run `maintain` in check mode on a node before it starts, and record a node that needs "
        "nothing as done, without an isolation.",
    )
    keep: bool = Field(
        default=False,
        description="Change a done node again once it has drifted; the rollout stays open for that.",
    )
    every: PositiveDuration = Field(
        default=ABSENT,
        description="Interval of the drift checks of done nodes; 1h with `keep`, else none.",
    )
    bootstrap: bool = Field(
        default=False,
        description="Change a cluster as soon as its control plane is initialised, before it is available,"
        " because its network comes from the change.",
    )
    train: bool = Field(
        default=False,
        description="Share the outage of a node with the live rollouts whose plans say so too: they form a"
        " train in the order of their submission.",
    )
    isolate: list[IsolateStep] = Field(
        default=[],
        max_length=MAX_STEPS,
        description="How a node is taken out of service, in order; undone in reverse.",
    )
    prepare: PrepareStages = Field(
        default=ABSENT,
        description="What is done on every node before its slot, everywhere at once; nothing if not given.",
    )
    maintain: Stages = Field(
        min_length=1,
        max_length=MAX_ITEMS,
        description="The change: a run of a playbook or a change of another kind, or several.",
        json_schema_extra=_stages_schema,
    )
    guard: Guard = Field(
        default=ABSENT,
        description="How a node undoes the change by itself if it cannot be reached any more; not if not "
        "given.",
    )
    rollback: Rollback = Field(
        default=ABSENT,
        description="How the change is undone on a node; changes that record what they replace need none.",
    )
    on_failure: Literal["pause", "rollback-node", "rollback-wave", "rollback-all"] = Field(
        default=ABSENT,
        description="What is rolled back without asking when a node fails: nothing (`pause`), that node, "
        "the changed nodes of its wave, or all changed nodes. The rollout pauses in any case.",
    )
    at_most: int = Field(
        default=ABSENT,
        ge=1,
        le=MAX_PARALLEL,
        description="Nodes of the rollout that `on_failure` rolls back; the others wait for people. "
        "No limit if not given.",
    )
    show_vars: list[field_types.VariableGlob] = Field(
        default=[],
        max_length=MAX_ITEMS,
        description="Names of the plan's own variables, as globs, whose values all users may see; the others"
        " are shown as keyed digests.",
    )
    verify: list[VerifyStep] = Field(
        min_length=1, max_length=MAX_STEPS, description="Checks that every node must pass, in order."
    )
    probation: Duration = duration_field("0s", "How long a node is watched in service before it is done.")
    gates: Gates = Field(default=Gates(), description="Who must say yes, and when.")
    limits: Limits = Field(default=Limits(), description="How long things may take.")

    @field_validator("waves")
    @classmethod
    def _require_own_wave_names(cls, waves: list[Wave], info: ValidationInfo) -> list[Wave]:
        pilot = info.data.get("pilot")
        taken = (*RESERVED_WAVES, *(("pilot",) if pilot is not None and pilot.node is not None else ()))
        raise_invalid(taken_names(_written_names(waves), taken))
        return waves

    @field_validator("maintain")
    @classmethod
    def _require_own_stage_names(cls, stages: list[MaintainStage]) -> list[MaintainStage]:
        raise_invalid(taken_names(_written_names(stages)))
        return stages

    @field_validator("maintain")
    @classmethod
    def _require_commit(cls, stages: list[MaintainStage], info: ValidationInfo) -> list[MaintainStage]:
        """A change that moves nodes to a commit would wait for an uploaded directory for ever."""
        source = info.data.get("source")
        if source is None or source.git is not None:
            return stages
        for index, stage in enumerate(stages):
            if isinstance(stage.section, ChangeParams) and stage.section.needs_commit:
                message = f"the change {stage.kind} needs a commit, and the source is a directory"
                raise InvalidValue(message, "`source: {git, ref}`", at=(index, stage.kind), at_key=True)
        return stages

    @field_validator("maintain")
    @classmethod
    def _require_order(cls, stages: list[MaintainStage]) -> list[MaintainStage]:
        raise_invalid(module_cycles(stages))
        return stages

    @field_validator("maintain")
    @classmethod
    def _work_fits_a_window(cls, stages: list[MaintainStage], info: ValidationInfo) -> list[MaintainStage]:
        """A node whose work fits no window would never start."""
        longest = longest_opening([each.window() for each in info.data.get("windows", ())])
        total = sum(stage.expected_s for stage in stages)
        if info.data.get("windows") and total > longest:
            raise InvalidValue(
                f"the work is expected to take {format_duration(total)} and fits no window",
                f"a window of at least {format_duration(total)}, or a shorter `maintain.expected`",
                at=("..", "windows"),
                at_key=True,
                found=f"at most {format_duration(longest)} at a time",
            )
        return stages

    @field_validator("on_failure")
    @classmethod
    def _require_rollback(cls, on_failure: str, info: ValidationInfo) -> str:
        has_rollback = info.data.get("rollback", "unreadable") is not None or are_reversible(
            stage.kind for stage in info.data.get("maintain", ())
        )
        if on_failure != "pause" and not has_rollback:
            raise InvalidValue("the plan has no rollback", "pause, or a rollback")
        return on_failure

    @field_validator("at_most")
    @classmethod
    def _require_automatic_rollback(cls, at_most: int, info: ValidationInfo) -> int:
        if info.data.get("on_failure", "unreadable") in (None, "pause"):
            message = "at_most limits what on_failure rolls back"
            raise InvalidValue(message, "only with on_failure: rollback-...", at_key=True)
        return at_most


def _written_names(items: Sequence[Wave | MaintainStage]) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """Yield the names of waves or stages that have one, with their paths."""
    return ((each.name, (index, "name")) for index, each in enumerate(items) if each.name is not None)


class PlanDocument(Params):
    """One change, whole."""

    api_version: Literal["rolloutd/v1"] = Field(alias="apiVersion", description="Version of this format.")
    kind: Literal["MaintenancePlan"] = Field(description="What the file holds.")
    metadata: Metadata = Field(description="What the plan is called and whose it is.")
    spec: Spec = Field(description="What is done, where, who approves it, and which checks decide.")
