"""Check `cluster`: the conditions of a whole cluster say that it may be used now."""

from __future__ import annotations

from machines.model.node import NodeHealth
from machines.model.rollout import FailureCode
from rolloutd.adapters.clusters.factory import ManagementClusters, management_clusters
from rolloutd.ports import AdapterContext, Failed, Ok, StepContext, Unknown


class ClusterCheck:
    """ports.Check by the watch of the management cluster; it sends no request."""

    def __init__(self, clusters: ManagementClusters) -> None:
        self._clusters = clusters

    async def check(self, ctx: StepContext) -> Ok | Failed | Unknown:
        seen = self._clusters.observe(ctx.host)
        if seen is None:
            return Unknown(f"{ctx.host.name} is in no watched management cluster")
        match seen.sight:
            case NodeHealth.UP:
                return Ok(seen.why)
            case NodeHealth.DOWN:
                return Failed(seen.why, code=FailureCode.LOST)
            case _:
                return Unknown(seen.why)


def make_check(context: AdapterContext) -> ClusterCheck:
    return ClusterCheck(management_clusters(context))
