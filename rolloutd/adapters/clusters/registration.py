"""Registrations of the inventories of whole clusters."""

from __future__ import annotations

from typing import Annotated

from rolloutd.plugin import (
    ABSENT,
    Field,
    FilePath,
    LabelKey,
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


_FACTORY = "rolloutd.adapters.clusters.factory"

CLUSTERAPI_INVENTORY = Registration(f"{_FACTORY}:make_inventory", ClusterApiParams)
CLUSTERPROFILE_INVENTORY = Registration(f"{_FACTORY}:make_inventory", ClusterProfileParams)
KUBECONFIGS_INVENTORY = Registration(f"{_FACTORY}:make_listed_inventory", KubeconfigsParams)
WATCH = Registration(f"{_FACTORY}:make_watch")
LISTED_WATCH = Registration(f"{_FACTORY}:make_listed_inventory")
OBSERVER = Registration(f"{_FACTORY}:make_observer")
