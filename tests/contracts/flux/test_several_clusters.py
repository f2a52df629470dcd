"""Changes of several clusters: what one has, or is called, changes nothing for another."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from rolloutd.ports import Ok
from tests.contracts.flux.environment import FluxEnvironment, ended
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
