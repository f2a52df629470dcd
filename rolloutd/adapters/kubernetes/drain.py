"""Drain of one node: evicts its pods within a timeout and reports blockers.

If a blocker is permanent, the first pass evicts nothing, because a drain that cannot end only harms other
pods. Otherwise it requests each eviction as soon as the pod's budget allows it, driven by two watches: the
cluster's budgets and the node's pods.  It ends when the objects of all evicted pods are deleted.  After a
timeout the next pass continues.
"""

from __future__ import annotations

import asyncio

from rolloutd.adapters.kubernetes.api_errors import ClusterUnreachable
from rolloutd.adapters.kubernetes.budgets import BudgetWatch
from rolloutd.adapters.kubernetes.cluster import Backoff, join_names, join_sentences
from rolloutd.adapters.kubernetes.eviction import (
    EvictionAccepted,
    EvictionBlocked,
    PodGone,
    blocked_by_budgets,
    evict,
)
from rolloutd.adapters.kubernetes.node_pods import NodePods, list_pods_on
from rolloutd.adapters.kubernetes.pods import (
    DrainPlan,
    EvictionPolicy,
    Pod,
    plan_drain,
    terminating_text,
)
from rolloutd.ports import Busy, Ok
from rolloutd.text import pluralize

INITIAL_BACKOFF_S = 0.5
"""Pause before a refused eviction is retried; a change of a budget ends it."""

MAX_BACKOFF_S = 5.0
"""As kubectl."""

MAX_CONCURRENT_EVICTIONS = 4
"""Concurrent evictions of one node: a quarter of the cluster's requests, so that no drain starves another."""

BLOCKER_RECHECK_S = 30.0
"""Longest wait for a change of a budget before the blockers are judged again."""

BLOCKER_CONFIRM_S = 6.0
"""Minimum age of a permanent blocker: a budget between two replicas appears permanent for a moment."""


async def dry_run_drain(budgets: BudgetWatch, node: str, policy: EvictionPolicy) -> Ok | Busy:
    """Return what would block a drain now; evicts nothing; raises ClusterUnreachable and ApiError."""
    async with budgets.opened():
        plan = plan_drain(await list_pods_on(budgets.cluster, node), policy)
        permanent = _permanent_blockers(budgets, plan)
        blocked = _blocked_pods(budgets, plan)
    if permanent:
        return Busy(join_sentences(permanent), is_permanent=True)
    if blocked:
        return Busy(join_sentences([each.text for each in blocked]))
    return Ok(f"nothing holds up {pluralize(len(plan.to_evict), 'pod')} on {node}")


async def wait_until_unblocked(budgets: BudgetWatch, node: str, policy: EvictionPolicy) -> None:
    """Return when no pod of the node has a permanent blocker, as its pods and their budgets change."""
    pods = NodePods(budgets.cluster, node)

    async def pass_on_changes() -> None:
        while True:
            await budgets.wait_for_change(BLOCKER_RECHECK_S)
            pods.changed.set()

    async with budgets.opened(), asyncio.TaskGroup() as tasks:
        helpers = (tasks.create_task(pods.watch()), tasks.create_task(pass_on_changes()))
        while True:
            plan = plan_drain(pods.by_uid.values(), policy)
            if pods.is_synced and budgets.is_synced and not _permanent_blockers(budgets, plan):
                break
            await pods.changed.wait()
            pods.changed.clear()
        for helper in helpers:
            helper.cancel()


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
        if plan.is_empty:
            return Ok(f"no pod is left on {node} that must go")
        permanent = _permanent_blockers(budgets, plan)
        if not permanent:
            return None
        remaining_s = deadline - asyncio.get_running_loop().time()
        if plan.refused or remaining_s <= 0:
            return Busy(join_sentences(permanent), is_permanent=True)
        await budgets.wait_for_change(remaining_s)


def _permanent_blockers(budgets: BudgetWatch, plan: DrainPlan) -> list[str]:
    """Return one sentence for each pod that cannot leave until a person changes something."""
    return [*plan.refused, *(each.text for each in _blocked_pods(budgets, plan) if each.is_permanent)]


