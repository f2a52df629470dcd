"""A list of kubeconfigs: each cluster is known by its own API, and delays no other."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from machines.model.node import NodeHealth
from rolloutd.adapters.clusters.factory import ClusterCheck, ClusterObserver, ManagementClusters
from rolloutd.ports import CLUSTER_ID, Clock, Host, Unknown
from tests.support.fake_kubernetes import FakeKubernetes


async def test_listed_clusters_are_known_by_their_own_api(tmp_path: Path, clock: Clock) -> None:
    async with FakeKubernetes() as east, FakeKubernetes() as west:
        uids = {}
        for name, server in (("east", east), ("west", west)):
            made = server.objects.create("namespaces", {"metadata": {"name": "kube-system"}})
            uids[name] = made["metadata"]["uid"]
        listed = {
            name: {"kubeconfig": server.kubeconfig(tmp_path / name), "labels": {"region": name}}
            for name, server in (("east", east), ("west", west))
        }
        params = {"name": "all", "every": 20.0, "clusters": listed}
        clusters = ManagementClusters([("kubeconfigs", params)], clock)
        source = clusters.lists["all"]
        nodes = {each.name: each for each in await source.refresh()}
        assert {name: each.connection[CLUSTER_ID] for name, each in nodes.items()} == uids
        hosts = [Host(name, connection=each.connection) for name, each in nodes.items()]
        observer = ClusterObserver(clusters, clock)
        assert {each.sight for each in await observer.observe(hosts)} == {NodeHealth.UP}
        await west.stop()
        (missing,) = await source.find_missing_prerequisites()
        assert "west does not answer" in missing
        assert [each.sight for each in await observer.observe(hosts)] == [NodeHealth.UP, NodeHealth.DOWN]
        # Its identity is still the one that was read: another cluster behind its address would differ.
        assert {each.name: each.connection[CLUSTER_ID] for each in await source.refresh()} == uids
        assert clusters.management_of(hosts[0]) is source.clusters["east"]
        await clusters.close()


@pytest.mark.parametrize("rules", [None, []], ids=["expired-token", "lost-right"])
async def test_refused_account_is_no_outage_of_cluster(
    tmp_path: Path, clock: Clock, rules: list[object] | None
) -> None:
    async with FakeKubernetes() as server:
        token = "expired" if rules is None else server.token(rules)
        listed = {"east": {"kubeconfig": server.kubeconfig(tmp_path / "east", token=token), "labels": {}}}
        params = {"name": "all", "every": 20.0, "clusters": listed}
        clusters = ManagementClusters([("kubeconfigs", params)], clock)
        (node,) = await clusters.lists["all"].refresh()
        host = Host("east", connection=node.connection)
        (seen,) = await ClusterObserver(clusters, clock).observe([host])
        assert (seen.sight, str(401 if rules is None else 403) in seen.why) == (NodeHealth.UNKNOWN, True)
        assert isinstance(await ClusterCheck(clusters).check(SimpleNamespace(host=host)), Unknown)  # type: ignore[arg-type]
        await clusters.close()


async def test_hub_that_never_answers_stops_no_other(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    monkeypatch.setattr("rolloutd.adapters.clusters.factory.ANSWER_LIMIT_S", 2.0)
    async with FakeKubernetes() as server, await asyncio.start_server(keep_silent, "127.0.0.1", 0) as silent:
        answering, hung = server.kubeconfig(tmp_path / "answering"), tmp_path / "hung"
        port = silent.sockets[0].getsockname()[1]
        hung.write_text(re.sub(r"127\.0\.0\.1:\d+", f"127.0.0.1:{port}", answering.read_text()))
        hubs = {"answering": answering, "hung": hung}
        params = [{"name": name, "kubeconfig": path, "prefix": ""} for name, path in hubs.items()]
        clusters = ManagementClusters([("clusterapi", each) for each in params], clock)
        async with asyncio.timeout(10.0):
            problems = await clusters.find_silent()
        assert problems == {"clusterapi/hung": "cluster hung does not answer within 2 s"}
        await clusters.close()
