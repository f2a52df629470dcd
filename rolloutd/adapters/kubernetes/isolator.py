"""The isolator `kubernetes`: a node is cordoned and drained, and put back exactly as it was.

Parameters: `pods_with_local_storage` and `pods_without_controller`, each
`refuse` or `delete`.  `do` works for a while and says Busy while pods are left;
whoever calls it decides how long that may go on.  A server that is away for a
minute is waited for: nothing is decided from its silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rolloutd.adapters.kubernetes.answers import ASK_DOCTOR, ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import Cluster, patiently
from rolloutd.adapters.kubernetes.clusters import Clusters
from rolloutd.adapters.kubernetes.cordon import close, cordon_of, let_go, read_node, reopen
from rolloutd.adapters.kubernetes.drain import could_drain, drain, pods_on
from rolloutd.adapters.kubernetes.nodes import Cordon, Hand
from rolloutd.adapters.kubernetes.pods import Pod, Policy, sort_pods
from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Busy, Clock, Failed, Host, Look, Ok, StepContext, StepResult, Unknown

JSON = Any

PASS_S = 25.0
"""One `do`: a usual drain ends in one, and a person's word is noticed between two."""

PATIENCE_S = 90.0
"""How long a look or a put-back waits for an API server that is away: longer than a restart takes."""


class KubernetesIsolator:
    """ports.Isolator, ports.Rehearsal and ports.Keeping by cordon and eviction."""

    def __init__(
        self, clusters: Clusters, clock: Clock, *, pass_s: float = PASS_S, patience_s: float = PATIENCE_S
    ) -> None:
        self._clusters = clusters
        self._clock = clock
        self._pass_s = pass_s
        self._patience_s = patience_s

    async def look(self, ctx: StepContext) -> Look | Busy:
        """Say whether the node is cordoned by us and drained, and what was there before us."""
        cluster, name = self._clusters.of(ctx.host)
        try:
            return await patiently(lambda: self._look(ctx, cluster, name), for_s=self._patience_s)
        except (ClusterUnreachable, ApiError) as error:
            return Busy(_why(cluster, error))

    async def do(self, ctx: StepContext) -> StepResult:
        """Cordon, then drain for a while; gently: cordon only."""
        cluster, name = self._clusters.of(ctx.host)
        try:
            closed = await self._close(ctx, cluster, name)
            if ctx.gentle or isinstance(closed, Busy):
                return closed
            for_s = max(1.0, min(self._pass_s, ctx.deadline - self._clock.now()))
            drained = await drain(cluster, name, policy_of(ctx.params), for_s=for_s)
            if isinstance(drained, Busy):
                return drained
            # Somebody may have opened it while it was drained: what is closed now counts.
            closed = await self._close(ctx, cluster, name)
            return closed if isinstance(closed, Busy) else drained
        except (ClusterUnreachable, ApiError) as error:
            return Busy(_why(cluster, error))

    async def undo(self, ctx: StepContext) -> StepResult:
        """Uncordon what we cordoned, and take our annotation away."""
        cluster, name = self._clusters.of(ctx.host)
        before = read_prior(ctx.prior)
        try:
            return await patiently(
                lambda: reopen(cluster, name, rollout=ctx.rollout, was_closed=before.closed, held=ctx.held),
                for_s=self._patience_s,
            )
        except ApiError as error:
            if error.status == 404:
                return Ok(f"{name} is no longer in cluster {cluster.name}")
            return Failed(_why(cluster, error))
        except ClusterUnreachable as error:
            return Unknown(str(error))

    async def let_go(self, host: Host) -> StepResult:
        """Uncordon a node that stayed cordoned for a hold; see ports.Keeping."""
        cluster, name = self._clusters.of(host)
        try:
            return await let_go(cluster, name)
        except (ClusterUnreachable, ApiError) as error:
            return Busy(_why(cluster, error))

    async def could(self, ctx: StepContext) -> Ok | Busy:
        """Rehearse: say whether this node could be drained now; see ports.Rehearsal."""
        cluster, name = self._clusters.of(ctx.host)
        try:
            return await could_drain(cluster, name, policy_of(ctx.params))
        except ApiError as error:
            raise NodeUnreachable(_why(cluster, error)) from error

    async def _close(self, ctx: StepContext, cluster: Cluster, name: str) -> Ok | Busy:
        return await close(cluster, name, rollout=ctx.rollout, attempt=ctx.attempt, at=self._clock.now())

    async def _look(self, ctx: StepContext, cluster: Cluster, name: str) -> Look | Busy:
        node = await read_node(cluster, name)
        pods = await pods_on(cluster, name)
        cordon = cordon_of(cluster, node, ctx.rollout)
        left = sort_pods(pods, policy_of(ctx.params))
        was_ours = cordon.owner is not None and cordon.owner.rollout == ctx.rollout
        isolated = was_ours or ctx.prior is not None
        if cordon.hand is Hand.FOREIGN and isolated and left.empty:
            # Out of service as it should be, but by somebody else: not lost, and not ours to go on.
            return Busy(f"{name} is {cordon.text}")
        done = cordon.hand is Hand.OURS and left.empty
        still = "" if left.empty else "; pods are left that have to go"
        text = f"{name}: {cordon.text or cordon.hold or 'in service'}{still}"
        return Look(done, prior=_prior(node, cordon, pods) if ctx.prior is None else ctx.prior, text=text)


@dataclass(frozen=True, slots=True)
class Prior:
    """What was there before us: was it cordoned, which boot, which DaemonSets' pods, ready or not."""

    closed: bool = False
    boot_id: str = ""
    daemons: Mapping[str, bool] | None = None


def read_prior(prior: JSON) -> Prior:
    """Read a recorded prior state; where there is none, nothing is known of the pods."""
    if not isinstance(prior, dict):
        return Prior()
    return Prior(bool(prior.get("unschedulable")), str(prior.get("boot_id") or ""), prior.get("daemon_pods"))


def daemon_key(pod: Pod) -> str:
    """Name a DaemonSet's pod by what stays the same when it is made anew."""
    return f"{pod.namespace}/{pod.owner.partition(' ')[2]}"


def policy_of(params: Mapping[str, JSON]) -> Policy:
    """Read the plan's word on pods that lose something."""
    return Policy(
        delete_local_storage=params.get("pods_with_local_storage") == "delete",
        delete_without_controller=params.get("pods_without_controller") == "delete",
    )


def _prior(node: Mapping[str, JSON], cordon: Cordon, pods: list[Pod]) -> JSON:
    spec, status = node.get("spec") or {}, node.get("status") or {}
    closed = bool(spec.get("unschedulable"))
    if cordon.hand is Hand.OURS and cordon.owner is not None:
        closed = cordon.owner.unschedulable
    daemons: dict[str, bool] = {}
    for pod in pods:
        if pod.daemon and not pod.ending_since:
            daemons[daemon_key(pod)] = daemons.get(daemon_key(pod), True) and pod.ready
    return {
        "unschedulable": closed,
        "boot_id": (status.get("nodeInfo") or {}).get("bootID", ""),
        "daemon_pods": daemons,
    }


def _why(cluster: Cluster, error: ClusterUnreachable | ApiError) -> str:
    if isinstance(error, ClusterUnreachable):
        return str(error)
    return f"cluster {cluster.name} says {error}" + (f"; {ASK_DOCTOR}" if error.status == 403 else "")
