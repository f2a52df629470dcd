"""Sorts the pods of a node: which stay, which must go, which the plan does not let go.

Values in, values out; what the API server says to an eviction is known elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rolloutd.adapters.kubernetes.cluster import names

JSON = Any

MIRROR = "kubernetes.io/config.mirror"
"""The kubelet's mark on the API server's copy of a static pod, which no eviction ends."""

DAEMON_SET = "DaemonSet"
"""Judged by kind alone: other projects bring DaemonSets of their own groups, which behave alike."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What the plan says of pods that lose something when they go."""

    delete_local_storage: bool = False
    delete_without_controller: bool = False


@dataclass(frozen=True, slots=True)
class Pod:
    """What is kept of a pod."""

    namespace: str
    name: str
    uid: str
    owner: str = ""
    ready: bool = False
    stays: bool = False
    daemon: bool = False
    local: bool = False
    ending_since: str = ""
    grace_s: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The pod's `namespace/name`."""
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Sorted:
    """The pods that matter to a drain: to evict, already ending, and not to be evicted by the plan."""

    go: tuple[Pod, ...] = ()
    ending: tuple[Pod, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether nothing is left that has to go."""
        return not (self.go or self.ending or self.refused)


def read_pod(pod: Mapping[str, JSON]) -> Pod:
    """Return what is kept of a pod object."""
    meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    owner = next((o for o in meta.get("ownerReferences") or () if o.get("controller")), None)
    daemon = owner is not None and owner.get("kind") == DAEMON_SET
    finished = status.get("phase") in ("Succeeded", "Failed")
    return Pod(
        namespace=meta["namespace"],
        name=meta["name"],
        uid=meta["uid"],
        owner="" if owner is None else f"{owner.get('kind')} {owner.get('name')}",
        ready=is_ready(status),
        stays=daemon or finished or MIRROR in (meta.get("annotations") or {}),
        daemon=daemon and not finished,
        local=any("emptyDir" in volume for volume in spec.get("volumes") or ()),
        ending_since=str(meta.get("deletionTimestamp") or ""),
        grace_s=meta.get("deletionGracePeriodSeconds"),
        labels=dict(meta.get("labels") or {}),
    )


def is_ready(status: Mapping[str, JSON]) -> bool:
    """Judge by the Ready condition, as budgets do; container statuses may say otherwise."""
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or ())


def sort_pods(pods: Iterable[Pod], policy: Policy) -> Sorted:
    """Sort a node's pods; one that is ending anyway is not refused any more."""
    go: list[Pod] = []
    ending: list[Pod] = []
    refused: list[str] = []
    for pod in sorted(pods, key=lambda each: each.id):
        if pod.stays:
            continue
        why = _refusal(pod, policy)
        if pod.ending_since:
            ending.append(pod)
        elif why:
            refused.append(f"{pod.id} {why}")
        else:
            go.append(pod)
    return Sorted(tuple(go), tuple(ending), tuple(refused))


def ending_text(pods: Iterable[Pod]) -> str:
    """Say which pods are waited for."""
    return names(
        [
            f"{pod.id} is ending, to be gone by {pod.ending_since}"
            + ("" if pod.grace_s is None else f" (grace period {pod.grace_s} s)")
            for pod in pods
        ]
    )


def _refusal(pod: Pod, policy: Policy) -> str:
    if not pod.owner and not policy.delete_without_controller:
        return "has no controller that would start it elsewhere (pods_without_controller: delete evicts it)"
    if pod.local and not policy.delete_local_storage:
        return "has local storage that is lost with it (pods_with_local_storage: delete evicts it)"
    return ""
