"""Registration of the change `flux`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Self

from pydantic import model_validator

from rolloutd.plugin import (
    ABSENT,
    Capability,
    ChangeParams,
    Duration,
    Field,
    NodeKind,
    Params,
    PositiveDuration,
    Registration,
    TemplateText,
    Values,
    duration_field,
)
from rolloutd.plugin.field_types import InvalidValue

MAX_DEPENDENCIES = 50

Text = Annotated[str, Field(min_length=1, max_length=1000)]


class OciSource(Params):
    """An artifact of a registry, pinned by its digest."""

    url: Annotated[str, Field(pattern=r"^oci://.", max_length=1000)] = Field(
        description="Repository of the artifact, `oci://...`, without a tag."
    )
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")] = Field(
        description="Digest of the artifact."
    )


class Creation(Params):
    """The fields of an object that the change creates and keeps; without them it must exist."""

    path: Text = Field(default="./", description="Path in the source; for a Kustomization.")
    interval: PositiveDuration = duration_field("10m", "How often the controller reconciles by itself.")
    prune: bool = Field(default=True, description="Whether the controller removes what the source drops.")
    wait: bool = Field(default=True, description="Whether the objects of the source must become healthy.")
    health_timeout: PositiveDuration = duration_field(
        "5m", "Limit of the controller's health check; a rollback may wait for it."
    )
    kubeconfig: TemplateText = Field(
        default=ABSENT,
        description="Secret with the target's kubeconfig; Cluster API's `NAME-kubeconfig` if not given.",
    )
    depends_on: list[TemplateText] = Field(
        default=[],
        max_length=MAX_DEPENDENCIES,
        description="Modules of the same cluster that must be ready first, by the names of their objects.",
    )


class FluxParams(ChangeParams):
    """Moves a module of a cluster to a pinned source: a Kustomization to the plan's, or a HelmRelease."""

    exclusive = ("kustomization", "helm_release")

    kustomization: TemplateText = Field(
        default=ABSENT, description="Name of the Kustomization, such as `{{ node.name }}-apps`."
    )
    helm_release: TemplateText = Field(
        default=ABSENT, description="Name of the HelmRelease, whose chart is in `oci` or at `chart`."
    )
    namespace: TemplateText = Field(
        default=ABSENT, description="Namespace of the object; that of the cluster's own object if not given."
    )
    oci: OciSource = Field(
        default=ABSENT, description="The pinned artifact; the plan's commit of its git source if not given."
    )
    chart: Text = Field(
        default=ABSENT, description="Path of a HelmRelease's chart in the plan's git source, without `oci`."
    )
    source_secret: Text = Field(
        default=ABSENT, description="Secret in the same namespace by which the source is fetched."
    )
    values: Values = Field(default={}, description="Values of each cluster, resolved for each at submit.")
    failing_for: Duration = duration_field(
        "2m", "How long a failure is shown before it counts: the controller tries again by itself."
    )
    create: Creation = Field(
        default=ABSENT, description="Create the object if it is missing; it must exist if not given."
    )

    @property
    def needs_commit(self) -> bool:
        return "oci" not in self.model_fields_set

    @property
    def module(self) -> str:
        return self._ref(str(self.kustomization if self._is_kustomization else self.helm_release))

    @property
    def waits_for(self) -> Collection[str]:
        names = self.create.depends_on if "create" in self.model_fields_set else ()
        return [self._ref(name) for name in names]

    def _ref(self, name: str) -> str:
        """Return how an object of the same kind and namespace is named, as Flux resolves a dependency."""
        namespace = f"{self.namespace}/" if "namespace" in self.model_fields_set else ""
        return f"{'Kustomization' if self._is_kustomization else 'HelmRelease'} {namespace}{name}"

    @property
    def _is_kustomization(self) -> bool:
        return "kustomization" in self.model_fields_set

    @model_validator(mode="after")
    def _require_module(self) -> Self:
        given = self.model_fields_set
        if given.isdisjoint(self.exclusive):
            raise InvalidValue("the change names no module", "`kustomization` or `helm_release`")
        if "helm_release" in given and len(given & {"oci", "chart"}) != 1:
            raise InvalidValue(
                "the chart of a HelmRelease has not one source", "`oci` with a digest, or `chart`"
            )
        if "kustomization" in given and "chart" in given:
            raise InvalidValue("a Kustomization has no chart", "`create` with a path")
        return self


CHANGE = Registration(
    "rolloutd.adapters.flux.runner:FluxRunner",
    FluxParams,
    frozenset({Capability.RECORDS_PREVIOUS}),
    node_kinds=frozenset({NodeKind.CLUSTER}),
)
