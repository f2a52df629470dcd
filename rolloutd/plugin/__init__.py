"""What an adapter registers: its kind, parameters, capabilities and factory.

An adapter is a package's entry point in the group of its port; the entry point's
name is the kind that plans and settings use.  The entry point loads a
`Registration`, and the module that holds it imports nothing but this package:
every `rolloutctl plan validate` loads all registrations.  The factory's module
is imported when the daemon first needs the adapter.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from itertools import combinations
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic_core import CoreSchema

from machines.model.node import NodeKind
from machines.model.plan import Capability
from rolloutd.plugin.field_types import (
    Command,
    Duration,
    FilePath,
    InvalidValue,
    LabelKey,
    Playbook,
    PositiveDuration,
    SelectorText,
    TemplateText,
    parse_duration,
)
from rolloutd.plugin.values import Values

__all__ = [
    "ABSENT",
    "ANCHORS",
    "CHANGES",
    "CHECKS",
    "GUARDS",
    "INVENTORIES",
    "ISOLATORS",
    "LOCAL_RUNNER",
    "MACHINES",
    "OBSERVERS",
    "PLAYBOOK",
    "PROBES",
    "RUNNERS",
    "SETTINGS",
    "WATCHES",
    "Capability",
    "ChangeParams",
    "CheckParams",
    "Command",
    "Duration",
    "Field",
    "FilePath",
    "GuardParams",
    "LabelKey",
    "NodeKind",
    "Params",
    "Playbook",
    "PositiveDuration",
    "Registration",
    "SelectorText",
    "SettingsSection",
    "TemplateText",
    "Values",
    "are_reversible",
    "command_parameters",
    "duration_field",
    "installed_adapters",
    "installed_sections",
]

INVENTORIES = "rolloutd.inventories"
OBSERVERS = "rolloutd.observers"
ISOLATORS = "rolloutd.isolators"
CHANGES = "rolloutd.changes"
CHECKS = "rolloutd.checks"
PROBES = "rolloutd.probes"
WATCHES = "rolloutd.watches"
ANCHORS = "rolloutd.anchors"
GUARDS = "rolloutd.guards"
RUNNERS = "rolloutd.runners"
SETTINGS = "rolloutd.settings"

PLAYBOOK = "playbook"
"""Key of a stage that runs a playbook, in the place of a kind of change."""

LOCAL_RUNNER = "local"
"""Name of the runner on the daemon's machine, of the kind of that name."""

ABSENT: Any = None
"""The default of a key that a file may omit but not set to null."""

MACHINES = frozenset({NodeKind.HOST, NodeKind.KUBERNETES})
"""The kinds of nodes that are machines, which ssh and balancers can reach."""

log = logging.getLogger(__name__)

T = TypeVar("T")


class Params(BaseModel):
    """A section of a plan or settings file: strict types, no unknown keys, immutable."""

    # Deferred: a process builds the validators of the sections that it reads, and most processes read few.
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, populate_by_name=False, defer_build=True
    )

    exclusive: ClassVar[tuple[str, ...]] = ()
    """Keys of which a file may name at most one."""

    @model_validator(mode="before")
    @classmethod
    def _require_exclusive(cls, value: Any) -> Any:
        given = [key for key in value if key in cls.exclusive] if isinstance(value, dict) else []
        if len(given) > 1:
            message = f"the section takes only one of {', '.join(cls.exclusive)}"
            found = ", ".join(given)
            raise InvalidValue(message, "only one of them", at=(given[1],), at_key=True, found=found)
        return value

    @field_validator("*")
    @classmethod
    def _require_text(cls, value: Any) -> Any:
        """A blank name or command is a mistake; a blank selector is an empty one."""
        texts = value if isinstance(value, list) else [value]
        for index, text in enumerate(texts):
            if isinstance(text, str) and text.isspace():
                at = (index,) if isinstance(value, list) else ()
                raise InvalidValue("the text is empty", "text", at=at, found="blanks only")
        return value

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        if cls.exclusive:
            pairs = [{"required": list(pair)} for pair in combinations(cls.exclusive, 2)]
            handler.resolve_ref_schema(schema)["not"] = {"anyOf": pairs}
        return schema


class ChangeParams(Params):
    """The parameters of every change."""

    @property
    def needs_commit(self) -> bool:
        """Whether it moves its nodes to the commit of the plan's source, which then must be a git ref."""
        return False

    @property
    def module(self) -> str:
        """What it moves on a node, empty if no other change waits for that."""
        return ""

    @property
    def waits_for(self) -> Collection[str]:
        """The modules that must be ready on the node first."""
        return ()


