"""Isolator `kubernetes`: cordons and drains a node, and restores its prior state.

`isolate` drains for one pass and returns Busy while pods are left; the driver decides how often to repeat it.
An API server that does not answer is retried: its silence decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from machines.model.selector import parse_selector
from machines.model.timefmt import format_duration
from rolloutd import ports
from rolloutd.adapters.kubernetes.api_errors import DOCTOR_HINT, ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.budgets import BudgetWatch
from rolloutd.adapters.kubernetes.cluster import Cluster, retry_transient
from rolloutd.adapters.kubernetes.cluster_registry import ClusterRegistry
from rolloutd.adapters.kubernetes.cordon import (
    cordon_node,
    prefer_no_schedule,
    read_cordon_state,
    read_node,
    release_node,
    uncordon_node,
)
from rolloutd.adapters.kubernetes.drain import drain, dry_run_drain, wait_until_unblocked
from rolloutd.adapters.kubernetes.node_pods import list_pods_on
from rolloutd.adapters.kubernetes.nodes import CordonOwner, CordonState
from rolloutd.adapters.kubernetes.pods import EvictionPolicy, Pod, plan_drain
from rolloutd.adapters.kubernetes.progress import clear_condition, set_condition, show_report
from rolloutd.errors import NodeUnreachable

DRAIN_PASS_S = 25.0
"""Limit of one `isolate`: most drains end in one pass, and the driver reads commands between two."""

API_RETRY_S = 90.0
"""Limit of the wait for an unreachable API server, longer than its restart takes."""

MAX_BLOCKER_WATCHES = 32
"""Blocked nodes whose pods are watched at once; the others wait, so that the API server keeps few watches."""


class KubernetesIsolator:
    """ports.Isolator by cordon and eviction, with dry runs, releases and progress reports."""

    def __init__(
        self,
        clusters: ClusterRegistry,
        clock: ports.Clock,
        *,
        drain_pass_s: float = DRAIN_PASS_S,
        api_retry_s: float = API_RETRY_S,
    ) -> None:
        self._clusters = clusters
        self._clock = clock
        self._drain_pass_s = drain_pass_s
        self._api_retry_s = api_retry_s
        self._budgets: dict[str, BudgetWatch] = {}
        self._blocker_watches = asyncio.Semaphore(MAX_BLOCKER_WATCHES)

    async def inspect(self, ctx: ports.StepContext) -> ports.IsolationStatus | ports.Busy:
        cluster, name = self._clusters.resolve(ctx.host)
        try:
            return await retry_transient(
                lambda: self._inspect(ctx, cluster, name), timeout_s=self._api_retry_s
            )
        except (ClusterUnreachable, ApiError) as error:
            return ports.Busy(_error_text(cluster, error))

    async def isolate(self, ctx: ports.StepContext) -> ports.StepResult:
        cluster, name = self._clusters.resolve(ctx.host)
        try:
            cordoned = await self._soft_stage(ctx, cluster, name) or await self._cordon(ctx, cluster, name)
            if isinstance(cordoned, ports.Busy):
                return cordoned
            await set_condition(cluster, name, self._clock.now())
            if ctx.cordon_only:
                return cordoned
            timeout_s = max(1.0, min(self._drain_pass_s, ctx.deadline - self._clock.now()))
            policy = eviction_policy(ctx.params, await self._cordoned_at(ctx, cluster, name))
            drained = await drain(self._budget_watch(cluster), name, policy, timeout_s=timeout_s)
            if isinstance(drained, ports.Busy):
                return drained
            # Another client may have uncordoned the node during the drain: only the cordon of now counts.
            cordoned = await self._cordon(ctx, cluster, name)
            return cordoned if isinstance(cordoned, ports.Busy) else drained
        except (ClusterUnreachable, ApiError) as error:
            return ports.Busy(_error_text(cluster, error))

    async def return_to_service(self, ctx: ports.StepContext) -> ports.StepResult:
        cluster, name = self._clusters.resolve(ctx.host)
        prior = parse_prior(ctx.prior)
        try:
            uncordoned = await retry_transient(
                lambda: uncordon_node(
                    cluster,
                    name,
                    rollout=isolation_owner(ctx),
                    was_cordoned=prior.was_cordoned,
                    hold_reason=ctx.hold_reason,
                ),
                timeout_s=self._api_retry_s,
            )
            await clear_condition(cluster, name)
            return uncordoned
        except ApiError as error:
            # A node that is gone has no cordon to restore.
            if error.status == 404:
                return ports.Ok(f"{name} is no longer in cluster {cluster.name}")
            return ports.Failed(_error_text(cluster, error))
        except ClusterUnreachable as error:
            # The patch may have been written before the connection was lost.
            return ports.Unknown(str(error))

    async def release(self, host: ports.Host) -> ports.StepResult:
        cluster, name = self._clusters.resolve(host)
        try:
            return await release_node(cluster, name)
        except (ClusterUnreachable, ApiError) as error:
            return ports.Busy(_error_text(cluster, error))

    async def report(self, host: ports.Host, report: ports.ProgressReport) -> None:
        cluster, name = self._clusters.resolve(host)
        await show_report(cluster, name, report)

    async def dry_run(self, ctx: ports.StepContext) -> ports.Ok | ports.Busy:
        cluster, name = self._clusters.resolve(ctx.host)
        policy = eviction_policy(ctx.params, self._clock.now())
        try:
            return await dry_run_drain(self._budget_watch(cluster), name, policy)
        except ApiError as error:
            raise NodeUnreachable(_error_text(cluster, error)) from error

    async def wait_until_unblocked(self, ctx: ports.StepContext) -> None:
        cluster, name = self._clusters.resolve(ctx.host)
        async with self._blocker_watches:
            await wait_until_unblocked(self._budget_watch(cluster), name, eviction_policy(ctx.params))

    def _budget_watch(self, cluster: Cluster) -> BudgetWatch:
        return self._budgets.setdefault(cluster.name, BudgetWatch(cluster))

    async def _soft_stage(self, ctx: ports.StepContext, cluster: Cluster, name: str) -> ports.Busy | None:
        """Keep new pods away softly for the plan's time; Busy while it is not over."""
        wanted_s = float(ctx.params.get("prefer_no_schedule") or 0.0)
        if not wanted_s:
            return None
        now = self._clock.now()
        since = await prefer_no_schedule(cluster, name, rollout=isolation_owner(ctx), at=now)
        remaining_s = min(wanted_s, since + wanted_s - now)  # a clock that was set back delays nothing
        wait_s = min(remaining_s, self._drain_pass_s, max(0.0, ctx.deadline - now))
        if wait_s > 0:
            await self._clock.sleep(wait_s)
        if remaining_s <= wait_s:
            return None
        return ports.Busy(
            f"{name} has a taint PreferNoSchedule for {format_duration(wanted_s)} before its cordon"
        )

    async def _cordoned_at(self, ctx: ports.StepContext, cluster: Cluster, name: str) -> float:
        """Return since when the node is isolated (epoch seconds), if the plan needs it."""
        now = self._clock.now()
        if ctx.params.get("wait_for_jobs") is None:
            return now
        record = read_cordon_state(cluster, await read_node(cluster, name), isolation_owner(ctx)).record
        return now if record is None else record.began_at(now)

    async def _cordon(self, ctx: ports.StepContext, cluster: Cluster, name: str) -> ports.Ok | ports.Busy:
        return await cordon_node(
            cluster, name, rollout=isolation_owner(ctx), attempt=ctx.attempt, at=self._clock.now()
        )

    async def _inspect(
        self, ctx: ports.StepContext, cluster: Cluster, name: str
    ) -> ports.IsolationStatus | ports.Busy:
        node = await read_node(cluster, name)
        pods = await list_pods_on(cluster, name)
        owner = isolation_owner(ctx)
        cordon = read_cordon_state(cluster, node, owner)
        plan = plan_drain(pods, eviction_policy(ctx.params))
        was_ours = cordon.record is not None and cordon.record.rollout == owner
        isolated_before = was_ours or ctx.prior is not None
        if cordon.cordon_owner is CordonOwner.OTHER and isolated_before and plan.is_empty:
            # Another client isolates the node: isolation is not lost, but the run must not continue.
            return ports.Busy(f"{name} is {cordon.text}")
        done = cordon.cordon_owner is CordonOwner.OURS and plan.is_empty
        suffix = "" if plan.is_empty else "; pods are left that have to go"
        text = f"{name}: {cordon.text or cordon.hold_reason or 'in service'}{suffix}"
        return ports.IsolationStatus(
            done,
            prior=_record_prior(owner, node, cordon, pods) if ctx.prior is None else ctx.prior,
            text=text,
        )


