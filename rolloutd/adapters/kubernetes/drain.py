"""Drain of one node: evicts its pods within a timeout and reports blockers.

If a blocker is permanent, the first pass evicts nothing, because a drain that cannot end only harms other
pods. Otherwise it requests each eviction as soon as the pod's budget allows it, driven by two watches: the
cluster's budgets and the node's pods.  It ends when the objects of all evicted pods are deleted.  After a
timeout the next pass continues.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial

from rolloutd.adapters.kubernetes.api_errors import DOCTOR_HINT, ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.budgets import POLICY_GROUP, Budget, BudgetWatch
from rolloutd.adapters.kubernetes.cluster import Backoff, Cluster, api_path, join_names, join_sentences
from rolloutd.adapters.kubernetes.node_pods import NodePods, list_pods_on
from rolloutd.adapters.kubernetes.pods import DrainPlan, EvictionPolicy, Pod, plan_drain, terminating_text
from rolloutd.ports import JSON, Busy, Ok
from rolloutd.texts.formats import pluralize

INITIAL_BACKOFF_S = 0.5
"""Pause before a refused eviction is retried; a change of a budget ends it."""

MAX_BACKOFF_S = 5.0
"""As kubectl."""

MAX_CONCURRENT_EVICTIONS = 4
"""Concurrent evictions of one node: a quarter of the cluster's requests, so that no drain starves another."""

BLOCKER_RECHECK_S = 30.0
"""Longest wait for a change of a budget before the blockers are judged again."""

HOPELESS_CHECK_S = 2.0
"""Interval at which a drain checks for a permanent blocker that was not there when it began."""

BLOCKER_CONFIRM_S = 6.0
"""Minimum age of a permanent blocker: a budget between two replicas appears permanent for a moment."""

_OTHER_UID = re.compile(r"\bUID in (the )?precondition\b")
"""What the API server says of a pod that has the name but not the uid of the eviction."""


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
            # Without a list of both, the absence of a blocker proves nothing.
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
    blockers = budgets.blockers(pod)
    return blocked_by_budgets(pod, blockers) if blockers else None


def _finish_request(finish: Callable[[bool], None], task: asyncio.Task[bool]) -> None:
    finish(not task.cancelled() and task.exception() is None and task.result())


@dataclass(slots=True)
class _Refusal:
    """An eviction that the server refused although no budget that we know did."""

    blocked: EvictionBlocked
    backoff: Backoff = field(default_factory=lambda: Backoff(INITIAL_BACKOFF_S, MAX_BACKOFF_S))
    retry_at: float = 0.0