def _blocked_pods(budgets: BudgetWatch, plan: DrainPlan) -> list[EvictionBlocked]:
    found = (_blocked(budgets, pod) for pod in plan.to_evict)
    return [each for each in found if each is not None]


def _blocked(budgets: BudgetWatch, pod: Pod) -> EvictionBlocked | None:
    """Return why the pod's eviction would be refused now; None if it can be requested."""
    covering = budgets.covering(pod)
    if len(covering) > 1 or budgets.blocking(pod) is not None:
        return blocked_by_budgets(pod, covering)
    return None


class _DrainPass:
    """One pass over one node."""

    def __init__(self, budgets: BudgetWatch, node: str, policy: EvictionPolicy) -> None:
        self._budgets = budgets
        self._cluster = budgets.cluster
        self._node = node
        self._policy = policy
        self._pods = NodePods(budgets.cluster, node)
        self._blocked: dict[str, EvictionBlocked] = {}
        self._evictions: dict[str, asyncio.Task[None]] = {}
        self._is_hopeless = False
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_EVICTIONS)

    async def run(self, timeout_s: float) -> Ok | Busy:
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._pods.watch())
                draining = tasks.create_task(self._evict_until_empty(tasks))
                hopeless = tasks.create_task(self._wait_until_hopeless())
                await asyncio.wait((draining, hopeless), return_when=asyncio.FIRST_COMPLETED)
                for task in (watch, draining, hopeless, *self._evictions.values()):
                    task.cancel()
        except TimeoutError:
            pass
        return self._result()

    async def _evict_until_empty(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            await self._pods.changed.wait()
            self._pods.changed.clear()
            if not self._pods.is_synced:
                continue
            plan = self._plan()
            if plan.is_empty:
                return
            for pod in plan.to_evict:
                if pod.uid not in self._evictions:
                    self._evictions[pod.uid] = tasks.create_task(self._evict(pod))

    async def _wait_until_hopeless(self) -> None:
        """Return when a permanent blocker, which was not there at first, has lasted."""
        loop = asyncio.get_running_loop()
        since: float | None = None
        while True:
            if not _permanent_blockers(self._budgets, self._plan()):
                since = None
            elif since is None:
                since = loop.time()
            remaining_s = BLOCKER_RECHECK_S if since is None else since + BLOCKER_CONFIRM_S - loop.time()
            if remaining_s <= 0:
                self._is_hopeless = True
                return
            await self._budgets.wait_for_change(remaining_s)

    def _plan(self) -> DrainPlan:
        return plan_drain(self._pods.by_uid.values(), self._policy)

    async def _evict(self, pod: Pod) -> None:
        """Request the eviction until the pod is terminating or gone."""
        backoff = Backoff(INITIAL_BACKOFF_S, MAX_BACKOFF_S)
        # The dict is replaced by each list, so it is read again each time.
        while (present := self._pods.by_uid.get(pod.uid)) is not None and not present.terminating_since:
            blocked = _blocked(self._budgets, present)
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
                self._pods.remove(pod)
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
        disconnected = self._pods.disconnect_reason
        if not self._pods.is_synced:
            return Busy(disconnected or f"the pods of {self._node} could not be listed in time")
        plan = self._plan()
        if plan.is_empty:
            return Ok(f"{pluralize(len(self._evictions), 'pod')} evicted from {self._node}")
        blocked = [self._blocked[pod.uid].text for pod in plan.to_evict if pod.uid in self._blocked]
        requested = [pod.id for pod in plan.to_evict if pod.uid not in self._blocked]
        parts = (
            join_sentences(plan.refused),
            join_sentences(blocked),
            f"{join_names(requested)} asked to end" if requested else "",
            terminating_text(plan.terminating),
            disconnected,
        )
        return Busy("; ".join(part for part in parts if part), is_permanent=self._is_hopeless)