class CheckParams(Params):
    """The parameters of every check."""

    baseline: bool = Field(
        default=ABSENT,
        description="Run the check before the isolation too; if it failed then, it need not pass.",
    )
    repair: Playbook = Field(
        default=ABSENT,
        description="Playbook that is run once when the check fails on the isolated node; then the check "
        "runs again.",
    )

    in_service: bool = Field(
        default=False,
        description="Run the check after the node is back in service, not while it is isolated.",
    )

    @model_validator(mode="after")
    def _repair_needs_isolation(self) -> Self:
        if self.in_service and "repair" in self.model_fields_set:
            raise InvalidValue("a repair runs on the isolated node", "`repair` without `in_service`")
        return self


def duration_field(default: str, description: str, *, alias: str | None = None) -> Any:
    """Return the field of a duration; the schema shows its default as people write it."""
    return Field(
        default=parse_duration(default),
        description=description,
        alias=alias,
        json_schema_extra={"default": default},
    )


class GuardParams(Params):
    """The parameters of every guard."""

    after: PositiveDuration = duration_field(
        "2m", "Silence of the daemon after which the node restores itself, counted on the node."
    )


@dataclass(frozen=True, slots=True)
class Registration:
    """One adapter, as its package describes it.

    `factory` is `package.module:function`; the function takes a
    `rolloutd.ports.AdapterContext`, or a `RunnerContext` for a runner or a
    change, which is a runner too.  The
    first sentence of the docstring of `params` describes the kind in the
    schemas.  Without `params` no file may name the kind: the daemon creates the
    adapter for each source of that kind.
    `node_kinds` limits the steps of a plan to nodes of these kinds (empty: any).
    `cannot_see` says for a traffic probe which traffic it misses, as a noun phrase.
    Without a factory the kind is only a word of the plan, with its capabilities.
    """

    factory: str | None
    params: type[Params] | None = None
    capabilities: frozenset[Capability] = frozenset()
    node_kinds: frozenset[NodeKind] = frozenset()
    cannot_see: str = ""


@dataclass(frozen=True, slots=True)
class SettingsSection:
    """A section of the settings that an adapter owns: outside systems by name.

    The entry point's name is the section's key; `params` describes one system.
    The adapter reads them with `context.settings.section(KEY)`.
    """

    params: type[Params]
    description: str


def are_reversible(kinds: Iterable[str]) -> bool:
    """Return whether all these kinds of runs are changes that record what they replace."""
    changes = installed_adapters(CHANGES)
    return all(
        kind in changes and Capability.RECORDS_PREVIOUS in changes[kind].capabilities for kind in kinds
    )


@cache
def command_parameters(params: type[Params] | None) -> frozenset[str]:
    """Return the names of the parameters that are shell commands, or lists of them."""
    found = {} if params is None else params.model_json_schema()["properties"]
    formats = {
        name: (each.get("format"), each.get("items", {}).get("format")) for name, each in found.items()
    }
    return frozenset(name for name, each in formats.items() if "command" in each)


def installed_adapters(group: str) -> Mapping[str, Registration]:
    """Return the registered adapters of a port by kind, sorted."""
    return _load_entry_points(group, Registration)


def installed_sections() -> Mapping[str, SettingsSection]:
    """Return the sections of the settings that adapters own, by key, sorted."""
    return _load_entry_points(SETTINGS, SettingsSection)


@cache
def _load_entry_points(group: str, expected: type[T]) -> Mapping[str, T]:
    """Return what the entry points of a group load, by name, sorted.

    One that cannot be loaded is logged and left out: a broken package must not
    stop the daemon, and a plan that names its kind is refused.
    """
    loaded: dict[str, T] = {}
    for point in sorted(entry_points(group=group)):
        try:
            value = point.load()
        except Exception as error:  # third-party code: anything can be raised
            text = "adapter %s (%s): cannot be loaded: %r; reinstall its package"
            log.error(text, point.name, group, error, exc_info=True)
            continue
        if not isinstance(value, expected):
            log.error("adapter %s (%s): %s is not a %s", point.name, group, point.value, expected.__name__)
        elif point.name in loaded:
            log.error("adapter %s (%s): two packages register it; remove one", point.name, group)
        else:
            loaded[point.name] = value
    return loaded
