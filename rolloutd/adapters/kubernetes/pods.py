"""Classes of a node's pods: which stay, which to evict, which the plan refuses."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from machines.model.selector import Selector
from rolloutd.adapters.kubernetes.api_errors import malformed_answers, require_text
from rolloutd.adapters.kubernetes.cluster import join_names
from rolloutd.ports import JSON

MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
"""On the API server's copy of a static pod, which an eviction does not end."""

JOB_KIND = "Job"
DAEMON_SET_KIND = "DaemonSet"
"""Both are compared without its group: those of other projects behave alike."""


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """The plan's choices about pods.

    `grace_s` replaces the pods' own grace periods.  `leave` selects pods that stay.  A pod whose end is
    overdue by `skip_terminating_after_s` is not awaited: its kubelet is dead.  Pods of Jobs may finish until
    `jobs_until` (epoch seconds).
    """

    delete_local_storage: bool = False
    delete_without_controller: bool = False
    evict_finished: bool = False
    leave: Selector | None = None
    grace_s: int | None = None
    skip_terminating_after_s: float | None = None
    jobs_until: float = 0.0


@dataclass(frozen=True, slots=True)
class Pod:
    namespace: str
    name: str
    uid: str
    owner: str = ""
    is_ready: bool = False
    bypasses_budget: bool = False
    belongs_to_node: bool = False
    is_finished: bool = False
    is_job_pod: bool = False
    is_daemonset_pod: bool = False
    has_local_storage: bool = False
    terminating_since: str = ""
    grace_s: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class DrainPlan:
    """The pods to evict, those that end already, Jobs' pods that may finish, and refusals as sentences."""

    to_evict: tuple[Pod, ...]
    terminating: tuple[Pod, ...]
    finishing: tuple[Pod, ...]
    refused: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether no pod is left that must leave the node."""
        return not (self.to_evict or self.terminating or self.finishing or self.refused)


@malformed_answers()
def parse_pod(pod: Mapping[str, JSON]) -> Pod:
    meta, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    owner = next((o for o in meta.get("ownerReferences") or () if o.get("controller")), None)
    daemon = owner is not None and owner.get("kind") == DAEMON_SET_KIND
    finished = status.get("phase") in ("Succeeded", "Failed")
    return Pod(
        namespace=require_text(meta["namespace"]),
        name=require_text(meta["name"]),
        uid=require_text(meta["uid"]),
        owner=_top_owner(owner, meta.get("labels") or {}),
        is_ready=has_ready_condition(status),
        # The API server applies no budget to these.
        bypasses_budget=finished or status.get("phase") == "Pending" or bool(meta.get("deletionTimestamp")),
        belongs_to_node=daemon or MIRROR_ANNOTATION in (meta.get("annotations") or {}),
        is_finished=finished,
        is_job_pod=owner is not None and owner.get("kind") == JOB_KIND,
        is_daemonset_pod=daemon and not finished,
        has_local_storage=any("emptyDir" in volume for volume in spec.get("volumes") or ()),
        terminating_since=str(meta.get("deletionTimestamp") or ""),
        grace_s=meta.get("deletionGracePeriodSeconds"),
        labels=dict(meta.get("labels") or {}),
    )


def _top_owner(owner: Mapping[str, JSON] | None, labels: Mapping[str, str]) -> str:
    """Return kind and name of the controller that a person knows: the Deployment, not its ReplicaSet."""
    if owner is None:
        return ""
    kind, name = str(owner.get("kind")), str(owner.get("name"))
    # A Deployment names its ReplicaSets after this label, and no other controller sets it.
    suffix = f"-{labels.get('pod-template-hash', '')}"
    if kind == "ReplicaSet" and len(suffix) > 1 and name.endswith(suffix):
        return f"Deployment {name.removesuffix(suffix)}"
    return f"{kind} {name}"


def has_ready_condition(status: Mapping[str, JSON]) -> bool:
    """Return whether the Ready condition is true, as budgets judge it; container statuses may differ."""
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or ())


def plan_drain(pods: Iterable[Pod], policy: EvictionPolicy) -> DrainPlan:
    """Classify a node's pods; one that is already terminating is not refused."""
    to_evict: list[Pod] = []
    terminating: list[Pod] = []
    finishing: list[Pod] = []
    refused: list[str] = []
    now = time.time()
    for pod in sorted(pods, key=lambda each: each.id):
        if _stays(pod, policy, now):
            continue
        refusal = _refusal_reason(pod, policy)
        if pod.terminating_since:
            terminating.append(pod)
        elif pod.is_job_pod and not pod.is_finished and now < policy.jobs_until:
            finishing.append(pod)
        elif refusal:
            refused.append(f"{pod.id} {refusal}")
        else:
            to_evict.append(pod)
    return DrainPlan(tuple(to_evict), tuple(terminating), tuple(finishing), tuple(refused))


def _stays(pod: Pod, policy: EvictionPolicy, now: float) -> bool:
    """Return whether the drain neither evicts the pod nor waits for it."""
    if pod.belongs_to_node or (pod.is_finished and not policy.evict_finished):
        return True
    if policy.leave is not None and policy.leave.matches(pod.labels):
        return True
    if policy.skip_terminating_after_s is None or not pod.terminating_since:
        return False
    return now - datetime.fromisoformat(pod.terminating_since).timestamp() > policy.skip_terminating_after_s


def terminating_text(pods: Iterable[Pod]) -> str:
    return join_names(
        [
            f"{pod.id} is ending" + ("" if pod.grace_s is None else f" (grace period {pod.grace_s} s)")
            for pod in pods
        ]
    )


def _refusal_reason(pod: Pod, policy: EvictionPolicy) -> str:
    if pod.is_finished:
        return ""
    if not pod.owner and not policy.delete_without_controller:
        return "has no controller that would start it elsewhere (pods_without_controller: delete evicts it)"
    if pod.has_local_storage and not policy.delete_local_storage:
        return "has local storage that is lost with it (pods_with_local_storage: delete evicts it)"
    return ""
