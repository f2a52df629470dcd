"""The kinds of isolators, traffic probes, checks and observers, and what each may be told.

A new kind is one model and one line in ISOLATORS, PROBES, CHECKS or OBSERVERS; the plan
file, the settings, the JSON Schema and the reference all follow.  What a kind
does is its adapter's affair and unknown here.  All durations are seconds once
they have been read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_serializer

from rolloutd.planfile.scalars import (
    Answer,
    Duration,
    Limit,
    Namespace,
    Pattern,
    Playbook,
    SelectorText,
    Templated,
    parse_duration,
)

JSON = Any


MAX_NAMESPACES = 50
"""Namespaces of one probe: each is a request per look."""

ABSENT: Any = None
"""The default of keys that may be left out but not written as null."""


def span(default: str, description: str, *, alias: str | None = None) -> Any:
    """Make the field of a duration; the schema shows its default as a person writes it."""
    return Field(
        default=parse_duration(default),
        description=description,
        alias=alias,
        json_schema_extra={"default": default},
    )


class Part(BaseModel):
    """The manners of every part of a file: nothing unknown, nothing guessed, nothing changed later."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, populate_by_name=False)


# -- isolators ----------------------------------------------------------------


class CommandIsolator(Part):
    """Takes the node out of service by shell commands on the node itself."""

    do: Templated = Field(description="Command that takes the node out of service; safe to run again.")
    undo: Templated = Field(description="Command that puts it back as it was; safe to run again.")
    look: Templated = Field(
        default=ABSENT,
        description=(
            "Command that exits 0 when the node is isolated already; where it cannot run, nothing is done. "
            "Without it `do` just runs."
        ),
    )
    timeout: Limit = span("5m", "Limit of each command.")


class PlaybookIsolator(Part):
    """Takes the node out of service by a playbook of the source."""

    file: Playbook = Field(description="Playbook that takes the node out of service; idempotent.")
    undo: Playbook = Field(description="Playbook that puts it back as it was; idempotent.")
    timeout: Limit = span("15m", "Limit of each playbook.")


class KubernetesIsolator(Part):
    """Takes a Kubernetes node out of service: cordons and drains it, and uncordons it again."""

    drain_timeout: Limit = Field(
        default=ABSENT,
        description="Until all pods are gone that have to go; then the node is put back and tried later. "
        "`limits.isolate` if not given.",
    )
    pods_with_local_storage: Literal["refuse", "delete"] = Field(
        default="refuse",
        description="Pods whose emptyDir volumes are lost with them: refuse the node, or evict them.",
    )
    pods_without_controller: Literal["refuse", "delete"] = Field(
        default="refuse", description="Pods that nobody starts again: refuse the node, or evict them."
    )
    timeout: Limit = span("1m", "Limit of one try; pods that are left are asked to go again in the next.")


# -- checks -------------------------------------------------------------------


class Check(Part):
    """What every check may be told."""

    in_service: bool = Field(
        default=False, description="Judge after the node was put back into service, not while it is isolated."
    )


class ReachableCheck(Check):
    """The node answers over SSH."""

    within: Duration = span("5m", "How long the node may take until it answers; 0s asks once.")


def _exit_zero(value: object) -> object:
    """Judge by exit status 0 where the plan names no other judgement."""
    if isinstance(value, dict) and not {"equals", "matches", "exit"} & value.keys():
        return {**value, "exit": 0}
    return value


class SshCheck(Check):
    """A command on the node ends, or answers, as it should."""

    model_config = ConfigDict(
        json_schema_extra={
            "not": {
                "anyOf": [
                    {"required": ["equals", "matches"]},
                    {"required": ["equals", "exit"]},
                    {"required": ["matches", "exit"]},
                ]
            }
        }
    )

    run: Templated = Field(description="Shell command, run on the node.")
    equals: Answer = Field(
        default=ABSENT, description="The command exits 0 and prints exactly this, blanks at both ends aside."
    )
    matches: Pattern = Field(
        default=ABSENT,
        description="The command exits 0 and this regular expression is found in what it prints.",
    )
    exit: int = Field(
        default=ABSENT,
        ge=0,
        le=255,
        description="The command ends with this status; 0 where none of the three is given.",
    )
    within: Duration = span("0s", "How long the answer may take to become right; 0s judges once.")
    timeout: Limit = span("1m", "Limit of one try.")


