"""Asks for one eviction, for real or as a rehearsal, and says what the answer means.

"Accepted" means that the pod was told to end, not that it is gone.  A refusal
is put in words that name the pod, the budget and the owner.  When to ask again,
and what to do about the other pods, is decided elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolloutd.adapters.kubernetes.answers import ASK_DOCTOR, ApiError
from rolloutd.adapters.kubernetes.cluster import Cluster, path_of
from rolloutd.adapters.kubernetes.pods import Pod

JSON = Any

POLICY = "policy/v1"

_NAMED = re.compile(r"disruption budget (\S+) ", re.IGNORECASE)
_COUNTED = re.compile(r"needs (\d+) healthy pods? and has (\d+) currently")


@dataclass(frozen=True, slots=True)
class Accepted:
    """The pod was told to end (or would be)."""


@dataclass(frozen=True, slots=True)
class Gone:
    """There is no such pod any more; one of the same name is another pod."""


@dataclass(frozen=True, slots=True)
class Held:
    """The pod may not go now; `lasting` when nothing but a person's change lets it go."""

    text: str
    lasting: bool = False
    retry_after_s: float = 0.0


Answer = Accepted | Gone | Held


async def evict(cluster: Cluster, pod: Pod, *, rehearse: bool = False) -> Answer:
    """Ask once for the eviction of this very pod; raises ClusterUnreachable."""
    body: dict[str, JSON] = {
        "apiVersion": POLICY,
        "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "deleteOptions": {"preconditions": {"uid": pod.uid}},
    }
    if rehearse:
        body["deleteOptions"]["dryRun"] = ["All"]
    path = path_of("pods", pod.name, namespace=pod.namespace, part="eviction")
    try:
        await cluster.ask_once("POST", path, body=body)
    except ApiError as error:
        return await _judge(cluster, pod, error)
    return Accepted()


async def _judge(cluster: Cluster, pod: Pod, error: ApiError) -> Answer:
    wait_s = error.retry_after_s or 0.0
    if error.status == 404 or (error.status == 409 and "uid" in error.message.lower()):
        return Gone()
    if "DisruptionBudget" in error.causes:
        return await _judge_budget(cluster, pod, error, wait_s)
    if "NamespaceTerminating" in error.causes:
        return Held(
            f"{pod.id} is in a namespace that is being deleted, and goes with it", retry_after_s=wait_s
        )
    if error.status == 403:
        return Held(f"we may not evict {pod.id}: {error.message}; {ASK_DOCTOR}", lasting=True)
    if error.status == 500 and "more than one PodDisruptionBudget" in error.message:
        budgets = await _budgets_over(cluster, pod)
        return Held(
            f"{pod.id} is held by two budgets{budgets}, which no eviction can satisfy{_of(pod)}; "
            "their owner must remove one",
            lasting=True,
        )
    if error.is_flow_control:
        return Held(f"{pod.id}: the API server is too busy", retry_after_s=max(1.0, wait_s))
    return Held(f"{pod.id} could not be evicted: {error}", retry_after_s=wait_s)


async def _judge_budget(cluster: Cluster, pod: Pod, error: ApiError, wait_s: float) -> Held:
    said = error.causes["DisruptionBudget"]
    named = _NAMED.search(said)
    name = f"{pod.namespace}/{named[1]}" if named else f"of {pod.namespace}"
    counted = _COUNTED.search(said)
    held = f"{pod.id} is held by budget {name}"
    if counted:
        held += f": needs {counted[1]} healthy, has {counted[2]}"
    elif "still being processed" in said:
        held += ", which was just changed and is still being processed"
    else:
        held += f": {said or error.message}"
    never = await _never(cluster, pod, named[1]) if named and not wait_s else ""
    return Held(f"{held}{_of(pod)}{never}", lasting=bool(never), retry_after_s=wait_s)


async def _never(cluster: Cluster, pod: Pod, name: str) -> str:
    """Say why the budget can never let a pod go, or nothing when it can."""
    try:
        budget = await cluster.get(
            path_of("poddisruptionbudgets", name, namespace=pod.namespace, group=POLICY)
        )
    except ApiError:
        return ""
    status = budget.get("status") or {}
    expected, desired = status.get("expectedPods", 0), status.get("desiredHealthy", 0)
    if status.get("observedGeneration") != budget["metadata"].get("generation"):
        return ""
    for condition in status.get("conditions") or ():
        if condition.get("reason") == "SyncFailed":
            why = condition.get("message", "no reason given")
            return f", for ever: the cluster cannot count its pods ({why}); its owner must mend it"
    if expected == 0:
        return (
            ", for ever: it counts no pods, as over pods without a controller; "
            "its owner must use minAvailable"
        )
    if desired >= expected:
        pods = "1 pod" if expected == 1 else f"{expected} pods"
        return (
            f", for ever: it expects {pods} and lets none be away; "
            "its owner must add a replica or lower minAvailable"
        )
    return ""


async def _budgets_over(cluster: Cluster, pod: Pod) -> str:
    """Name the budgets over a pod, as far as they can be read."""
    try:
        found = await cluster.list(path_of("poddisruptionbudgets", namespace=pod.namespace, group=POLICY))
    except ApiError:
        return ""
    over = [
        f"{pod.namespace}/{budget['metadata']['name']}"
        for budget in found.items
        if selects((budget.get("spec") or {}).get("selector"), pod.labels)
    ]
    return f" ({' and '.join(over)})" if over else ""


def selects(selector: Mapping[str, JSON] | None, labels: Mapping[str, str]) -> bool:
    """Say whether a label selector object selects these labels; an empty one selects everything."""
    if selector is None:
        return False
    wanted = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    return all(_meets(expression, labels) for expression in selector.get("matchExpressions") or ())


def _meets(expression: Mapping[str, JSON], labels: Mapping[str, str]) -> bool:
    key, values = expression["key"], expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return labels.get(key) in values
        case "NotIn":
            return labels.get(key) not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case _:
            return False


def _of(pod: Pod) -> str:
    return f" (pod of {pod.owner})" if pod.owner else " (pod without a controller)"
