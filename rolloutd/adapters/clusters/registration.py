"""Registrations of the inventories of whole clusters."""

from __future__ import annotations

from typing import Annotated

from rolloutd.plugin import (
    ABSENT,
    Capability,
    CheckParams,
    Duration,
    Field,
    FilePath,
    LabelKey,
    NodeKind,
    Params,
    PositiveDuration,
    Registration,
    duration_field,
)
from rolloutd.plugin.field_types import MAX_ITEMS, Name, Namespace, ShortName

MAX_CLUSTERS = 1000
"""Clusters of one list: each is asked by itself."""

Text = Annotated[str, Field(min_length=1, max_length=253)]


class _ManagementParams(Params):
    """How a management cluster is reached, and what its clusters are called."""

    name: ShortName = Field(description="Name of this management cluster in rolloutd; unique.")
    kubeconfig: FilePath = Field(description="How the management cluster is reached, as kubectl takes it.")
    context: Text = Field(
        default=ABSENT, description="Context of the kubeconfig; its current one if not given."
    )
    namespace: Namespace = Field(
        default=ABSENT, description="Only clusters of this namespace; of all namespaces if not given."
    )
    workers: Annotated[int, Field(ge=1, le=MAX_CLUSTERS)] = Field(
        default=ABSENT,
        description="Clusters in flight with changes at once, at most; below the `--concurrent` of its"
        " controllers, because a failing health check holds one. Without it only pools limit them.",
    )
    labels: dict[LabelKey, LabelKey] = Field(
        default={},
        max_length=MAX_ITEMS,
        description="Labels of the fleet, each with the object's label that gives its value.",
    )
    prefix: Annotated[str, Field(max_length=64, pattern=r"^[a-z0-9.-]*$")] = Field(
        default="", description="Prefix of each cluster's name, for management clusters that share names."
    )


class ClusterApiParams(_ManagementParams):
    """Whole clusters from the `Cluster` objects of Cluster API, which are watched all the time."""

    check_kubeconfig: bool = Field(
        default=False,
        description="Ask each cluster by its kubeconfig Secret, before each change too: its identity is the"
        " uid of its namespace `kube-system`, and a Secret of another cluster is noticed.",
    )


class ClusterProfileParams(_ManagementParams):
    """Whole clusters from ClusterProfile objects, which are watched all the time."""


class ListedCluster(Params):
    """One cluster of a list."""

    kubeconfig: FilePath = Field(description="How the cluster is reached, as kubectl takes it.")
    context: Text = Field(
        default=ABSENT, description="Context of the kubeconfig; its current one if not given."
    )
    labels: dict[LabelKey, Annotated[str, Field(max_length=253)]] = Field(
        default={}, max_length=MAX_ITEMS, description="Labels of the cluster."
    )


class KubeconfigsParams(Params):
    """Whole clusters from a list of kubeconfigs; each API server is asked in turn."""

    name: ShortName = Field(description="Name of this list in rolloutd; unique.")
    clusters: dict[Name, ListedCluster] = Field(
        min_length=1, max_length=MAX_CLUSTERS, description="The clusters by name."
    )
    every: PositiveDuration = duration_field("20s", "Interval of asking each cluster's API server.")


class ClusterCheckParams(CheckParams):
    """The cluster is available, by the conditions that its management cluster shows."""

    within: Duration = duration_field("5m", "How long this may take; 0s checks once.")
    timeout: PositiveDuration = duration_field("30s", "Limit of one try.")


class TopologyParams(Params):
    """Upgrades a cluster by Cluster API: the version of its topology, followed to every machine."""

    version: Annotated[str, Field(pattern=r"^v[0-9]+\.[0-9]+\.[0-9]+([-+][0-9A-Za-z.+-]+)?$")] = Field(
        description="Version of Kubernetes, such as `v1.31.4`."
    )
    failing_for: Duration = duration_field(
        "2m", "How long a failure is shown before it counts: the controller tries again by itself."
    )


_FACTORY = "rolloutd.adapters.clusters.factory"

CLUSTERAPI_INVENTORY = Registration(f"{_FACTORY}:make_inventory", ClusterApiParams)
CLUSTERPROFILE_INVENTORY = Registration(f"{_FACTORY}:make_inventory", ClusterProfileParams)
KUBECONFIGS_INVENTORY = Registration(f"{_FACTORY}:make_listed_inventory", KubeconfigsParams)
WATCH = Registration(f"{_FACTORY}:make_watch")
LISTED_WATCH = Registration(f"{_FACTORY}:make_listed_inventory")
CHECK = Registration(
    "rolloutd.adapters.clusters.factory:make_check",
    ClusterCheckParams,
    frozenset({Capability.JUDGES_LIVENESS}),
    node_kinds=frozenset({NodeKind.CLUSTER}),
)
CHANGE = Registration(
    "rolloutd.adapters.clusters.topology:TopologyRunner",
    TopologyParams,
    node_kinds=frozenset({NodeKind.CLUSTER}),
)
OBSERVER = Registration(f"{_FACTORY}:make_observer")