@dataclass(frozen=True, slots=True)
class PriorState:
    """The node before the isolation: its cordon, its boot, and its DaemonSets' pods with their readiness."""

    was_cordoned: bool = False
    boot_id: str = ""
    daemonset_pods: Mapping[str, bool] | None = None


def isolation_owner(ctx: ports.StepContext) -> str:
    """Return the rollout that the node's annotation names: the first of those that share its isolation."""
    # They all get the state that the first one found; a state that version 0.2 recorded names no rollout.
    named = ctx.prior.get("rollout") if isinstance(ctx.prior, dict) else None
    return str(named or ctx.rollout)


def parse_prior(prior: ports.JSON) -> PriorState:
    """Read a recorded prior state; without a record the pods are unknown."""
    if not isinstance(prior, dict):
        return PriorState()
    return PriorState(
        bool(prior.get("unschedulable")), str(prior.get("boot_id") or ""), prior.get("daemon_pods")
    )


def daemonset_readiness(pods: Iterable[Pod]) -> dict[str, bool]:
    """Return by DaemonSet whether its pods are Ready; a pod's replacement has another name, but its owner."""
    ready: dict[str, bool] = {}
    for pod in pods:
        if pod.is_daemonset_pod and not pod.terminating_since:
            key = f"{pod.namespace}/{pod.owner.partition(' ')[2]}"
            ready[key] = ready.get(key, True) and pod.is_ready
    return ready


