"""Watch of a management cluster's clusters: one request for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from machines.model.node import Observation
from rolloutd.adapters.clusters.views import CLUSTER_API, CLUSTER_PROFILES, ClusterView
from rolloutd.adapters.kubernetes.api_errors import ApiError
from rolloutd.adapters.kubernetes.cluster import Cluster, api_path
from rolloutd.adapters.kubernetes.object_watch import REPORT_INTERVAL_S, ObjectWatch
from rolloutd.ports import JSON, Clock

VERSIONS: Mapping[str, tuple[str, ...]] = {
    CLUSTER_API: ("v1beta2", "v1beta1"),
    CLUSTER_PROFILES: ("v1alpha1",),
}
"""Versions that are understood, the preferred one first."""

RESOURCES: Mapping[str, str] = {CLUSTER_API: "clusters", CLUSTER_PROFILES: "clusterprofiles"}


class ClusterWatch(ObjectWatch[ClusterView]):
    """ports.Watch of the objects of one API group, in one namespace or in all."""

    def __init__(
        self,
        cluster: Cluster,
        clock: Clock,
        group: str,
        parse: Callable[[Mapping[str, JSON]], ClusterView],
        *,
        kind: str,
        namespace: str = "",
        prefix: str = "",
        report_interval_s: float = REPORT_INTERVAL_S,
    ) -> None:
        super().__init__(cluster, clock, prefix=prefix, report_interval_s=report_interval_s)
        self.group = group
        self.namespace = namespace
        self._kind = kind
        self._parse = parse
        self._path = ""
        self.version = ""
        """The version in which the objects are read, empty before the server was asked."""

    @property
    def source(self) -> str:
        return f"{self._kind}/{self.cluster.name}"

    async def find_path(self) -> str:
        """Return the path in the version that the server has; an upgrade may end the one before."""
        if not self._is_open or not self._path:
            self.version = await served_version(self.cluster, self.group)
            group = f"{self.group}/{self.version}"
            self._path = api_path(RESOURCES[self.group], namespace=self.namespace, group=group)
        return self._path

    def key_of(self, obj: Mapping[str, JSON]) -> str:
        return f"{obj['metadata']['namespace']}/{obj['metadata']['name']}"

    def fleet_name(self, key: str) -> str:
        return self.prefix + key.partition("/")[2]

    def parse(self, obj: Mapping[str, JSON]) -> ClusterView:
        return self._parse(obj)

    def observation_of(self, view: ClusterView, node: str, now: float) -> Observation:
        return view.to_observation(node, now, self.source)


async def served_version(cluster: Cluster, group: str) -> str:
    """Return the version of a group in which objects are read; raises ApiError without one."""
    answer = await cluster.get(f"/apis/{group}")
    served = {str(each.get("version")) for each in answer.get("versions") or ()}
    version = next((each for each in VERSIONS[group] if each in served), None)
    if version is None:
        text = f"{group} is served as {', '.join(sorted(served))}, not as {' or '.join(VERSIONS[group])}"
        raise ApiError(404, "NotFound", text)
    return version
