"""The check `kubernetes`: the node is Ready, and the pods that belong on it are there and ready.

Parameters: `ready`; `daemonsets_ready`: every DaemonSet's pod that was bound to
the node before it was isolated is bound and Ready again; `pods_ready`: a label
selector, whose pods on the node must all be Ready, one at least.  All is judged
from the node and its pods alone.  How long to keep asking is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rolloutd.adapters.kubernetes.answers import ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import Cluster, names, path_of
from rolloutd.adapters.kubernetes.clusters import Clusters
from rolloutd.adapters.kubernetes.cordon import read_node
from rolloutd.adapters.kubernetes.drain import pods_on
from rolloutd.adapters.kubernetes.isolator import Prior, daemon_key, read_prior
from rolloutd.adapters.kubernetes.nodes import readiness
from rolloutd.adapters.kubernetes.pods import Pod, read_pod
from rolloutd.counting import count
from rolloutd.ports import Failed, Ok, StepContext, Unknown

JSON = Any


class KubernetesCheck:
    """ports.Check of a node and its pods; `ctx.prior` is what the isolator found before it did anything."""

    def __init__(self, clusters: Clusters) -> None:
        self._clusters = clusters

    async def check(self, ctx: StepContext) -> Ok | Failed | Unknown:
        """Judge once; Unknown when the cluster did not answer."""
        cluster, name = self._clusters.of(ctx.host)
        try:
            return await self._judge(cluster, name, ctx)
        except ClusterUnreachable as error:
            return Unknown(str(error))
        except ApiError as error:
            if error.status == 404:
                return Failed(f"{name} is no longer in cluster {cluster.name}")
            said = f"cluster {cluster.name} says {error}"
            return Unknown(said) if error.may_pass else Failed(said)

    async def _judge(self, cluster: Cluster, name: str, ctx: StepContext) -> Ok | Failed:
        before = read_prior(ctx.prior)
        good: list[str] = []
        if ctx.params.get("ready", True):
            node = await read_node(cluster, name)
            ready, why = readiness(node)
            if not ready:
                return Failed(f"{name} is not Ready: {why}")
            good.append(f"{name} is Ready{_rebooted(node, before)}")
        if ctx.params.get("daemonsets_ready"):
            wrong, told = _judge_daemons(await pods_on(cluster, name), before)
            if wrong:
                return Failed(f"{name}: {wrong}")
            good.append(told)
        selector = ctx.params.get("pods_ready")
        if selector:
            pods = await _selected(cluster, name, str(selector))
            wrong = _judge_selected(pods, str(selector))
            if wrong:
                return Failed(f"{name}: {wrong}")
            good.append(f"{count(len(pods), 'Ready pod')} of `{selector}`")
        return Ok("; ".join(good))


def _rebooted(node: Mapping[str, JSON], before: Prior) -> str:
    boot_id = ((node.get("status") or {}).get("nodeInfo") or {}).get("bootID", "")
    return " after a reboot" if before.boot_id and boot_id != before.boot_id else ""


def _judge_daemons(pods: Sequence[Pod], before: Prior) -> tuple[str, str]:
    """Return what is wrong with the DaemonSets' pods, or nothing and what is right."""
    now: dict[str, bool] = {}
    for pod in pods:
        if pod.daemon and not pod.ending_since:
            now[daemon_key(pod)] = now.get(daemon_key(pod), True) and pod.ready
    wanted = {} if before.daemons is None else before.daemons
    wrong = [f"the pod of DaemonSet {key} is not back" for key in sorted(wanted) if key not in now]
    for key in sorted(now):
        if not now[key]:
            earlier = " and was not before either" if wanted.get(key) is False else ""
            wrong.append(f"the pod of DaemonSet {key} is not Ready{earlier}")
    if wrong:
        return names(wrong), ""
    known = "" if before.daemons is not None else ", judged by those that are there"
    return "", f"{count(len(now), 'Ready pod')} of DaemonSets{known}"


async def _selected(cluster: Cluster, node: str, selector: str) -> list[Pod]:
    query = {"fieldSelector": f"spec.nodeName={node}", "labelSelector": selector}
    page = await cluster.list(path_of("pods"), query)
    pods = [
        read_pod(pod)
        for pod in page.items
        if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")
    ]
    return [pod for pod in pods if not pod.ending_since]


def _judge_selected(pods: Sequence[Pod], selector: str) -> str:
    if not pods:
        return f"no pod of `{selector}` is bound to it"
    late = [pod.id for pod in pods if not pod.ready]
    return f"not Ready: {names(late)}" if late else ""
