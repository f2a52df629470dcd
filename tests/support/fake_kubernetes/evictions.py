"""Answers evictions as a real API server was seen to: budgets, preconditions, rehearsals."""

from __future__ import annotations

from typing import Any

from tests.support.fake_kubernetes.controllers import FINISHED, end_pod
from tests.support.fake_kubernetes.errors import ApiRefusal
from tests.support.fake_kubernetes.objects import Objects, condition, format_time
from tests.support.fake_kubernetes.selectors import selects

JSON = Any

VERSIONS = ("policy/v1", "policy/v1beta1")
PROCESSING_S = 10


def evict(objects: Objects, namespace: str, name: str, body: JSON) -> JSON:
    """Evict a pod, or say why not."""
    if body.get("apiVersion") not in VERSIONS or body.get("kind") != "Eviction":
        raise ApiRefusal(400, f'no kind "Eviction" is registered for version {body.get("apiVersion")!r}')
    if (body.get("metadata") or {}).get("name") != name:
        raise ApiRefusal(400, "name in URL does not match name in Eviction object")
    within = objects.find("namespaces", "", namespace)
    if within is not None and "deletionTimestamp" in within["metadata"]:
        message = f"unable to create new content in namespace {namespace} because it is being terminated"
        cause = {"reason": "NamespaceTerminating", "message": f"namespace {namespace} is being terminated"}
        raise ApiRefusal(403, f'pods "{name}" is forbidden: {message}', causes=[cause])
    pod = objects.get("pods", namespace, name)
    options = body.get("deleteOptions") or {}
    check_preconditions(pod, options, "pods")
    dry = "All" in (options.get("dryRun") or ())
    free = (
        "deletionTimestamp" in pod["metadata"]
        or (pod.get("status") or {}).get("phase") in ("Pending", *FINISHED)
        or not pod["spec"].get("nodeName")
    )
    if not free:
        _take_disruption(objects, pod, dry=dry)
    if not dry:
        _delete_evicted(objects, pod, options.get("gracePeriodSeconds"))
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


def check_preconditions(thing: JSON, options: JSON, resource: str) -> None:
    """Raise a 409 unless the object is the one that is meant."""
    wanted = options.get("preconditions") or {}
    meta = thing["metadata"]
    for key, said in (("uid", "UID"), ("resourceVersion", "ResourceVersion")):
        if wanted.get(key) not in (None, meta[key]):
            raise ApiRefusal(
                409,
                f'Operation cannot be fulfilled on {resource} "{meta["name"]}": the {said} in the '
                f"precondition ({wanted[key]}) does not match the {said} in record ({meta[key]}). "
                "The object might have been deleted and then recreated",
            )


def _delete_evicted(objects: Objects, pod: JSON, grace_s: int | None) -> None:
    def disrupted(thing: JSON) -> None:
        conditions = thing.setdefault("status", {}).setdefault("conditions", [])
        if not any(each["type"] == "DisruptionTarget" for each in conditions):
            conditions.append(
                {
                    "type": "DisruptionTarget",
                    "status": "True",
                    "reason": "EvictionByEvictionAPI",
                    "message": "Eviction API: evicting",
                    "lastTransitionTime": format_time(),
                }
            )

    if "deletionTimestamp" not in pod["metadata"]:
        objects.modify("pods", pod, disrupted)
        end_pod(objects, pod, grace_s)


def _take_disruption(objects: Objects, pod: JSON, *, dry: bool) -> None:
    """Take one of the budget's disruptions, or refuse."""
    labels, namespace = pod["metadata"].get("labels") or {}, pod["metadata"]["namespace"]
    budgets = [
        budget
        for budget in objects.all("poddisruptionbudgets", namespace)
        if selects(budget["spec"].get("selector"), labels)
    ]
    if len(budgets) > 1:
        message = (
            "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."
        )
        raise ApiRefusal(500, message, reason="")
    if not budgets:
        return
    budget = budgets[0]
    status = budget.get("status") or {}
    unready = condition(pod, "Ready").get("status") != "True"
    if unready and budget["spec"].get("unhealthyPodEvictionPolicy") == "AlwaysAllow":
        return
    enough = status.get("currentHealthy", 0) >= status.get("desiredHealthy", 0) > 0
    if unready and enough:
        return
    _check_disruptions_allowed(budget, status)
    if not dry:

        def spend(thing: JSON) -> None:
            thing["status"]["disruptionsAllowed"] -= 1
            thing["status"].setdefault("disruptedPods", {})[pod["metadata"]["name"]] = format_time()

        objects.modify("poddisruptionbudgets", budget, spend)


def _check_disruptions_allowed(budget: JSON, status: JSON) -> None:
    name = budget["metadata"]["name"]
    if status.get("observedGeneration", 0) < budget["metadata"]["generation"]:
        raise _too_many_requests(
            f"The disruption budget {name} is still being processed by the server.", PROCESSING_S
        )
    if status.get("disruptionsAllowed", 0) > 0:
        return
    if status.get("expectedPods", 0) == 0:
        raise _too_many_requests(f"The disruption budget {name} does not allow evicting pods currently")
    raise _too_many_requests(
        f"The disruption budget {name} needs {status['desiredHealthy']} healthy pods "
        f"and has {status['currentHealthy']} currently"
    )


def _too_many_requests(why: str, retry_after_s: int | None = None) -> ApiRefusal:
    return ApiRefusal(
        429,
        "Cannot evict pod as it would violate the pod's disruption budget.",
        causes=[{"reason": "DisruptionBudget", "message": why}],
        retry_after_s=retry_after_s,
    )
