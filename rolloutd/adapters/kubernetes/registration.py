"""Registrations of the adapters of Kubernetes."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import model_validator

from rolloutd import plugin
from rolloutd.plugin.field_types import MAX_ITEMS, InvalidValue, Namespace, ShortName

MAX_NAMESPACES = 50
"""Namespaces of one probe: each costs one request per probe."""


class KubernetesIsolatorParams(plugin.Params):
    """Takes a Kubernetes node out of service: cordons and drains it, and uncordons it again."""

    drain_timeout: plugin.PositiveDuration = plugin.Field(
        default=plugin.ABSENT,
        description="Limit of the drain; after it the node returns to service and is tried later. "
        "`limits.isolate` if not given.",
    )
    pods_with_local_storage: Literal["refuse", "delete"] = plugin.Field(
        default="refuse",
        description="Pods whose emptyDir volumes are lost with them: refuse the node, or evict them.",
    )
    pods_without_controller: Literal["refuse", "delete"] = plugin.Field(
        default="refuse",
        description="Pods that no controller starts again: refuse the node, or evict them.",
    )
    finished_pods: Literal["leave", "evict"] = plugin.Field(
        default=plugin.ABSENT,
        description="Pods that have finished: leave their objects, which is the default, or evict them too.",
    )
    leave_pods: plugin.SelectorText = plugin.Field(
        default=plugin.ABSENT,
        description="Pods with these labels stay: they are neither evicted nor awaited.",
    )
    grace_period: plugin.Duration = plugin.Field(
        default=plugin.ABSENT, description="Grace period of evicted pods; each pod's own if not given."
    )
    skip_terminating_after: plugin.Duration = plugin.Field(
        default=plugin.ABSENT,
        description="A pod whose end is overdue by this time is not awaited, as on a node without a kubelet. "
        "Such pods are awaited if not given.",
    )
    wait_for_jobs: plugin.PositiveDuration = plugin.Field(
        default=plugin.ABSENT,
        description="How long after the cordon pods of Jobs may finish before they are evicted; "
        "less than the limit of the drain. They are evicted at once if not given.",
    )
    prefer_no_schedule: plugin.PositiveDuration = plugin.Field(
        default=plugin.ABSENT,
        description="How long before the cordon the node has a taint `PreferNoSchedule`, so that new pods "
        "go elsewhere where they can.",
    )
    timeout: plugin.PositiveDuration = plugin.duration_field(
        "1m", "Limit of one try; the next try evicts the pods that are left."
    )

    @model_validator(mode="after")
    def _waits_fit_limit(self) -> Self:
        """The limit of isolating counts from the admission, so the waits before the evictions are in it."""
        given = self.model_fields_set
        waits_s = [getattr(self, key) for key in ("prefer_no_schedule", "wait_for_jobs") if key in given]
        if waits_s and ("drain_timeout" not in given or sum(waits_s) >= self.drain_timeout):
            raise InvalidValue(
                "no time is left for the evictions",
                "a `drain_timeout` longer than `prefer_no_schedule` and `wait_for_jobs` together",
            )
        return self


class KubernetesCheckParams(plugin.CheckParams):
    """The node is Ready in its cluster, and the pods that belong on it are there and Ready."""

    ready: bool = plugin.Field(default=True, description="The node's Ready condition is true.")
    daemonsets_ready: bool = plugin.Field(
        default=False,
        description="Every DaemonSet pod that was there before the isolation is there and Ready again.",
    )
    pods_ready: plugin.SelectorText = plugin.Field(
        default=plugin.ABSENT,
        description="The node's pods with these labels are Ready, and there is at least one.",
    )
    within: plugin.Duration = plugin.duration_field("5m", "How long all this may take; 0s checks once.")
    timeout: plugin.PositiveDuration = plugin.duration_field("30s", "Limit of one try.")


class KubernetesProbeParams(plugin.Params):
    """Workload is traffic: pods with these labels that run on the node make it busy."""

    pods: plugin.SelectorText = plugin.Field(
        min_length=1,
        description="Label selector of the pods that count: each that is bound to the node and has not "
        "finished. Pods of DaemonSets and static pods never count.",
    )
    namespaces: list[Namespace] = plugin.Field(
        default=plugin.ABSENT,
        min_length=1,
        max_length=MAX_NAMESPACES,
        description="Only pods of these namespaces count; of all if not given.",
    )
    timeout: plugin.PositiveDuration = plugin.duration_field(
        "10s", "Limit of one probe; after it the result is unknown."
    )


class KubernetesInventoryParams(plugin.Params):
    """Nodes from a Kubernetes cluster, which is watched all the time."""

    name: ShortName = plugin.Field(description="Name of this cluster in rolloutd; unique.")
    kubeconfig: plugin.FilePath = plugin.Field(description="How the cluster is reached, as kubectl takes it.")
    context: Annotated[str, plugin.Field(min_length=1, max_length=253)] = plugin.Field(
        default=plugin.ABSENT, description="Context of the kubeconfig; its current one if not given."
    )
    labels: dict[plugin.LabelKey, plugin.LabelKey] = plugin.Field(
        default={},
        max_length=MAX_ITEMS,
        description="Labels of the fleet, each with the cluster's label that gives its value.",
    )
    prefix: Annotated[str, plugin.Field(max_length=64, pattern=r"^[a-z0-9.-]*$")] = plugin.Field(
        default="", description="Prefix of each node's name, for clusters that share node names."
    )
    domain: Annotated[str, plugin.Field(max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")] = (
        plugin.Field(
            default="rolloutd.io", description="Prefix of rolloutd's annotations on the cluster's nodes."
        )
    )
    lock_annotations: list[Annotated[str, plugin.Field(min_length=1, max_length=317)]] = plugin.Field(
        default=["weave.works/kured-reboot-in-progress"],
        max_length=MAX_ITEMS,
        description="Annotations by which other tools lock a node: it takes its slots, and does not start.",
    )
    lock_leases: Namespace = plugin.Field(
        default=plugin.ABSENT,
        description="Namespace in which other tools hold a Lease `node-NAME` of a node that they work on.",
    )
    address: Literal["InternalIP", "ExternalIP", "Hostname", "none"] = plugin.Field(
        default="InternalIP",
        description="The node's address that becomes `ansible_host` unless another source sets it.",
    )


_NODES = frozenset({plugin.NodeKind.KUBERNETES})

INVENTORY = plugin.Registration(
    "rolloutd.adapters.kubernetes.factory:make_inventory", KubernetesInventoryParams
)
WATCH = plugin.Registration("rolloutd.adapters.kubernetes.factory:make_watch")
OBSERVER = plugin.Registration("rolloutd.adapters.kubernetes.factory:make_observer")
ISOLATOR = plugin.Registration(
    "rolloutd.adapters.kubernetes.factory:make_isolator",
    KubernetesIsolatorParams,
    frozenset({plugin.Capability.CORDON_ONLY, plugin.Capability.DRY_RUN, plugin.Capability.PROGRESS_REPORTS}),
    node_kinds=_NODES,
)
CHECK = plugin.Registration(
    "rolloutd.adapters.kubernetes.factory:make_check",
    KubernetesCheckParams,
    frozenset({plugin.Capability.JUDGES_LIVENESS}),
    node_kinds=_NODES,
)
PROBE = plugin.Registration(
    "rolloutd.adapters.kubernetes.factory:make_probe", KubernetesProbeParams, node_kinds=_NODES
)
