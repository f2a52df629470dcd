"""Changes of several clusters: what one has, or is called, changes nothing for another."""

from __future__ import annotations

from types import SimpleNamespace

from tests.contracts.flux.environment import FluxEnvironment


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
