"""Pods of one node, kept up to date by a watch."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rolloutd.adapters.kubernetes.cluster import Cluster, api_path
from rolloutd.adapters.kubernetes.list_watch import WatchHandler, run_list_watch
from rolloutd.adapters.kubernetes.pods import Pod, parse_pod
from rolloutd.ports import JSON

PODS_PATH = api_path("pods")


async def list_pods_on(cluster: Cluster, node: str, *, selector: str = "", namespace: str = "") -> list[Pod]:
    """Return the pods bound to a node, of all namespaces if none is given."""
    query = _bound_to_query(node) | ({"labelSelector": selector} if selector else {})
    return (await cluster.list(api_path("pods", namespace=namespace), query, parse_pod)).items


class NodePods(WatchHandler):
    """The pods bound to one node, by uid.

    `changed` is set at each change; its one reader clears it.
    """

    def __init__(self, cluster: Cluster, node: str) -> None:
        self.by_uid: dict[str, Pod] = {}
        self.is_synced = False
        self.disconnect_reason = ""
        self.changed = asyncio.Event()
        self._cluster = cluster
        self._node = node

    async def watch(self) -> None:
        await run_list_watch(self._cluster, PODS_PATH, _bound_to_query(self._node), self)

    def remove(self, pod: Pod) -> None:
        """Drop a pod that is known to be gone before the watch reports it."""
        self.by_uid.pop(pod.uid, None)
        self.changed.set()

    def parse(self, obj: Mapping[str, JSON]) -> Pod:
        return parse_pod(obj)

    def on_list(self, objects: Sequence[Pod]) -> None:
        self.by_uid = {pod.uid: pod for pod in objects}
        self.is_synced = True
        self.changed.set()

    def on_event(self, kind: str, obj: Mapping[str, JSON]) -> None:
        pod = parse_pod(obj)
        if kind == "DELETED":
            self.by_uid.pop(pod.uid, None)
        else:
            self.by_uid[pod.uid] = pod
        self.changed.set()

    def on_connected(self) -> None:
        self.disconnect_reason = ""

    def on_disconnected(self, reason: str) -> None:
        self.disconnect_reason = reason


def _bound_to_query(node: str) -> dict[str, str]:
    return {"fieldSelector": f"spec.nodeName={node}"}
