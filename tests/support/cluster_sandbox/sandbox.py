"""Nodes, workloads and budgets of one test, in a namespace and under a prefix of its own.

There are no kubelets on a bare control plane, so the world plays them through
the API: it keeps its nodes' heartbeats, lets pods become Ready, ends pods when
their time has come, and starts a workload's missing pods on nodes that take
them.  The same code works on a fake and on a real server.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Coroutine
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import aiohttp

from tests.support.cluster_sandbox.api import ApiError, KubernetesApi
from tests.support.waiting import wait_in_loop_until

JSON = Any

HEARTBEAT_S = 5.0
"""A control plane gives a silent kubelet 40 s or more."""

POLL_S = 0.05
RETRY_S = 0.05


class ClusterSandbox:
    """An async context manager; `ready_s` and `end_s` are how long pods take to start and to end."""

    def __init__(self, api: KubernetesApi, *, ready_s: float = 0.05, end_s: float = 0.05) -> None:
        self.api = api
        self.prefix = f"rolloutd-{uuid.uuid4().hex[:8]}"
        self.namespace = self.prefix
        self.ready_s = ready_s
        self.end_s = end_s
        self.silent_nodes: set[str] = set()
        """Nodes whose kubelet does nothing."""
        self._workloads: dict[str, dict[str, JSON]] = {}
        self._pods: dict[str, JSON] = {}
        self._nodes: list[str] = []
        self._boot_ids: dict[str, str] = {}
        self._started: set[str] = set()
        self._ended: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._heartbeat_lock = asyncio.Lock()

    async def __aenter__(self) -> ClusterSandbox:
        await self.api.post("/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        self._spawn(self._run_controllers())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.api.delete(f"/api/v1/namespaces/{self.namespace}")
        for pod in (await self.api.get(self.pods_path))["items"]:
            await self.api.delete(f"{self.pods_path}/{pod['metadata']['name']}", gracePeriodSeconds=0)
        for node in self._nodes:
            await self.api.delete(f"/api/v1/nodes/{node}")

    @property
    def pods_path(self) -> str:
        """The list of the world's pods."""
        return f"/api/v1/namespaces/{self.namespace}/pods"

    # -- what a test makes

    async def node(self, name: str, labels: dict[str, str] | None = None) -> str:
        """Make a Ready node and return its name, which has the world's prefix."""
        name = f"{self.prefix}-{name}"
        self._nodes.append(name)
        self._boot_ids[name] = uuid.uuid4().hex
        body = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {"rolloutd-world": self.prefix, **(labels or {})}},
            "spec": {"providerID": f"world:///{name}"},
        }
        await self.api.post("/api/v1/nodes", body)
        await self.post_heartbeat(name)
        await wait_in_loop_until(lambda: self._is_ready(name))
        return name

    async def post_heartbeat(self, name: str, *, ready: str = "True") -> None:
        """Say, as its kubelet, how a node is."""
        # On two connections a heartbeat of before could reach the server after this one.
        async with self._heartbeat_lock:
            await self._patch_status(name, ready)

    async def _patch_status(self, name: str, ready: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        condition = {
            "type": "Ready",
            "status": ready,
            "reason": "KubeletReady" if ready == "True" else "KubeletNotReady",
            "message": "kubelet is posting ready status" if ready == "True" else "the world says so",
            "lastHeartbeatTime": now,
            "lastTransitionTime": now,
        }
        status = {
            "conditions": [condition],
            # An address of its own: the daemon distrusts one that two nodes have.
            "addresses": [{"type": "InternalIP", "address": f"127.0.2.{[*self._boot_ids].index(name) + 1}"}],
            "nodeInfo": _node_info(self._boot_ids[name]),
        }
        await self.api.patch(f"/api/v1/nodes/{name}/status", {"status": status})

    async def reboot(self, name: str) -> None:
        """Give the node another boot id."""
        self._boot_ids[name] = uuid.uuid4().hex
        await self.post_heartbeat(name)

    async def workload(
        self, name: str, nodes: list[str], *, min_available: int | None = None, **spec: JSON
    ) -> None:
        """Start a pod on each of these nodes, replaced elsewhere when it ends; wait until all are Ready."""
        owner = await self.api.post(
            f"/api/v1/namespaces/{self.namespace}/configmaps", {"metadata": {"name": name}}
        )
        self._workloads[name] = {"replicas": len(nodes), "uid": owner["metadata"]["uid"], "spec": spec}
        for node in nodes:
            await self.pod(f"{name}-{uuid.uuid4().hex[:5]}", node, workload=name, **spec)
        if min_available is not None:
            await self.budget(name, {"app": name}, minAvailable=min_available)
        await wait_in_loop_until(lambda: self._is_workload_ready(name, len(nodes)))
        if min_available is not None:
            await self.wait_for_budget(name, len(nodes))

    async def pod(
        self,
        name: str,
        node: str,
        *,
        workload: str = "",
        daemon: str = "",
        job: str = "",
        labels: dict[str, str] | None = None,
        annotations: dict[str, str] | None = None,
        local: bool = False,
        grace_s: int = 2,
    ) -> str:
        """Make one pod bound to a node and return its name."""
        meta: dict[str, JSON] = {
            "name": name,
            "labels": {"rolloutd-world": self.prefix, **(labels or {})},
            "annotations": annotations or {},
        }
        if workload:
            # No controller knows ConfigMaps, so nobody but the world replaces these pods.
            meta["labels"]["app"] = workload
            meta["ownerReferences"] = [_owner("v1", "ConfigMap", workload, self._workloads[workload]["uid"])]
        if job:
            meta["ownerReferences"] = [_owner("world.invalid/v1", "Job", job, str(uuid.uuid4()))]
        if daemon:
            # A group that no server has: neither the DaemonSet controller nor the collector acts on it.
            meta["labels"]["daemon"] = daemon
            meta["ownerReferences"] = [_owner("world.invalid/v1", "DaemonSet", daemon, str(uuid.uuid4()))]
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": meta,
            "spec": {
                "nodeName": node,
                "terminationGracePeriodSeconds": grace_s,
                "automountServiceAccountToken": False,
                "tolerations": [{"operator": "Exists"}],
                "containers": [{"name": "c", "image": "invalid.example/none"}],
                "volumes": [{"name": "scratch", "emptyDir": {}}] if local else [],
            },
        }
        await wait_in_loop_until(lambda: self._try_create_pod(body))
        return name

    async def finish(self, pod: str) -> None:
        """Let a pod's work be done: its containers have ended, its object stays."""
        await self.api.patch(f"{self.pods_path}/{pod}/status", {"status": {"phase": "Succeeded"}})

    async def budget(self, name: str, labels: dict[str, str], **spec: JSON) -> None:
        """Make a disruption budget over pods with these labels."""
        body = {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": {"name": name},
            "spec": {"selector": {"matchLabels": labels}, **spec},
        }
        await self.api.post(f"/apis/policy/v1/namespaces/{self.namespace}/poddisruptionbudgets", body)

    async def wait_for_budget(self, name: str, healthy: int) -> None:
        """Wait until a budget counts so many healthy pods."""
        path = f"/apis/policy/v1/namespaces/{self.namespace}/poddisruptionbudgets/{name}"

        async def look() -> bool:
            status = (await self.api.get(path)).get("status") or {}
            return bool(status.get("observedGeneration")) and status.get("currentHealthy") == healthy

        await wait_in_loop_until(look)

    # -- what people do, and what tests look at

    async def cordon(self, node: str, *, unschedulable: bool = True) -> JSON:
        """Cordon or uncordon, as kubectl does."""
        body = {"spec": {"unschedulable": True if unschedulable else None}}
        return await self.api.patch(f"/api/v1/nodes/{node}", body)

    async def annotate(self, node: str, key: str, value: str | None) -> None:
        """Write an annotation, as kubectl does."""
        await self.api.patch(f"/api/v1/nodes/{node}", {"metadata": {"annotations": {key: value}}})

    async def get_node(self, node: str) -> JSON:
        """Return a node."""
        return await self.api.get(f"/api/v1/nodes/{node}")

    async def pods_on(self, node: str) -> set[str]:
        """Name the world's pods on a node."""
        found = await self.api.get(self.pods_path, fieldSelector=f"spec.nodeName={node}")
        return {pod["metadata"]["name"] for pod in found["items"]}

    # -- playing kubelet, scheduler and controllers

    async def _run_controllers(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_pods())
            tasks.create_task(self._post_heartbeats())

    async def _post_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for node in self._nodes:
                async with self._heartbeat_lock:
                    if node not in self.silent_nodes:
                        with contextlib.suppress(OSError, aiohttp.ClientError, ApiError):
                            await self._patch_status(node, "True")

    async def _follow_pods(self) -> None:
        while True:
            try:
                page = await self.api.get(self.pods_path)
                self._pods = {pod["metadata"]["uid"]: pod for pod in page["items"]}
                for pod in page["items"]:
                    self._advance_pod(pod)
                async for event in self.api.watch(self.pods_path, page["metadata"]["resourceVersion"]):
                    self._on_pod_event(event)
            except (OSError, aiohttp.ClientError, ApiError, TimeoutError):
                await asyncio.sleep(RETRY_S)

    def _on_pod_event(self, event: JSON) -> None:
        if event["type"] not in ("ADDED", "MODIFIED", "DELETED"):
            return
        pod = event["object"]
        if event["type"] == "DELETED":
            self._pods.pop(pod["metadata"]["uid"], None)
        else:
            self._pods[pod["metadata"]["uid"]] = pod
        self._advance_pod(pod)

    def _advance_pod(self, pod: JSON) -> None:
        """Do what a pod needs now, once."""
        uid = pod["metadata"]["uid"]
        if uid not in self._pods or pod["spec"].get("nodeName") in self.silent_nodes:
            return
        if "deletionTimestamp" in pod["metadata"]:
            if uid not in self._ended:
                self._ended.add(uid)
                self._spawn(self._end_pod(pod))
                self._spawn(self._replace_pod(pod))
        elif pod["status"].get("phase") == "Pending" and uid not in self._started:
            self._started.add(uid)
            self._spawn(self._start_pod(pod))

    def _spawn(self, coro: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start_pod(self, pod: JSON) -> None:
        await asyncio.sleep(self.ready_s)
        path = f"{self.pods_path}/{pod['metadata']['name']}"
        with contextlib.suppress(ApiError):
            if (await self.api.get(path))["status"].get("phase", "Pending") == "Pending":
                await self.api.patch(f"{path}/status", {"status": _running_status()})

    async def _end_pod(self, pod: JSON) -> None:
        await asyncio.sleep(self.end_s)
        uid = pod["metadata"]["uid"]
        path = f"{self.pods_path}/{pod['metadata']['name']}"
        await self.api.delete(path, gracePeriodSeconds=0, preconditions={"uid": uid})

    async def _replace_pod(self, pod: JSON) -> None:
        """Start another pod of the same workload on the emptiest node that takes pods."""
        name = pod["metadata"].get("labels", {}).get("app")
        workload = self._workloads.get(name or "")
        if workload is None:
            return
        while True:
            found = await self.api.get("/api/v1/nodes", labelSelector=f"rolloutd-world={self.prefix}")
            open_ones = [node["metadata"]["name"] for node in found["items"] if _takes_pods(node)]
            if open_ones:
                break
            await asyncio.sleep(POLL_S)
        load = dict.fromkeys(open_ones, 0)
        for each in self._pods.values():
            node = each["spec"].get("nodeName")
            if node in load and each["metadata"].get("labels", {}).get("app") == name:
                load[node] += 1
        node = min(open_ones, key=lambda each: load[each])
        await self.pod(f"{name}-{uuid.uuid4().hex[:5]}", node, workload=name, **workload["spec"])

    # -- small questions

    async def _try_create_pod(self, pod: JSON) -> bool:
        """Create a pod; on a real server its namespace's service account may still be missing."""
        try:
            await self.api.post(self.pods_path, pod)
        except ApiError as said:
            if said.status == 403 and "serviceaccount" in str(said):
                return False
            raise
        return True

    async def _is_ready(self, name: str) -> bool:
        node = await self.get_node(name)
        return _ready_condition(node) and not node["spec"].get("taints")

    async def _is_workload_ready(self, workload: str, count: int) -> bool:
        found = await self.api.get(self.pods_path, labelSelector=f"app={workload}")
        return sum(_ready_condition(pod) for pod in found["items"]) == count


def _owner(version: str, kind: str, name: str, uid: str) -> JSON:
    return {"apiVersion": version, "kind": kind, "name": name, "uid": uid, "controller": True}


def _running_status() -> JSON:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": now}
    return {"phase": "Running", "conditions": [ready]}


def _takes_pods(node: JSON) -> bool:
    return not node["spec"].get("unschedulable") and _ready_condition(node)


def _ready_condition(thing: JSON) -> bool:
    conditions = (thing.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _node_info(boot_id: str) -> JSON:
    names = (
        "machineID",
        "systemUUID",
        "kernelVersion",
        "osImage",
        "containerRuntimeVersion",
        "kubeProxyVersion",
    )
    system = dict.fromkeys(names, "world")
    return {
        **system,
        "bootID": boot_id,
        "kubeletVersion": "v1.36.2",
        "operatingSystem": "linux",
        "architecture": "amd64",
    }
