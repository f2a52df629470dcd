"""Drives the pods off one node, for a bounded time, and says what holds the rest.

A pass rehearses first: when something can never go, nothing is evicted, because
a drain that cannot end only harms the pods that can.  Then every pod is evicted
on its own, and the node's pods are watched until the last one that has to go is
gone: the object deleted, not only told to end.  A pass that runs out of time
harms nothing; the next one takes up what is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rolloutd.adapters.kubernetes.answers import ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import Backoff, Cluster, names, path_of, sentences
from rolloutd.adapters.kubernetes.eviction import Accepted, Gone, Held, evict
from rolloutd.adapters.kubernetes.following import follow
from rolloutd.adapters.kubernetes.pods import Pod, Policy, Sorted, ending_text, read_pod, sort_pods
from rolloutd.counting import count
from rolloutd.ports import Busy, Ok

JSON = Any

FIRST_WAIT_S = 0.5
"""Before a pod held by its budget is asked for again: a replacement may be ready in a second."""

MOST_WAIT_S = 5.0
"""The longest such wait, as kubectl's."""

LASTING_S = 6.0
"""How long a hindrance must last: a budget between two replicas looks impossible for a moment."""

LASTING_LOOK_S = 1.5
"""Between two looks at such a hindrance."""

PODS = path_of("pods")


async def pods_on(cluster: Cluster, node: str, *, selector: str = "", namespace: str = "") -> list[Pod]:
    """Return the pods bound to a node: all, or those with these labels, of one namespace."""
    query = _bound_to(node) | ({"labelSelector": selector} if selector else {})
    page = await cluster.list(path_of("pods", namespace=namespace), query)
    return [read_pod(pod) for pod in page.items]


async def could_drain(cluster: Cluster, node: str, policy: Policy) -> Ok | Busy:
    """Rehearse a drain: Busy names what would hold it now; raises ClusterUnreachable and ApiError."""
    found = sort_pods(await pods_on(cluster, node), policy)
    if found.refused:
        return Busy(sentences(found.refused))
    held = await _rehearse(cluster, found.go)
    if held:
        return Busy(sentences([each.text for each in held]))
    return Ok(f"nothing holds back what is to leave {node} ({count(len(found.go), 'pod')})")


async def drain(cluster: Cluster, node: str, policy: Policy, *, for_s: float) -> Ok | Busy:
    """Drive the pods off for at most so long; Ok when none is left that has to go.

    Raises ClusterUnreachable and ApiError when the pods could not even be listed.
    """
    until = asyncio.get_running_loop().time() + for_s
    hindered = await _hindrance(cluster, node, policy, min(LASTING_S, for_s))
    if hindered is not None:
        return hindered
    left_s = until - asyncio.get_running_loop().time()
    return await _Pass(cluster, node, policy).run(max(0.0, left_s))


async def _hindrance(cluster: Cluster, node: str, policy: Policy, for_s: float) -> Ok | Busy | None:
    """Return why nothing should be evicted at all; Ok when there is nothing to evict."""
    until = asyncio.get_running_loop().time() + for_s
    while True:
        found = sort_pods(await pods_on(cluster, node), policy)
        if found.refused:
            return Busy(sentences(found.refused))
        if found.empty:
            return Ok(f"no pod is left on {node} that has to go")
        lasting = [each.text for each in await _rehearse(cluster, found.go) if each.lasting]
        if not lasting:
            return None
        if asyncio.get_running_loop().time() >= until:
            return Busy(sentences(lasting))
        await asyncio.sleep(LASTING_LOOK_S)


async def _rehearse(cluster: Cluster, pods: Sequence[Pod]) -> list[Held]:
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(_rehearse_one(cluster, pod)) for pod in pods]
    return [task.result() for task in asked if isinstance(task.result(), Held)]  # type: ignore[misc]


