"""The traffic probe `kubernetes`: pods of a kind that run on the node are its traffic.

Parameters: `pods`, a label selector, and `namespaces`, all where none is named.
A pod counts from when it is bound to the node until it has finished or is gone,
also while it is told to end: somebody's work is in it.  Pods of DaemonSets and
static pods are the node's own and never count.
"""

from __future__ import annotations

from collections.abc import Sequence

from rolloutd.adapters.kubernetes.answers import ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import Cluster, names
from rolloutd.adapters.kubernetes.clusters import Clusters
from rolloutd.adapters.kubernetes.drain import pods_on
from rolloutd.adapters.kubernetes.pods import Pod
from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Busy, Ok, StepContext, Unknown


class KubernetesProbe:
    """ports.TrafficProbe by the pods that are bound to a node."""

    def __init__(self, clusters: Clusters) -> None:
        self._clusters = clusters

    async def look(self, ctx: StepContext) -> Ok | Busy | Unknown:
        """Judge once; whatever keeps the pods from being listed makes it unknown."""
        node, selector = ctx.host.name, str(ctx.params["pods"])
        try:
            cluster, name = self._clusters.of(ctx.host)
            running = await _running(cluster, name, selector, ctx.params.get("namespaces") or ("",))
        except (NodeUnreachable, ClusterUnreachable) as error:
            return Unknown(f"nobody can say whether {node} is busy: {error}")
        except ApiError as error:
            said = f"cluster {cluster.name} says {error}"
            return Unknown(f"nobody can say whether {node} is busy: {said}")
        if not running:
            return Ok(f"no pod of `{selector}` runs on {node}")
        told = names([_words(pod) for pod in running])
        said = f"pod {told} runs" if len(running) == 1 else f"pods {told} run"
        return Busy(f"{node} is busy: {said} there")


async def _running(cluster: Cluster, node: str, selector: str, namespaces: Sequence[str]) -> list[Pod]:
    found = [
        pod
        for namespace in namespaces
        for pod in await pods_on(cluster, node, selector=selector, namespace=namespace)
    ]
    return sorted((pod for pod in found if not pod.stays), key=lambda pod: pod.id)


def _words(pod: Pod) -> str:
    owner = f" ({pod.owner})" if pod.owner else ""
    return f"{pod.id}{owner}{', ending' if pod.ending_since else ''}"
