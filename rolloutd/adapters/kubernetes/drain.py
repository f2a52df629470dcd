"""Drain of one node: evicts its pods within a timeout and reports blockers.

If a blocker is permanent, the first pass evicts nothing, because a drain that cannot end only harms other
pods. Otherwise it requests each eviction as soon as the pod's budget allows it, driven by two watches: the
cluster's budgets and the node's pods.  It ends when the objects of all evicted pods are deleted.  After a
timeout the next pass continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rolloutd.adapters.kubernetes.api_errors import ClusterUnreachable
from rolloutd.adapters.kubernetes.budgets import BudgetWatch
from rolloutd.adapters.kubernetes.cluster import Backoff, Cluster, api_path, join_names, join_sentences
from rolloutd.adapters.kubernetes.eviction import (
    EvictionAccepted,
    EvictionBlocked,
    PodGone,
    blocked_by_budgets,
    evict,
)
from rolloutd.adapters.kubernetes.list_watch import run_list_watch
from rolloutd.adapters.kubernetes.pods import (
    DrainPlan,
    EvictionPolicy,
    Pod,
    parse_pod,
    plan_drain,
    terminating_text,
)
from rolloutd.ports import Busy, Ok
from rolloutd.text import pluralize

JSON = Any

INITIAL_BACKOFF_S = 0.5
"""Pause before a refused eviction is retried; a change of a budget ends it."""

MAX_BACKOFF_S = 5.0
"""As kubectl."""

MAX_CONCURRENT_EVICTIONS = 4
"""Concurrent evictions of one node: a quarter of the cluster's requests, so that no drain starves another."""

BLOCKER_CONFIRM_S = 6.0
"""Minimum age of a permanent blocker: a budget between two replicas appears permanent for a moment."""

PODS_PATH = api_path("pods")


async def list_pods_on(cluster: Cluster, node: str, *, selector: str = "", namespace: str = "") -> list[Pod]:
    """Return the pods bound to a node, of all namespaces if none is given."""
    query = _bound_to_query(node) | ({"labelSelector": selector} if selector else {})
    page = await cluster.list(api_path("pods", namespace=namespace), query)
    return [parse_pod(pod) for pod in page.items]


async def dry_run_drain(budgets: BudgetWatch, node: str, policy: EvictionPolicy) -> Ok | Busy:
    """Return what would block a drain now; evicts nothing; raises ClusterUnreachable and ApiError."""
    async with budgets.opened():
        plan = plan_drain(await list_pods_on(budgets.cluster, node), policy)
        if plan.refused:
            return Busy(join_sentences(plan.refused))
        blocked = _blocked_pods(budgets, plan)
    if blocked:
        return Busy(join_sentences([each.text for each in blocked]))
    return Ok(f"nothing holds up {pluralize(len(plan.to_evict), 'pod')} on {node}")


async def drain(budgets: BudgetWatch, node: str, policy: EvictionPolicy, *, timeout_s: float) -> Ok | Busy:
    """Evict the node's pods within the timeout; Ok if no pod is left to evict.

    Raises ClusterUnreachable and ApiError if the pods cannot be listed.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    async with budgets.opened():
        blocked = await _find_permanent_blocker(budgets, node, policy, min(BLOCKER_CONFIRM_S, timeout_s))
        if blocked is not None:
            return blocked
        remaining_s = deadline - asyncio.get_running_loop().time()
        return await _DrainPass(budgets, node, policy).run(max(0.0, remaining_s))


async def _find_permanent_blocker(
    budgets: BudgetWatch, node: str, policy: EvictionPolicy, timeout_s: float
) -> Ok | Busy | None:
    """Return why no pod should be evicted; Ok if there is none, None if the drain can start."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while True:
        plan = plan_drain(await list_pods_on(budgets.cluster, node), policy)
        if plan.refused:
            return Busy(join_sentences(plan.refused))
        if plan.is_empty:
            return Ok(f"no pod is left on {node} that must go")
        permanent = [each.text for each in _blocked_pods(budgets, plan) if each.is_permanent]
        if not permanent:
            return None
        remaining_s = deadline - asyncio.get_running_loop().time()
        if remaining_s <= 0:
            return Busy(join_sentences(permanent))
        await budgets.wait_for_change(remaining_s)


def _blocked_pods(budgets: BudgetWatch, plan: DrainPlan) -> list[EvictionBlocked]:
    found = (_blocked(budgets, pod) for pod in plan.to_evict)
    return [each for each in found if each is not None]


def _blocked(budgets: BudgetWatch, pod: Pod) -> EvictionBlocked | None:
    """Return why the pod's eviction would be refused now; None if it can be requested."""
    covering = budgets.covering(pod)
    if len(covering) > 1 or budgets.blocking(pod) is not None:
        return blocked_by_budgets(pod, covering)
    return None


