"""One eviction request and its result; the drain decides when to retry."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from rolloutd.adapters.kubernetes.api_errors import DOCTOR_HINT, ApiError
from rolloutd.adapters.kubernetes.budgets import POLICY_GROUP, Budget
from rolloutd.adapters.kubernetes.cluster import Cluster, api_path
from rolloutd.adapters.kubernetes.pods import Pod
from rolloutd.ports import JSON

_OTHER_UID = re.compile(r"\bUID in (the )?precondition\b")
"""What the API server says of a pod that has the name but not the uid of the eviction."""


class Evicted(Enum):
    """An eviction that need not be repeated."""

    ACCEPTED = auto()
    """The server accepted it; the pod is terminating, not gone."""
    GONE = auto()
    """The pod no longer exists; one of the same name is another pod."""


@dataclass(frozen=True, slots=True)
class EvictionBlocked:
    """The server refuses the eviction; if `is_permanent`, until a person changes something."""

    text: str
    is_permanent: bool = False
    retry_after_s: float = 0.0


async def evict(cluster: Cluster, pod: Pod, *, grace_s: int | None = None) -> Evicted | EvictionBlocked:
    """Request the eviction of the pod with this uid once; raises ClusterUnreachable.

    `grace_s` replaces the pod's own grace period.
    """
    # By uid: the next pod of a StatefulSet has the same name and must not go for its predecessor.
    options: dict[str, JSON] = {"preconditions": {"uid": pod.uid}}
    if grace_s is not None:
        options["gracePeriodSeconds"] = grace_s
    body: dict[str, JSON] = {
        "apiVersion": POLICY_GROUP,
        "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "deleteOptions": options,
    }
    path = api_path("pods", pod.name, namespace=pod.namespace, subresource="eviction")
    try:
        await cluster.request("POST", path, body=body, tries=1)
    except ApiError as error:
        return _classify_error(pod, error)
    return Evicted.ACCEPTED


def blocked_by_budgets(pod: Pod, budgets: list[Budget]) -> EvictionBlocked:
    """Return the refusal that the API server would give."""
    owner = f" (pod of {pod.owner})" if pod.owner else " (pod without a controller)"
    if len(budgets) > 1:
        names = " and ".join(sorted(each.id for each in budgets))
        text = f"{pod.id} is held by two budgets ({names}), which no eviction can satisfy{owner}"
        return EvictionBlocked(f"{text}; their owner must remove one", is_permanent=True)
    [budget] = budgets
    text = f"{pod.id} is held by budget {budget.id}"
    if not budget.is_observed:
        return EvictionBlocked(f"{text}, which was just changed and is still being processed{owner}")
    text += f": needs {budget.desired} healthy, has {budget.healthy}{owner}"
    if budget.permanent_reason:
        return EvictionBlocked(f"{text}, permanently: {budget.permanent_reason}", is_permanent=True)
    return EvictionBlocked(text)


def _classify_error(pod: Pod, error: ApiError) -> Evicted | EvictionBlocked:
    wait_s = error.retry_after_s or 0.0
    # Any conflict is a 409, and its message has the pod's name: only these words are those of our uid.
    if error.status == 404 or (error.status == 409 and _OTHER_UID.search(error.message)):
        return Evicted.GONE
    if "DisruptionBudget" in error.causes:
        message = error.causes["DisruptionBudget"] or error.message
        return EvictionBlocked(f"{pod.id} is held by a budget: {message}", retry_after_s=wait_s)
    if "NamespaceTerminating" in error.causes:
        text = f"{pod.id} is in a namespace that is being deleted, and goes with it"
        return EvictionBlocked(text, retry_after_s=wait_s)
    if error.status == 403:
        text = f"rolloutd may not evict {pod.id}: {error.message}; {DOCTOR_HINT}"
        return EvictionBlocked(text, is_permanent=True)
    if error.is_flow_control:
        return EvictionBlocked(f"{pod.id}: the API server is too busy", retry_after_s=max(1.0, wait_s))
    return EvictionBlocked(f"{pod.id} could not be evicted: {error}", retry_after_s=wait_s)
