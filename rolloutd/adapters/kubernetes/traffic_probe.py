"""Traffic probe `kubernetes`: selected pods on the node make it busy.

A pod counts from its binding until it has finished or is gone, also while it terminates: it still works.
Pods of DaemonSets and static pods never count.
"""

from __future__ import annotations

from collections.abc import Sequence

from rolloutd.adapters.kubernetes.api_errors import ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import Cluster, join_names
from rolloutd.adapters.kubernetes.cluster_registry import ClusterRegistry
from rolloutd.adapters.kubernetes.node_pods import list_pods_on
from rolloutd.adapters.kubernetes.pods import Pod
from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Busy, Ok, StepContext, Unknown


class KubernetesTrafficProbe:
    """ports.TrafficProbe by the pods that are bound to a node."""

    def __init__(self, clusters: ClusterRegistry) -> None:
        self._clusters = clusters

    async def probe(self, ctx: StepContext) -> Ok | Busy | Unknown:
        node, selector = ctx.host.name, str(ctx.params["pods"])
        try:
            cluster, name = self._clusters.resolve(ctx.host)
            running = await _list_running_pods(cluster, name, selector, ctx.params.get("namespaces") or ("",))
        except (NodeUnreachable, ClusterUnreachable) as error:
            return Unknown(f"{node}: traffic is unknown: {error}")
        except ApiError as error:
            return Unknown(f"{node}: traffic is unknown: cluster {cluster.name} returned {error}")
        if not running:
            return Ok(f"no pod of `{selector}` runs on {node}")
        pods_text = join_names([_pod_text(pod) for pod in running])
        sentence = f"pod {pods_text} runs" if len(running) == 1 else f"pods {pods_text} run"
        return Busy(f"{node} is busy: {sentence} there")


async def _list_running_pods(
    cluster: Cluster, node: str, selector: str, namespaces: Sequence[str]
) -> list[Pod]:
    found = [
        pod
        for namespace in namespaces
        for pod in await list_pods_on(cluster, node, selector=selector, namespace=namespace)
    ]
    running = (pod for pod in found if not pod.belongs_to_node and not pod.is_finished)
    return sorted(running, key=lambda pod: pod.id)


def _pod_text(pod: Pod) -> str:
    owner = f" ({pod.owner})" if pod.owner else ""
    return f"{pod.id}{owner}{', ending' if pod.terminating_since else ''}"