def _bound_to_query(node: str) -> dict[str, str]:
    return {"fieldSelector": f"spec.nodeName={node}"}


class _DrainPass:
    """One pass over one node; a WatchHandler of its pods."""

    def __init__(self, budgets: BudgetWatch, node: str, policy: EvictionPolicy) -> None:
        self._budgets = budgets
        self._cluster = budgets.cluster
        self._node = node
        self._policy = policy
        self._pods: dict[str, Pod] = {}
        self._blocked: dict[str, EvictionBlocked] = {}
        self._requested: set[str] = set()
        self._is_synced = False
        self._disconnect_reason = ""
        self._changed = asyncio.Event()
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_EVICTIONS)

    async def run(self, timeout_s: float) -> Ok | Busy:
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(
                    run_list_watch(self._cluster, PODS_PATH, _bound_to_query(self._node), self)
                )
                evictions = await self._evict_until_empty(tasks)
                for task in (watch, *evictions):
                    task.cancel()
        except TimeoutError:
            pass
        return self._result()

    # -- list_watch.WatchHandler

    def on_list(self, objects: Sequence[Mapping[str, JSON]]) -> None:
        self._pods = {pod["metadata"]["uid"]: parse_pod(pod) for pod in objects}
        self._is_synced = True
        self._changed.set()

    def on_event(self, kind: str, obj: Mapping[str, JSON]) -> None:
        pod = parse_pod(obj)
        if kind == "DELETED":
            self._pods.pop(pod.uid, None)
        else:
            self._pods[pod.uid] = pod
        self._changed.set()

    def on_connected(self) -> None:
        self._disconnect_reason = ""

    def on_watch_ended(self) -> None:
        """Keep the pods until the next watch: at worst a deleted pod is awaited a moment longer."""

    def on_disconnected(self, reason: str) -> None:
        self._disconnect_reason = reason

    async def _evict_until_empty(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        evictions: list[asyncio.Task[None]] = []
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not self._is_synced:
                continue
            plan = self._plan()
            if plan.is_empty:
                return evictions
            for pod in plan.to_evict:
                if pod.uid not in self._requested:
                    self._requested.add(pod.uid)
                    evictions.append(tasks.create_task(self._evict(pod)))

    def _plan(self) -> DrainPlan:
        return plan_drain(self._pods.values(), self._policy)

    async def _evict(self, pod: Pod) -> None:
        """Request the eviction until the pod is terminating or gone."""
        backoff = Backoff(INITIAL_BACKOFF_S, MAX_BACKOFF_S)
        while pod.uid in self._pods and not self._pods[pod.uid].terminating_since:
            blocked = _blocked(self._budgets, self._pods[pod.uid])
            if blocked is not None:
                self._blocked[pod.uid] = blocked
                await self._budgets.wait_for_change(MAX_BACKOFF_S)
                continue
            result = await self._request_eviction(pod)
            if isinstance(result, EvictionBlocked):
                self._blocked[pod.uid] = result
                wait_s = max(result.retry_after_s, backoff.next_s())
                # A change of a budget ends our own wait, but not one that the server requested.
                await (
                    asyncio.sleep(wait_s) if result.retry_after_s else self._budgets.wait_for_change(wait_s)
                )
                continue
            self._blocked.pop(pod.uid, None)
            if isinstance(result, PodGone):
                self._pods.pop(pod.uid, None)
                self._changed.set()
            return

    async def _request_eviction(self, pod: Pod) -> EvictionAccepted | PodGone | EvictionBlocked:
        with self._budgets.requesting(pod) as requests:
            async with self._slots:
                try:
                    result = await evict(self._cluster, pod)
                except ClusterUnreachable as error:
                    return EvictionBlocked(str(error))
            if isinstance(result, EvictionAccepted):
                requests.accepted += 1
            return result

    def _result(self) -> Ok | Busy:
        if not self._is_synced:
            return Busy(self._disconnect_reason or f"the pods of {self._node} could not be listed in time")
        plan = self._plan()
        if plan.is_empty:
            return Ok(f"{pluralize(len(self._requested), 'pod')} evicted from {self._node}")
        blocked = [self._blocked[pod.uid].text for pod in plan.to_evict if pod.uid in self._blocked]
        requested = [pod.id for pod in plan.to_evict if pod.uid not in self._blocked]
        parts = (
            join_sentences(plan.refused),
            join_sentences(blocked),
            f"{join_names(requested)} asked to end" if requested else "",
            terminating_text(plan.terminating),
            self._disconnect_reason,
        )
        return Busy("; ".join(part for part in parts if part))
