"""Check and traffic probe `kubernetes`: a node and its pods are Ready; selected pods make it busy.

The parameters are in registration.py.  The caller repeats the check until its deadline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from machines.model.rollout import FailureCode
from rolloutd.adapters.kubernetes.api_errors import ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import Cluster, join_names
from rolloutd.adapters.kubernetes.cluster_registry import ClusterRegistry
from rolloutd.adapters.kubernetes.cordon import read_node
from rolloutd.adapters.kubernetes.isolator import PriorState, daemonset_readiness, parse_prior
from rolloutd.adapters.kubernetes.node_pods import list_pods_on
from rolloutd.adapters.kubernetes.nodes import readiness
from rolloutd.adapters.kubernetes.pods import Pod
from rolloutd.errors import NodeUnreachable
from rolloutd.ports import JSON, Busy, Failed, Ok, StepContext, Unknown
from rolloutd.texts.formats import pluralize


class KubernetesCheck:
    """ports.Check of a node and its pods; `ctx.prior` is the state that the isolator recorded first."""

    def __init__(self, clusters: ClusterRegistry) -> None:
        self._clusters = clusters

    async def check(self, ctx: StepContext) -> Ok | Failed | Unknown:
        cluster, name = self._clusters.resolve(ctx.host)
        try:
            return await self._check_node(cluster, name, ctx)
        except ClusterUnreachable as error:
            return Unknown(str(error))
        except ApiError as error:
            if error.status == 404:
                return Failed(f"{name} is no longer in cluster {cluster.name}", code=FailureCode.LOST)
            text = f"cluster {cluster.name} returned {error}"
            return Unknown(text) if error.is_retryable else Failed(text, code=FailureCode.UNKNOWN)

    async def _check_node(self, cluster: Cluster, name: str, ctx: StepContext) -> Ok | Failed:
        prior = parse_prior(ctx.prior)
        passed: list[str] = []
        if ctx.params.get("ready", True):
            node = await read_node(cluster, name)
            ready, why = readiness(node)
            if not ready:
                return Failed(f"{name} is not Ready: {why}", code=FailureCode.LOST)
            passed.append(f"{name} is Ready{_reboot_suffix(node, prior)}")
        if ctx.params.get("daemonsets_ready"):
            problem, summary = _check_daemonset_pods(await list_pods_on(cluster, name), prior)
            if problem:
                return Failed(f"{name}: {problem}")
            passed.append(summary)
        selector = ctx.params.get("pods_ready")
        if selector:
            found = await list_pods_on(cluster, name, selector=str(selector))
            # A terminating pod is Ready until its end, so it proves nothing.
            pods = [pod for pod in found if not pod.is_finished and not pod.terminating_since]
            problem = _check_selected_pods(pods, str(selector))
            if problem:
                return Failed(f"{name}: {problem}")
            passed.append(f"{pluralize(len(pods), 'Ready pod')} of `{selector}`")
        return Ok("; ".join(passed))


def _reboot_suffix(node: Mapping[str, JSON], prior: PriorState) -> str:
    boot_id = ((node.get("status") or {}).get("nodeInfo") or {}).get("bootID", "")
    return " after a reboot" if prior.boot_id and boot_id != prior.boot_id else ""


def _check_daemonset_pods(pods: Sequence[Pod], prior: PriorState) -> tuple[str, str]:
    """Return the problem of the DaemonSets' pods, empty if there is none, and a summary."""
    now = daemonset_readiness(pods)
    expected = {} if prior.daemonset_pods is None else prior.daemonset_pods
    problems = [f"the pod of DaemonSet {key} is not back" for key in sorted(expected) if key not in now]
    for key in sorted(now):
        if not now[key]:
            earlier = " and was not before either" if expected.get(key) is False else ""
            problems.append(f"the pod of DaemonSet {key} is not Ready{earlier}")
    if problems:
        return join_names(problems), ""
    known = "" if prior.daemonset_pods is not None else ", judged by those that are there"
    return "", f"{pluralize(len(now), 'Ready pod')} of DaemonSets{known}"


def _check_selected_pods(pods: Sequence[Pod], selector: str) -> str:
    if not pods:
        return f"no pod of `{selector}` is bound to it"
    not_ready = [pod.id for pod in pods if not pod.is_ready]
    return f"not Ready: {join_names(not_ready)}" if not_ready else ""


class KubernetesTrafficProbe:
    """ports.TrafficProbe by the selected pods that are bound to a node.

    A pod counts until it has finished or is gone, also while it terminates: it still works.  Pods of
    DaemonSets and static pods never count.
    """

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