async def _rehearse_one(cluster: Cluster, pod: Pod) -> Accepted | Gone | Held:
    try:
        return await evict(cluster, pod, rehearse=True)
    except ClusterUnreachable as error:
        return Held(str(error))


def _bound_to(node: str) -> dict[str, str]:
    return {"fieldSelector": f"spec.nodeName={node}"}


class _Pass:
    """One pass over one node; a following.Listener to its pods."""

    def __init__(self, cluster: Cluster, node: str, policy: Policy) -> None:
        self._cluster = cluster
        self._node = node
        self._policy = policy
        self._pods: dict[str, Pod] = {}
        self._held: dict[str, Held] = {}
        self._asked: set[str] = set()
        self._listed = False
        self._blind = ""
        self._news = asyncio.Event()

    async def run(self, for_s: float) -> Ok | Busy:
        """Evict and wait until nothing is left that has to go, or for so long."""
        try:
            async with asyncio.timeout(for_s), asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(follow(self._cluster, PODS, _bound_to(self._node), self))
                evictions = await self._until_over(tasks)
                for task in (watching, *evictions):
                    task.cancel()
        except TimeoutError:
            pass
        return self._verdict()

    # -- following.Listener

    def listed(self, objects: Sequence[Mapping[str, JSON]]) -> None:
        """Take all pods of the node."""
        self._pods = {pod["metadata"]["uid"]: read_pod(pod) for pod in objects}
        self._listed = True
        self._news.set()

    def told(self, kind: str, thing: Mapping[str, JSON]) -> None:
        """Take one pod."""
        pod = read_pod(thing)
        if kind == "DELETED":
            self._pods.pop(pod.uid, None)
        else:
            self._pods[pod.uid] = pod
        self._news.set()

    def seeing(self) -> None:
        """Know that the pods can be seen."""
        self._blind = ""

    def ended(self) -> None:
        """Take the pods for what they were until the next watch: whoever is gone is still waited for."""

    def blind(self, why: str) -> None:
        """Know that they cannot."""
        self._blind = why

    # -- the pass

    async def _until_over(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        evictions: list[asyncio.Task[None]] = []
        while True:
            await self._news.wait()
            self._news.clear()
            if not self._listed:
                continue
            found = self._sorted()
            if found.empty:
                return evictions
            for pod in found.go:
                if pod.uid not in self._asked:
                    self._asked.add(pod.uid)
                    evictions.append(tasks.create_task(self._evict(pod)))

    def _sorted(self) -> Sorted:
        return sort_pods(self._pods.values(), self._policy)

    async def _evict(self, pod: Pod) -> None:
        """Ask until the pod was told to end, or is gone."""
        backoff = Backoff(FIRST_WAIT_S, MOST_WAIT_S)
        while pod.uid in self._pods and not self._pods[pod.uid].ending_since:
            try:
                answer = await evict(self._cluster, pod)
            except ClusterUnreachable as error:
                answer = Held(str(error))
            match answer:
                case Accepted():
                    self._held.pop(pod.uid, None)
                    return
                case Gone():
                    self._held.pop(pod.uid, None)
                    self._pods.pop(pod.uid, None)
                    self._news.set()
                    return
                case Held():
                    self._held[pod.uid] = answer
                    self._news.set()
                    await asyncio.sleep(max(answer.retry_after_s, backoff.next_s()))

    def _verdict(self) -> Ok | Busy:
        if not self._listed:
            return Busy(self._blind or f"the pods of {self._node} could not be listed in time")
        found = self._sorted()
        if found.empty:
            return Ok(f"{count(len(self._asked), 'pod')} evicted from {self._node}")
        held = [self._held[pod.uid].text for pod in found.go if pod.uid in self._held]
        asked = [pod.id for pod in found.go if pod.uid not in self._held]
        parts = (
            sentences(found.refused),
            sentences(held),
            f"{names(asked)} asked to end" if asked else "",
            ending_text(found.ending),
            self._blind,
        )
        return Busy("; ".join(part for part in parts if part))