def eviction_policy(params: Mapping[str, ports.JSON], cordoned_at: float = 0.0) -> EvictionPolicy:
    """Return the plan's choices about pods; the wait for Jobs counts from the cordon (epoch seconds)."""
    leave, jobs_s = params.get("leave_pods"), params.get("wait_for_jobs")
    return EvictionPolicy(
        delete_local_storage=params.get("pods_with_local_storage") == "delete",
        delete_without_controller=params.get("pods_without_controller") == "delete",
        evict_finished=params.get("finished_pods") == "evict",
        leave=None if leave is None else parse_selector(leave),
        grace_s=params.get("grace_period"),
        skip_terminating_after_s=params.get("skip_terminating_after"),
        jobs_until=0.0 if jobs_s is None else cordoned_at + jobs_s,
    )


def _record_prior(
    owner: str, node: Mapping[str, ports.JSON], cordon: CordonState, pods: list[Pod]
) -> ports.JSON:
    spec, status = node.get("spec") or {}, node.get("status") or {}
    # A cordon that we left for a hold is ours too: the node was in service before it.
    was_cordoned = bool(spec.get("unschedulable")) and not cordon.left_cordoned
    if cordon.cordon_owner is CordonOwner.OURS and cordon.record is not None:
        was_cordoned = cordon.record.was_cordoned
    return {
        "rollout": owner,
        "unschedulable": was_cordoned,
        "boot_id": (status.get("nodeInfo") or {}).get("bootID", ""),
        "daemon_pods": daemonset_readiness(pods),
    }


def _error_text(cluster: Cluster, error: ClusterUnreachable | ApiError) -> str:
    if isinstance(error, ClusterUnreachable):
        return str(error)
    return f"cluster {cluster.name} returned {error}" + (f"; {DOCTOR_HINT}" if error.status == 403 else "")
