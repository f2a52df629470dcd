"""What the control plane does by itself: budgets are counted, nodes tainted, namespaces emptied.

As the controller-manager, but no kubelet and no scheduler: those who want pods
to end and to start play them through the API.  Each controller works a moment
after the change, as the real ones do.
"""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import Any

from tests.support.fake_kubernetes.objects import Change, Objects, condition, format_time
from tests.support.fake_kubernetes.selectors import selects

JSON = Any

FINISHED = ("Succeeded", "Failed")
UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
NOT_READY = "node.kubernetes.io/not-ready"
UNREACHABLE = "node.kubernetes.io/unreachable"
HEARTBEAT_CHECK_S = 0.25


class Controllers:
    """Keeps what follows from the objects in step with them.

    `delay_s` is how far behind it works; a node whose kubelet has been silent
    for `silence_s` becomes unknown (None: never).
    """

    def __init__(
        self, objects: Objects, *, delay_s: float = 0.01, heartbeat_timeout_s: float | None = None
    ) -> None:
        self.delay_s = delay_s
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self._objects = objects
        self._dirty: set[tuple[str, str]] = set()
        self._wakeup = asyncio.Event()
        objects.listeners.append(self._on_change)

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reconcile_loop())
            tasks.create_task(self._watch_heartbeats())

    def _on_change(self, change: Change) -> None:
        thing = change.after or change.before
        match change.resource:
            case "pods":
                self._dirty.add(("budgets", thing["metadata"]["namespace"]))
                self._dirty.add(("namespace", thing["metadata"]["namespace"]))
            case "poddisruptionbudgets" | "replicasets" | "statefulsets":
                self._dirty.add(("budgets", thing["metadata"]["namespace"]))
            case "nodes":
                self._dirty.add(("node", thing["metadata"]["name"]))
            case "namespaces":
                self._dirty.add(("namespace", thing["metadata"]["name"]))
        self._wakeup.set()

    async def _reconcile_loop(self) -> None:
        while True:
            await self._wakeup.wait()
            await asyncio.sleep(self.delay_s)
            self._wakeup.clear()
            work, self._dirty = self._dirty, set()
            for kind, name in sorted(work):
                {
                    "budgets": self._reconcile_budgets,
                    "node": self._reconcile_node,
                    "namespace": self._reconcile_namespace,
                }[kind](name)

    # -- budgets

    def _reconcile_budgets(self, namespace: str) -> None:
        all_pods = list(self._objects.all("pods", namespace))
        for budget in list(self._objects.all("poddisruptionbudgets", namespace)):
            status = self._budget_status(budget, all_pods)
            self._objects.modify("poddisruptionbudgets", budget, lambda b, s=status: b.update(status=s))

    def _budget_status(self, budget: JSON, all_pods: list[JSON]) -> JSON:
        pods = [pod for pod in all_pods if _is_covered(budget, pod)]
        old = budget.get("status") or {}
        disrupted = {
            name: at
            for name, at in (old.get("disruptedPods") or {}).items()
            if any(p["metadata"]["name"] == name and "deletionTimestamp" not in p["metadata"] for p in pods)
        }
        healthy = sum(is_healthy(pod) and pod["metadata"]["name"] not in disrupted for pod in pods)
        expected, desired, failure = self._expected_pods(budget, pods)
        allowed = 0 if failure or expected == 0 else max(0, healthy - desired)
        status = {
            "observedGeneration": budget["metadata"]["generation"],
            "disruptionsAllowed": allowed,
            "currentHealthy": healthy,
            "desiredHealthy": desired,
            "expectedPods": expected,
            "conditions": [
                {
                    "type": "DisruptionAllowed",
                    "status": "True" if allowed else "False",
                    "reason": "SyncFailed"
                    if failure
                    else "SufficientPods"
                    if allowed
                    else "InsufficientPods",
                    "message": failure,
                    "observedGeneration": budget["metadata"]["generation"],
                }
            ],
        }
        if disrupted:
            status["disruptedPods"] = disrupted
        return status

    def _expected_pods(self, budget: JSON, pods: list[JSON]) -> tuple[int, int, str]:
        """Return how many pods there should be, how many healthy ones are needed, and what went wrong."""
        spec = budget["spec"]
        least = spec.get("minAvailable")
        if isinstance(least, int):
            return len(pods), least, ""
        scale = self._scale(pods)
        if scale is None:
            return 0, 0, "found no scale of the pods' controller"
        if least is not None:
            return scale, -(-scale * int(least.rstrip("%")) // 100), ""
        most = spec.get("maxUnavailable", 1)
        away = most if isinstance(most, int) else -(-scale * int(most.rstrip("%")) // 100)
        return scale, max(0, scale - away), ""

    def _scale(self, pods: list[JSON]) -> int | None:
        kinds = {"ReplicaSet": "replicasets", "StatefulSet": "statefulsets"}
        owners = set()
        for pod in pods:
            owner = next(
                (o for o in pod["metadata"].get("ownerReferences") or () if o.get("controller")), None
            )
            if owner is None:
                continue  # counted by nobody: a budget over such pods alone expects none
            if owner["kind"] not in kinds:
                return None
            owners.add((kinds[owner["kind"]], pod["metadata"]["namespace"], owner["name"]))
        found = [self._objects.find(*owner) for owner in owners]
        return sum(each["spec"].get("replicas", 1) for each in found if each is not None)

    # -- nodes

    def _reconcile_node(self, name: str) -> None:
        node = self._objects.find("nodes", "", name)
        if node is None:
            for pod in list(self._objects.all("pods")):
                if pod["spec"].get("nodeName") == name:
                    self._objects.remove("pods", pod)
            return
        wanted = []
        if node["spec"].get("unschedulable"):
            wanted.append({"key": UNSCHEDULABLE, "effect": "NoSchedule"})
        ready = condition(node, "Ready").get("status")
        if ready == "False":
            wanted += [{"key": NOT_READY, "effect": effect} for effect in ("NoSchedule", "NoExecute")]
        elif ready == "Unknown":
            wanted += [{"key": UNREACHABLE, "effect": effect} for effect in ("NoSchedule", "NoExecute")]
        ours = {UNSCHEDULABLE, NOT_READY, UNREACHABLE}

        def taint(thing: JSON) -> None:
            others = [t for t in thing["spec"].get("taints") or () if t["key"] not in ours]
            thing["spec"].pop("taints", None)
            if others + wanted:
                thing["spec"]["taints"] = others + wanted

        self._objects.modify("nodes", node, taint)

    async def _watch_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_CHECK_S)
            if self.heartbeat_timeout_s is None:
                continue
            for node in list(self._objects.all("nodes")):
                ready = condition(node, "Ready")
                if (
                    ready.get("status") != "Unknown"
                    and _age_s(ready.get("lastHeartbeatTime")) > self.heartbeat_timeout_s
                ):
                    self._mark_node_unknown(node)

    def _mark_node_unknown(self, node: JSON) -> None:
        """The kubelet is silent: nobody knows how the node is, and its pods count as unready."""

        def unknown(thing: JSON) -> None:
            for each in thing["status"]["conditions"]:
                if each["type"] == "Ready":
                    each |= {
                        "status": "Unknown",
                        "reason": "NodeStatusUnknown",
                        "message": "Kubelet stopped posting node status.",
                        "lastTransitionTime": format_time(),
                    }

        def unready(thing: JSON) -> None:
            for each in thing["status"].get("conditions") or ():
                if each["type"] == "Ready":
                    each |= {"status": "False", "lastTransitionTime": format_time()}

        self._objects.modify("nodes", node, unknown)
        for pod in list(self._objects.all("pods")):
            if pod["spec"].get("nodeName") == node["metadata"]["name"]:
                self._objects.modify("pods", pod, unready)

    # -- namespaces

    def _reconcile_namespace(self, name: str) -> None:
        """A namespace that is going tells its pods to end, and goes with the last of them."""
        namespace = self._objects.find("namespaces", "", name)
        if namespace is None or "deletionTimestamp" not in namespace["metadata"]:
            return
        for resource in ("poddisruptionbudgets", "configmaps", "replicasets", "statefulsets", "daemonsets"):
            for thing in list(self._objects.all(resource, name)):
                self._objects.remove(resource, thing)
        pods = list(self._objects.all("pods", name))
        for pod in pods:
            if "deletionTimestamp" not in pod["metadata"]:
                end_pod(self._objects, pod, None)
        if not pods:
            self._objects.remove("namespaces", namespace)


def end_pod(objects: Objects, pod: JSON, grace_s: int | None) -> None:
    """Delete a pod gracefully: a bound pod stays until its kubelet takes it away."""
    grace = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace_s is None else grace_s
    finished = (pod.get("status") or {}).get("phase") in FINISHED
    if grace == 0 or finished or not pod["spec"].get("nodeName"):
        objects.remove("pods", pod)
        return

    def ending(thing: JSON) -> None:
        thing["metadata"].setdefault("deletionTimestamp", format_time(grace))
        thing["metadata"].setdefault("deletionGracePeriodSeconds", grace)

    objects.modify("pods", pod, ending)


def is_healthy(pod: JSON) -> bool:
    """Whether a budget counts the pod: Ready by its condition, and not ending."""
    return condition(pod, "Ready").get("status") == "True" and "deletionTimestamp" not in pod["metadata"]


def _is_covered(budget: JSON, pod: JSON) -> bool:
    finished = (pod.get("status") or {}).get("phase") in FINISHED
    return not finished and selects(budget["spec"].get("selector"), pod["metadata"].get("labels") or {})


def _age_s(text: str | None) -> float:
    if text is None:
        return float("inf")
    return time.time() - datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
