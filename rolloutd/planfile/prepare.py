"""Models of a plan's prepare stages: their keys, defaults, ranges and meanings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_serializer, model_validator

from rolloutd.plugin import ABSENT, Params, SelectorText, duration_field, field_types
from rolloutd.plugin.field_types import InvalidValue, Playbook, PositiveDuration, check_template

MAX_PREPARE_PARALLEL = 10_000
"""Nodes at once: the largest fleet the daemon is measured with."""

MAX_MAY_CHANGE = 200
"""Globs of one stage; a reviewer reads each of them."""

DEFAULT_MANIFEST = "artifacts.yml"
DEFAULT_CACHE = "/var/cache/rolloutd"

Variables = Annotated[dict[field_types.VariableName, Any], Field(json_schema_extra={"format": "variables"})]
"""Extra variables of a run; people see the values of allowed names only."""


def _require_source_path(text: str) -> str:
    if text.startswith("-") or not {"", ".."}.isdisjoint(text.split("/")):
        raise InvalidValue("this path leaves the source", "a path inside the source, such as artifacts.yml")
    return text


def _require_absolute_path(text: str) -> str:
    if not text.startswith("/") or not {"", "..", "."}.isdisjoint(text[1:].split("/")):
        raise InvalidValue("this is not an absolute path", "a directory such as /var/cache/rolloutd")
    return check_template(text)


SourcePath = Annotated[str, Field(min_length=1, max_length=512), AfterValidator(_require_source_path)]
AbsolutePath = Annotated[str, Field(min_length=2, max_length=512), AfterValidator(_require_absolute_path)]
Glob = Annotated[str, Field(min_length=1, max_length=253)]


def stage_names(stages: Sequence[tuple[str, str | None]]) -> list[str]:
    """Return the names of stages, given as kind and name; one without a name has its kind's, and a number."""
    counts, seen = Counter(kind for kind, _ in stages), Counter[str]()
    names = []
    for kind, name in stages:
        seen[kind] += 1
        names.append(name or (kind if counts[kind] == 1 else f"{kind}-{seen[kind]}"))
    return names


class OneKind(Params):
    """A mapping whose one key, besides `common_keys`, is its kind."""

    common_keys: ClassVar[frozenset[str]] = frozenset()

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    @model_validator(mode="before")
    @classmethod
    def _require_one_kind(cls, value: Any) -> Any:
        names = {name: field.alias or name for name, field in cls.model_fields.items()}
        kinds = [name for name in names.values() if name not in cls.common_keys]
        given = [key for key in value if key in kinds] if isinstance(value, dict) else []
        allowed = "one of: " + ", ".join(kinds)
        if len(given) > 1:
            message, found = "an item has one kind; begin another item with `- `", ", ".join(given)
            raise InvalidValue(message, allowed, at=(given[1],), at_key=True, found=found)
        if isinstance(value, dict) and value.keys() <= cls.common_keys:
            found = ", ".join(value) or "an empty mapping"
            raise InvalidValue("the item names no kind", allowed, found=found)
        return value

    @property
    def kind(self) -> str:
        return type(self).model_fields[self._kind_field].alias or self._kind_field

    @property
    def section(self) -> Any:
        """The parameters of the kind."""
        return getattr(self, self._kind_field)

    @property
    def _kind_field(self) -> str:
        return next(name for name in self.model_fields_set if name not in self.common_keys)


class _PrepareStage(Params):
    name: field_types.Name = Field(
        default=ABSENT,
        description="Name of the stage; its kind if not given, or `KIND-N` if several have that kind.",
    )
    vars: Variables = Field(
        default={},
        description="Extra variables of the run; Ansible renders templates in them, rolloutd does not.",
    )
    timeout: PositiveDuration = duration_field("30m", "Limit of the stage on one node.")


