"""Models of a plan's prepare stages: their keys, defaults, ranges and meanings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_serializer

from rolloutd.plugin import ABSENT, Params, SelectorText, duration_field, field_types
from rolloutd.plugin.field_types import InvalidValue, Playbook, PositiveDuration, check_template

MAX_PREPARE_PARALLEL = 10_000
"""Nodes at once: the largest fleet the daemon is measured with."""

MAX_MAY_CHANGE = 200
"""Globs of one stage; a reviewer reads each of them."""

DEFAULT_MANIFEST = "artifacts.yml"
DEFAULT_CACHE = "/var/cache/rolloutd"

Variables = dict[field_types.VariableName, Any]


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


def default_stage_name(kind: str, number: int, count: int) -> str:
    """Return the name of the stage that is the `number`th of the `count` of its kind."""
    return kind if count == 1 else f"{kind}-{number}"


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


class PrepareItem(Params):
    """One prepare stage: a mapping whose one key is its kind."""

    build: Build = Field(default=ABSENT, description="Make the artifacts, once for the whole rollout.")
    stage: StageArtifacts = Field(default=ABSENT, description="Bring the artifacts to each node.")
    install: Install = Field(default=ABSENT, description="Run a playbook on each node in service.")

    @model_serializer(mode="plain")
    def content(self) -> dict[str, Any]:
        return {
            kind: getattr(self, kind).model_dump(mode="json", by_alias=True)
            for kind in type(self).model_fields
            if getattr(self, kind) is not None
        }


PrepareItem.model_config["json_schema_extra"] = {"minProperties": 1, "maxProperties": 1}
PrepareItem.model_rebuild(force=True)
