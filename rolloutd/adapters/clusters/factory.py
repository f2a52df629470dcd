"""Factories of the adapters of whole clusters, which share their clients and watches."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import cast

from machines.model.node import NodeHealth, Observation
from machines.model.rollout import FailureCode
from rolloutd.adapters.clusters.cluster_watch import ClusterWatch
from rolloutd.adapters.clusters.inventory import MANAGEMENT_KEY, NAME_KEY, NAMESPACE_KEY, ClusterInventory
from rolloutd.adapters.clusters.listed import ListedClusters
from rolloutd.adapters.clusters.target_identity import TargetIdentities
from rolloutd.adapters.clusters.views import CLUSTER_API, CLUSTER_PROFILES, parse_cluster, parse_profile
from rolloutd.adapters.kubernetes.api_errors import ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.ports import JSON, AdapterContext, Clock, Failed, Host, Ok, RunnerContext, StepContext, Unknown

SHARED = "clusters"
"""Key of what the adapters of one daemon share."""

ANSWER_LIMIT_S = 20.0
"""How long one management cluster may take: more than its credential plugin, less than the check of all."""

_PARSERS = {"clusterapi": (CLUSTER_API, parse_cluster), "clusterprofile": (CLUSTER_PROFILES, parse_profile)}


class ManagementClusters:
    """The management clusters and lists of the settings, by name."""

    def __init__(self, sources: Sequence[tuple[str, Mapping[str, JSON]]], clock: Clock) -> None:
        self.watches: dict[str, ClusterWatch] = {}
        self.lists: dict[str, ListedClusters] = {}
        self.identities: dict[str, TargetIdentities] = {}
        for kind, params in sources:
            if kind == "kubeconfigs":
                self.lists[params["name"]] = ListedClusters(params, clock)
                continue
            group, parse = _PARSERS[kind]
            cluster = Cluster(params["name"], params["kubeconfig"], params.get("context"))
            namespace, prefix = params.get("namespace") or "", params["prefix"]
            watch = ClusterWatch(cluster, clock, group, parse, kind=kind, namespace=namespace, prefix=prefix)
            watch.is_enabled = False
            self.watches[cluster.name] = watch
            if params.get("check_kubeconfig"):
                self.identities[cluster.name] = TargetIdentities(cluster)

    def management_of(self, host: Host) -> Cluster | None:
        """Return the cluster in which the objects of a target are: its own for one of a list."""
        return self.clusters().get(str(host.connection.get(MANAGEMENT_KEY, "")))

    def clusters(self) -> Mapping[str, Cluster]:
        """Return all clusters that have objects of targets, by the name in their variables."""
        of_lists = {
            f"{name}/{target}": cluster
            for name, listed in self.lists.items()
            for target, cluster in listed.clusters.items()
        }
        return {name: watch.cluster for name, watch in self.watches.items()} | of_lists

    def answering(self) -> Mapping[str, Cluster]:
        """Return the clusters with objects of targets, without those of a list that do not answer."""
        silent = {
            f"{name}/{target}"
            for name, listed in self.lists.items()
            for target in listed.clusters
            if listed.observe(target).sight is not NodeHealth.UP
        }
        return {name: cluster for name, cluster in self.clusters().items() if name not in silent}

    def namespace_of(self, name: str) -> str:
        """Return the only namespace in which a management cluster's objects are, empty for all."""
        watch = self.watches.get(name)
        return "" if watch is None else watch.namespace

    def part_of(self, target: Mapping[str, JSON]) -> str:
        """Return what stops alone if a target's server is silent: its source, or the target of a list."""
        watch = self.watches.get(str(target.get(MANAGEMENT_KEY, "")))
        return str(target.get(NAME_KEY, "")) if watch is None else watch.source

    def is_listed(self, host: Host) -> bool:
        """Return whether the target is of a list, so that its objects are in the target itself."""
        return "/" in str(host.connection.get(MANAGEMENT_KEY, ""))

    async def find_silent(self) -> Mapping[str, str]:
        """Return why a management cluster does not answer, by its source."""
        answers = await asyncio.gather(*(_problem_of(each.cluster) for each in self.watches.values()))
        sources = (each.source for each in self.watches.values())
        return {source: problem for source, problem in zip(sources, answers, strict=True) if problem}

    def observe(self, host: Host) -> Observation | None:
        """Return what is known of a cluster; None for another node."""
        name = str(host.connection.get(MANAGEMENT_KEY, ""))
        watch, listed = self.watches.get(name), self.lists.get(name.partition("/")[0])
        if watch is not None:
            key = f"{host.connection.get(NAMESPACE_KEY)}/{host.connection.get(NAME_KEY)}"
            return watch.observe(key, host.name)
        return None if listed is None else listed.observe(host.name)

    async def close(self) -> None:
        for watch in self.watches.values():
            await watch.cluster.close()
        for listed in self.lists.values():
            await listed.close()


async def _problem_of(cluster: Cluster) -> str:
    """Return why a cluster does not answer, empty if it does."""
    try:
        async with asyncio.timeout(ANSWER_LIMIT_S):
            await cluster.get("/version")
    except TimeoutError:
        return f"cluster {cluster.name} does not answer within {ANSWER_LIMIT_S:g} s"
    except ClusterUnreachable as error:
        return str(error)
    except ApiError:
        pass  # a refusal is an answer too
    return ""


class ClusterObserver:
    """ports.Observer that returns the watches' current state and sends no request."""

    def __init__(self, clusters: ManagementClusters, clock: Clock) -> None:
        self._clusters = clusters
        self._clock = clock

    async def observe(self, hosts: Sequence[Host]) -> Sequence[Observation]:
        return [self._observe(host) for host in hosts]

    def _observe(self, host: Host) -> Observation:
        unwatched = "it is in no watched management cluster"
        return self._clusters.observe(host) or Observation(
            host.name, NodeHealth.UNKNOWN, self._clock.now(), unwatched
        )


def management_clusters(context: AdapterContext | RunnerContext) -> ManagementClusters:
    """Return the daemon's shared clusters; the first call creates them."""
    if SHARED not in context.shared:
        kinds = (*_PARSERS, "kubeconfigs")
        sources = [(each.kind, each.params) for each in context.settings.inventory if each.kind in kinds]
        context.shared[SHARED] = ManagementClusters(sources, context.clock)
    return cast(ManagementClusters, context.shared[SHARED])


def make_inventory(context: AdapterContext) -> ClusterInventory:
    clusters, name = management_clusters(context), context.params["name"]
    identities = clusters.identities.get(name)
    return ClusterInventory(clusters.watches[name], labels=context.params["labels"], identities=identities)


def make_watch(context: AdapterContext) -> ClusterWatch:
    watch = management_clusters(context).watches[context.params["name"]]
    watch.is_enabled = True
    return watch


def make_listed_inventory(context: AdapterContext) -> ListedClusters:
    return management_clusters(context).lists[context.params["name"]]


def make_observer(context: AdapterContext) -> ClusterObserver:
    return ClusterObserver(management_clusters(context), context.clock)


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