class _NodeStage(_PrepareStage):
    where: SelectorText = Field(
        default=ABSENT,
        description="Label selector of the nodes that the stage is for; the key `kind` is the node's kind. "
        "All nodes if not given.",
    )
    tolerate: field_types.NodeBudget = Field(
        default=ABSENT,
        description="Nodes that may fail this stage; `prepare.tolerate` if not given.",
    )
    may_change: list[Glob] = Field(
        default=[],
        max_length=MAX_MAY_CHANGE,
        description='What may change on a node, as globs such as "unit/app.service" or "port/8080".',
    )


class Build(_PrepareStage):
    """Make the artifacts and their manifest, once for the whole rollout."""

    playbook: Playbook = Field(description="Playbook, a path inside the source.")
    host: str = Field(
        default=ABSENT,
        min_length=1,
        max_length=253,
        description="Node of the inventory that builds; the daemon's machine if not given.",
    )
    manifest: SourcePath = Field(
        default=DEFAULT_MANIFEST,
        description="File name of the manifest; the playbook writes it to the path in the variable "
        "`rolloutd_manifest`.",
    )


class StageArtifacts(_NodeStage):
    """Bring a manifest's artifacts to the nodes that its selectors name."""

    manifest: SourcePath = Field(
        default=DEFAULT_MANIFEST, description="Manifest, a path inside the source or that of a build."
    )
    to: AbsolutePath = Field(
        default=DEFAULT_CACHE,
        description="Directory on the node; may name labels, as in `/srv/{{ node.labels.site }}`.",
    )
    method: Literal["ssh", "url", "playbook"] = Field(
        default="ssh",
        description="Over the node's ssh, fetched by the node from its URL, or by your playbook.",
    )
    url: str = Field(
        default=ABSENT,
        min_length=1,
        max_length=2000,
        description="Base URL of artifacts without one, for `method: url`; may name labels, as in "
        "`https://mirror.{{ node.labels.site }}.example`.",
    )
    playbook: Playbook = Field(default=ABSENT, description="Playbook of `method: playbook`.")
    rate: field_types.Rate = Field(
        default=ABSENT, description="Bytes a second of this stage, all nodes together; no limit if not given."
    )
    rate_by: field_types.LabelKey = Field(
        default=ABSENT, description="Label key; the rate then holds for the nodes of each of its values."
    )
    max_parallel: int = Field(default=100, ge=1, le=MAX_PREPARE_PARALLEL, description="Nodes at once.")

    @model_validator(mode="after")
    def _method_fits_playbook(self) -> Self:
        has_playbook = "playbook" in self.model_fields_set
        if self.method == "playbook" and not has_playbook:
            raise InvalidValue("`method: playbook` names no playbook", "a `playbook` too", at=("method",))
        if self.method != "playbook" and has_playbook:
            message = "only `method: playbook` runs a playbook"
            raise InvalidValue(message, "`method: playbook`", at=("playbook",))
        return self


class Install(_NodeStage):
    """Run a playbook on nodes in service; it must not disturb them."""

    playbook: Playbook = Field(description="Playbook, a path inside the source.")
    max_parallel: int = Field(
        default=50, ge=1, le=MAX_PREPARE_PARALLEL, description="Nodes at once, after the first canary."
    )


class Cleanup(Params):
    """The playbook that removes the preparation of a cancelled rollout."""

    playbook: Playbook = Field(description="Playbook, a path inside the source.")
    vars: Variables = Field(default={}, description="Extra variables of the run.")
    timeout: PositiveDuration = duration_field("30m", "Limit of the run.")


class PrepareItem(OneKind):
    """One prepare stage: a mapping whose one key is its kind."""

    build: Build = Field(default=ABSENT, description="Make the artifacts, once for the whole rollout.")
    stage: StageArtifacts = Field(default=ABSENT, description="Bring the artifacts to each node.")
    install: Install = Field(default=ABSENT, description="Run a playbook on each node in service.")

    @model_serializer(mode="plain")
    def content(self) -> dict[str, Any]:
        return {self.kind: self.section.model_dump(mode="json", by_alias=True)}
