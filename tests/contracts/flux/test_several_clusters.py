"""Changes of several clusters: what one has, or is called, changes nothing for another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from machines.model.node import NodeKind
from rolloutd.ports import Host, Ok
from tests.contracts.flux.environment import GOOD, NEWER, FluxEnvironment, ended, flux_environment
from tests.support.cluster_fleet import ClusterFleet
from tests.support.fake_kubernetes import FakeKubernetes


async def test_clusters_of_one_name_share_no_objects(env: FluxEnvironment) -> None:
    listed = {"hub": {"kubeconfig": env.kubeconfig, "labels": {}}}
    env.inventory = [
        SimpleNamespace(kind="kubeconfigs", params={"name": name, "every": 20.0, "clusters": listed})
        for name in ("one", "two")
    ]
    runner = env.open_runner()
    names = ("hub", "one/hub", "two/hub")
    clusters = {name: runner._store({"cluster_management": name}).cluster for name in names}
    assert clusters == dict(runner._clusters.clusters())


async def test_listed_cluster_has_its_modules_itself(env: FluxEnvironment) -> None:
    listed = {"edge-1": {"kubeconfig": env.kubeconfig, "labels": {}}}
    params = {"name": "edge", "every": 20.0, "clusters": listed}
    env.inventory = [SimpleNamespace(kind="kubeconfigs", params=params)]
    target = {**env.host.connection, "cluster_management": "edge/edge-1", "cluster_name": "edge-1"}
    request = replace(env.request("r1"), host=Host("edge-1", NodeKind.CLUSTER, connection=target))
    runner = env.open_runner()
    assert isinstance((await ended(runner, await runner.start(request))).result, Ok)
    assert "kubeConfig" not in (await env.fleet.get("kustomizations", "east-apps"))["spec"]


async def test_hub_without_controller_hides_no_run(env: FluxEnvironment, tmp_path: Path) -> None:
    first = env.open_runner()
    assert isinstance((await ended(first, await first.start(env.request("r1")))).result, Ok)
    async with FakeKubernetes() as bare:
        for group in [each for each in bare.server.groups if each.endswith("toolkit.fluxcd.io")]:
            bare.server.groups[group] = "not-served"
        params = {"name": "bare", "kubeconfig": bare.kubeconfig(tmp_path / "bare"), "prefix": ""}
        env.inventory = [SimpleNamespace(kind="clusterapi", params=params)]
        elsewhere = env.open_runner("two")
        assert isinstance((await ended(elsewhere, "r1")).result, Ok)


async def test_modules_are_listed_once_in_each_pass(tmp_path: Path) -> None:
    async with (
        FakeKubernetes() as server,
        ClusterFleet(server.kubeconfig(tmp_path / "hub")) as fleet,
        flux_environment(fleet, tmp_path / "hub", tmp_path) as env,
    ):
        runner = env.open_runner()
        for number, pin in enumerate((GOOD, NEWER)):
            asked = replace(env.request(f"r{number}", pin), rollout=f"rollout-{number}")
            assert isinstance((await ended(runner, await runner.start(asked))).result, Ok)
        for _ in range(2):
            server.server.answered.clear()
            sources = [each for each in await runner.list_artifacts() if each.name.startswith("source=")]
            assert len(sources) == 2
            for each in sources:
                assert not await runner.remove(each.name, unmodified_since=each.modified_at)
            requests = [each.request for each in server.server.answered]
            assert [each.resource for each in requests if each.verb == "list"].count("kustomizations") == 1


async def test_source_is_removed_where_helm_is_not_installed(tmp_path: Path) -> None:
    async with (
        FakeKubernetes() as server,
        ClusterFleet(server.kubeconfig(tmp_path / "hub")) as fleet,
        flux_environment(fleet, tmp_path / "hub", tmp_path) as env,
    ):
        runner = env.open_runner()
        assert isinstance((await ended(runner, await runner.start(env.request("r1")))).result, Ok)
        await fleet.delete("kustomizations", "east-apps")
        server.server.groups["helm.toolkit.fluxcd.io"] = "not-served"
        (source,) = [each for each in await runner.list_artifacts() if each.name.startswith("source=")]
        assert await runner.remove(source.name, unmodified_since=source.modified_at)
        server.server.groups["helm.toolkit.fluxcd.io"] = "v2"
        assert await fleet.list("gitrepositories") == []