class _DrainPass:
    """One pass over one node.

    One loop decides after each change which evictions to request.
    """

    def __init__(self, budgets: BudgetWatch, node: str, policy: EvictionPolicy) -> None:
        self._budgets = budgets
        self._cluster = budgets.cluster
        self._node = node
        self._policy = policy
        self._pods = NodePods(budgets.cluster, node)
        self._requested: dict[str, asyncio.Task[bool]] = {}
        self._refusals: dict[str, _Refusal] = {}
        self._is_hopeless = False
        self._evicted = 0
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_EVICTIONS)

    async def run(self, timeout_s: float) -> Ok | Busy:
        try:
            async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
                draining = tasks.create_task(self._evict_until_empty(tasks))
                hopeless = tasks.create_task(self._wait_until_hopeless())
                watches = (
                    tasks.create_task(self._pods.watch()),
                    tasks.create_task(self._pass_on_budget_changes()),
                )
                await asyncio.wait((draining, hopeless), return_when=asyncio.FIRST_COMPLETED)
                for task in (draining, hopeless, *watches, *self._requested.values()):
                    task.cancel()
        except TimeoutError:
            # The pass is over, not the drain: the next pass counts the pods that end meanwhile.
            pass
        return self._result()

    async def _pass_on_budget_changes(self) -> None:
        while True:
            await self._budgets.wait_for_change(MAX_BACKOFF_S)
            # A change of a budget ends our own wait, but not one that the server requested.
            for refusal in self._refusals.values():
                if not refusal.blocked.retry_after_s:
                    refusal.retry_at = 0.0
            self._pods.changed.set()

    async def _evict_until_empty(self, tasks: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._pods.changed.wait()
            self._pods.changed.clear()
            # Before the first list, an empty list would count as drained.
            if not self._pods.is_synced:
                continue
            plan = self._plan()
            if plan.is_empty:
                return
            for pod in plan.to_evict:
                refusal = self._refusals.get(pod.uid)
                is_waiting = refusal is not None and loop.time() < refusal.retry_at
                if pod.uid in self._requested or is_waiting or self._budgets.blockers(pod):
                    continue
                finish = self._budgets.count_request(pod)
                # By a callback, because a task that is cancelled before it begins runs no `finally`.
                self._requested[pod.uid] = task = tasks.create_task(self._evict(pod))
                task.add_done_callback(partial(_finish_request, finish))

    async def _wait_until_hopeless(self) -> None:
        """Return when a permanent blocker, which was not there at first, has lasted."""
        loop = asyncio.get_running_loop()
        since: float | None = None
        while since is None or loop.time() < since + BLOCKER_CONFIRM_S:
            await asyncio.sleep(HOPELESS_CHECK_S)
            if not _permanent_blockers(self._budgets, self._plan()):
                since = None
            elif since is None:
                since = loop.time()
        self._is_hopeless = True

    def _plan(self) -> DrainPlan:
        return plan_drain(self._pods.by_uid.values(), self._policy)

    async def _evict(self, pod: Pod) -> bool:
        """Request the eviction once and return whether it was accepted; else the loop tries again later."""
        async with self._slots:
            try:
                result = await evict(self._cluster, pod, grace_s=self._policy.grace_s)
            except ClusterUnreachable as error:
                result = EvictionBlocked(str(error))
        if result is Evicted.GONE:
            self._pods.remove(pod)
        elif isinstance(result, EvictionBlocked):
            loop = asyncio.get_running_loop()
            refusal = self._refusals.setdefault(pod.uid, _Refusal(result))
            refusal.blocked = result
            wait_s = max(result.retry_after_s, refusal.backoff.next_s())
            refusal.retry_at = loop.time() + wait_s
            del self._requested[pod.uid]
            # The loop sleeps until a change, and the end of this wait is one.
            loop.call_later(wait_s, self._pods.changed.set)
        is_accepted = result is Evicted.ACCEPTED
        self._evicted += is_accepted
        return is_accepted

    def _result(self) -> Ok | Busy:
        disconnected = self._pods.disconnect_reason
        if not self._pods.is_synced:
            text = disconnected or f"the pods of {self._node} could not be listed in time"
            return Busy(text, moved=self._evicted)
        plan = self._plan()
        if plan.is_empty:
            return Ok(f"{pluralize(len(self._requested), 'pod')} evicted from {self._node}")
        blocked = {pod.uid: self._blocker_text(pod) for pod in plan.to_evict}
        requested = [pod.id for pod in plan.to_evict if not blocked[pod.uid]]
        parts = (
            join_sentences(plan.refused),
            join_sentences([text for text in blocked.values() if text]),
            f"{join_names(requested)} asked to end" if requested else "",
            terminating_text(plan.terminating),
            f"waits for {join_names([pod.id for pod in plan.finishing])} to finish" if plan.finishing else "",
            disconnected,
        )
        text = "; ".join(part for part in parts if part)
        return Busy(text, is_permanent=self._is_hopeless, moved=self._evicted)

    def _blocker_text(self, pod: Pod) -> str:
        blocked = _blocked(self._budgets, pod)
        if blocked is None and pod.uid in self._refusals and pod.uid not in self._requested:
            blocked = self._refusals[pod.uid].blocked
        return "" if blocked is None else blocked.text


class Evicted(Enum):
    """An eviction that need not be repeated."""

    ACCEPTED = auto()
    """The server accepted it; the pod is terminating, not gone."""
    GONE = auto()
    """The pod no longer exists; one of the same name is another pod."""


@dataclass(frozen=True, slots=True)
class EvictionBlocked:
    """The server refuses the eviction; if `is_permanent`, until a person changes something."""

    text: str
    is_permanent: bool = False
    retry_after_s: float = 0.0


async def evict(cluster: Cluster, pod: Pod, *, grace_s: int | None = None) -> Evicted | EvictionBlocked:
    """Request the eviction of the pod with this uid once; raises ClusterUnreachable.

    `grace_s` replaces the pod's own grace period.
    """
    # By uid: the next pod of a StatefulSet has the same name and must not go for its predecessor.
    options: dict[str, JSON] = {"preconditions": {"uid": pod.uid}}
    if grace_s is not None:
        options["gracePeriodSeconds"] = grace_s
    body: dict[str, JSON] = {
        "apiVersion": POLICY_GROUP,
        "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "deleteOptions": options,
    }
    path = api_path("pods", pod.name, namespace=pod.namespace, subresource="eviction")
    try:
        await cluster.request("POST", path, body=body, tries=1)
    except ApiError as error:
        return _classify_error(pod, error)
    return Evicted.ACCEPTED


def blocked_by_budgets(pod: Pod, budgets: list[Budget]) -> EvictionBlocked:
    """Return the refusal that the API server would give."""
    owner = f" (pod of {pod.owner})" if pod.owner else " (pod without a controller)"
    if len(budgets) > 1:
        names = " and ".join(sorted(each.id for each in budgets))
        text = f"{pod.id} is held by two budgets ({names}), which no eviction can satisfy{owner}"
        return EvictionBlocked(f"{text}; their owner must remove one", is_permanent=True)
    [budget] = budgets
    text = f"{pod.id} is held by budget {budget.id}"
    if not budget.is_observed:
        return EvictionBlocked(f"{text}, which was just changed and is still being processed{owner}")
    text += f": needs {budget.desired} healthy, has {budget.healthy}{owner}"
    if budget.permanent_reason:
        return EvictionBlocked(f"{text}, permanently: {budget.permanent_reason}", is_permanent=True)
    return EvictionBlocked(text)


def _classify_error(pod: Pod, error: ApiError) -> Evicted | EvictionBlocked:
    wait_s = error.retry_after_s or 0.0
    # Any conflict is a 409, and its message has the pod's name: only these words are those of our uid.
    if error.status == 404 or (error.status == 409 and _OTHER_UID.search(error.message)):
        return Evicted.GONE
    if "DisruptionBudget" in error.causes:
        message = error.causes["DisruptionBudget"] or error.message
        return EvictionBlocked(f"{pod.id} is held by a budget: {message}", retry_after_s=wait_s)
    if "NamespaceTerminating" in error.causes:
        text = f"{pod.id} is in a namespace that is being deleted, and goes with it"
        return EvictionBlocked(text, retry_after_s=wait_s)
    if error.status == 403:
        text = f"rolloutd may not evict {pod.id}: {error.message}; {DOCTOR_HINT}"
        return EvictionBlocked(text, is_permanent=True)
    if error.is_flow_control:
        return EvictionBlocked(f"{pod.id}: the API server is too busy", retry_after_s=max(1.0, wait_s))
    return EvictionBlocked(f"{pod.id} could not be evicted: {error}", retry_after_s=wait_s)
