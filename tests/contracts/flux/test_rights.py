"""The shipped role grants the rights that are used, and no others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from rolloutd.adapters.clusters.cluster_watch import ClusterWatch
from rolloutd.adapters.clusters.inventory import ClusterInventory
from rolloutd.adapters.clusters.topology import TopologyRunner
from rolloutd.adapters.clusters.views import CLUSTER_API, parse_cluster
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.timers import SystemClock
from rolloutd.errors import RunnerUnavailable
from rolloutd.ports import Ok, PinnedSource, RunRequest
from tests.contracts.flux.environment import (
    ENDLESS,
    WAIT_S,
    FluxEnvironment,
    ended,
    flux_environment,
    until_says,
)
from tests.contracts.flux.test_helm_release import GOOD, request
from tests.support.cluster_fleet import ClusterFleet
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.fake_kubernetes.errors import ApiRefusal
from tests.support.fake_kubernetes.server import ApiRequest

MANIFEST = Path(__file__).parents[3] / "deploy/kubernetes/clusters.yaml"


def shipped_rules() -> list[dict[str, Any]]:
    documents = yaml.safe_load_all(MANIFEST.read_text())
    (role,) = (each for each in documents if each["kind"] == "Role")
    return [{**rule, "namespaces": ["fleet"]} for rule in role["rules"]]


def triples(rules: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


async def test_shipped_role_is_what_is_used(tmp_path: Path) -> None:
    async with FakeKubernetes() as server:
        admin = server.kubeconfig(tmp_path / "admin")
        token = server.token(shipped_rules())

        def used() -> set[tuple[str, str, str]]:
            requests = [each.request for each in server.server.answered if each.request.token == token]
            reviews = "selfsubjectaccessreviews"
            return {(each.group, each.resource, each.verb) for each in requests if each.resource != reviews}

        async with ClusterFleet(admin) as fleet:
            kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", token=token)
            async with flux_environment(fleet, kubeconfig, tmp_path) as env:
                await _use_everything(env, fleet, kubeconfig)
                async with asyncio.timeout(WAIT_S):  # a watch begins after the list that answers a question
                    while not triples(shipped_rules()) <= used():
                        await asyncio.sleep(0.02)
        assert [each for each in server.server.answered if each.code == 403] == []
        assert used() == triples(shipped_rules())


async def _use_everything(env: FluxEnvironment, fleet: ClusterFleet, kubeconfig: Path) -> None:
    cluster = Cluster("hub", kubeconfig)
    watch = ClusterWatch(
        cluster, SystemClock(), CLUSTER_API, parse_cluster, kind="clusterapi", namespace="fleet"
    )
    watch.is_enabled = False
    inventory = ClusterInventory(watch)
    await fleet.add_cluster("east")
    assert [each.name for each in await inventory.refresh()] == ["east"]
    assert await inventory.find_missing_prerequisites() == []
    await cluster.close()
    runner = env.open_runner()

    asks = (env.request("r1"), request(env, "r2", GOOD), env.request("r4"), request(env, "r5", GOOD))
    for asked in asks:
        assert isinstance((await ended(runner, await runner.start(asked))).result, Ok)
    # Another machine looks for the run among all modules.
    assert isinstance((await ended(env.open_runner("two"), "r5")).result, Ok)
    for module in (("helmreleases", "east-db"), ("kustomizations", "east-apps")):
        await fleet.delete(*module)
    for each in await runner.list_artifacts():
        await runner.remove(each.name, unmodified_since=each.modified_at)
    env.runner_type = TopologyRunner
    upgrade, params = env.open_runner("three"), {"version": "v1.30.0"}
    await upgrade.start(
        RunRequest("r3", env.host, PinnedSource("", ""), "", kind="clusterapi", params=params)
    )
    await until_says(upgrade, "r3", "Cluster")


async def test_lost_right_is_no_end_of_applied_run(tmp_path: Path) -> None:
    async with FakeKubernetes() as server:
        rules = shipped_rules()
        (modules,) = (each for each in rules if "kustomizations" in each["resources"])
        modules["verbs"].remove("patch")
        token = server.token(rules)
        kubeconfig = server.kubeconfig(tmp_path / "kubeconfig", token=token)
        async with (
            ClusterFleet(server.kubeconfig(tmp_path / "admin")) as fleet,
            flux_environment(fleet, kubeconfig, tmp_path) as env,
        ):
            runner = env.open_runner()
            await runner.start(env.request("r1", ENDLESS))
            await until_says(runner, "r1", "Progressing")

            def refuse(asked: ApiRequest) -> None:
                if (asked.verb, asked.resource, asked.token) == ("get", "kustomizations", token):
                    raise ApiRefusal(403, "forbidden")

            server.server.interceptors.append(refuse)
            await fleet.delete("kustomizations", "east-apps")
            with pytest.raises(RunnerUnavailable, match="forbidden"):
                await ended(runner, "r1")
            server.server.interceptors.remove(refuse)
            await until_says(runner, "r1", "Progressing")