class KubernetesCheck(Check):
    """The node is Ready in its cluster, and the pods that belong on it are there and Ready."""

    ready: bool = Field(default=True, description="The node's Ready condition is true.")
    daemonsets_ready: bool = Field(
        default=False,
        description="Every DaemonSet's pod that was there before the isolation is there and Ready again.",
    )
    pods_ready: SelectorText = Field(
        default=ABSENT,
        description="The node's pods with these labels are Ready, and there is at least one.",
    )
    within: Duration = span("5m", "How long all this may take; 0s judges once.")
    timeout: Limit = span("30s", "Limit of one try.")


# -- traffic probes -----------------------------------------------------------


class KubernetesProbe(Part):
    """Workload is traffic: pods with these labels that run on the node make it busy."""

    pods: SelectorText = Field(
        min_length=1,
        description="Label selector of the pods that count: each that is bound to the node and has not "
        "finished. Pods of DaemonSets and static pods never count.",
    )
    namespaces: list[Namespace] = Field(
        default=ABSENT,
        min_length=1,
        max_length=MAX_NAMESPACES,
        description="Only pods of these namespaces count; of all if not given.",
    )
    timeout: Limit = span("10s", "Limit of one look; what is not known by then is unknown.")


# -- observers ----------------------------------------------------------------


class ReachableObserver(Part):
    """Sees a node as up when it answers over SSH."""


# -- the registries -----------------------------------------------------------

ISOLATORS: dict[str, type[Part]] = {
    "command": CommandIsolator,
    "kubernetes": KubernetesIsolator,
    "playbook": PlaybookIsolator,
}
CHECKS: dict[str, Any] = {
    "kubernetes": KubernetesCheck,
    "reachable": ReachableCheck,
    "ssh": Annotated[SshCheck, BeforeValidator(_exit_zero)],
}
PROBES: dict[str, type[Part]] = {"kubernetes": KubernetesProbe}
OBSERVERS: dict[str, type[Part]] = {"reachable": ReachableObserver}

LATER: dict[str, tuple[str, ...]] = {
    "isolate": ("haproxy",),
    "traffic": ("prometheus", "ssh"),
    "verify": ("haproxy", "prometheus"),
    "observe": ("kubernetes", "prometheus"),
    "inventory": ("netbox",),
}
"""Kinds of the design that this version does not have, by the list they would stand in."""


def reserved_kinds(path: str, kinds: tuple[str, ...]) -> dict[str, str]:
    """Return what to say where a kind of a later version stands, by dotted path."""
    return {f"{path}.{kind}": f"`{kind}` is not available in this version" for kind in kinds}


class Step(Part):
    """One mapping with one key: the kind, and under it what the kind is told."""

    @property
    def kind(self) -> str:
        """The one key."""
        return next(iter(self.model_fields_set))

    @property
    def params(self) -> dict[str, JSON]:
        """What the kind is told, defaults filled in, durations in seconds."""
        part: BaseModel = getattr(self, self.kind)
        return part.model_dump(mode="json", by_alias=True, exclude_none=True)

    def items(self) -> Iterator[tuple[str, dict[str, JSON]]]:
        """Yield the kind and what it is told."""
        yield self.kind, self.params

    @model_serializer(mode="plain")
    def content(self) -> dict[str, JSON]:
        """Return the step as it is stored and hashed."""
        return {self.kind: self.params}


def step_model(name: str, doc: str, kinds: dict[str, Any]) -> type[Step]:
    """Make the model of a mapping that must have exactly one of the kinds as its key."""
    fields: dict[str, Any] = {
        kind: (model, Field(default=None, description=_first_sentence(model)))
        for kind, model in kinds.items()
    }
    model = create_model(name, __base__=Step, __doc__=doc, **fields)
    model.model_config["json_schema_extra"] = {"minProperties": 1, "maxProperties": 1}
    model.model_rebuild(force=True)
    return model


def _first_sentence(model: Any) -> str:
    doc: str = getattr(model, "__origin__", model).__doc__ or ""
    return doc.split("\n")[0]


if TYPE_CHECKING:
    IsolateStep = Step
    TrafficStep = Step
    VerifyStep = Step
    ObserveStep = Step
else:
    IsolateStep = step_model("IsolateStep", "One way to take the node out of service.", ISOLATORS)
    TrafficStep = step_model("TrafficStep", "One way to see whether client traffic runs on a node.", PROBES)
    VerifyStep = step_model("VerifyStep", "One check that the node must pass.", CHECKS)
    ObserveStep = step_model("ObserveStep", "One way to see whether a node is up.", OBSERVERS)
