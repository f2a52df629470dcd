"""A kubeconfig Secret of another cluster is noticed, and never acted on."""

from __future__ import annotations

import base64
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from machines.model.rollout import FailureCode
from rolloutd.adapters.clusters.cluster_watch import ClusterWatch
from rolloutd.adapters.clusters.inventory import ClusterInventory
from rolloutd.adapters.clusters.object_runner import ObjectRunner
from rolloutd.adapters.clusters.target_identity import TargetIdentities
from rolloutd.adapters.clusters.views import CLUSTER_API, parse_cluster
from rolloutd.adapters.kubernetes.api_errors import ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.errors import RunnerUnavailable
from rolloutd.ports import CLUSTER_ID, Clock, Failed, Ok
from tests.contracts.flux.environment import ENDLESS, FluxEnvironment, ended, flux_environment, until_says
from tests.support.cluster_fleet import ClusterFleet
from tests.support.fake_kubernetes import FakeKubernetes


@dataclass
class Targets:
    """A management cluster with one cluster `east`, and two API servers that its Secret may be of."""

    env: FluxEnvironment
    inventory: ClusterInventory
    identities: TargetIdentities
    servers: dict[str, FakeKubernetes]
    uids: dict[str, str]
    directory: Path

    async def use(self, text: str) -> None:
        """Write the kubeconfig Secret of east."""
        path = f"/api/v1/namespaces/{self.env.fleet.namespace}/secrets"
        api = self.env.fleet.api
        if await api.find(f"{path}/east-kubeconfig"):
            await api.delete(f"{path}/east-kubeconfig")
        data = {"value": base64.b64encode(text.encode()).decode()}
        meta = {"name": "east-kubeconfig"}
        await api.post(path, {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data})

    def kubeconfig(self, name: str) -> str:
        return self.servers[name].kubeconfig(self.directory / f"of-{name}").read_text()

    async def identity(self) -> object:
        (node,) = await self.inventory.refresh()
        return node.connection.get(CLUSTER_ID)

    def open_runner(self, identity: object) -> ObjectRunner:
        """Return a runner whose target has this identity on record."""
        runner = self.env.open_runner()
        runner._clusters.identities["hub"] = self.identities
        self.env.identity = str(identity)
        return runner


@pytest.fixture
async def targets(
    fleet: ClusterFleet, kubeconfig: Path, cluster: Cluster, clock: Clock, tmp_path: Path
) -> AsyncIterator[Targets]:
    async with AsyncExitStack() as stack:
        servers = {name: await stack.enter_async_context(FakeKubernetes()) for name in ("east", "west")}
        uids = {
            name: server.objects.create("namespaces", {"metadata": {"name": "kube-system"}})["metadata"][
                "uid"
            ]
            for name, server in servers.items()
        }
        env = await stack.enter_async_context(flux_environment(fleet, kubeconfig, tmp_path))
        await fleet.add_cluster("east")
        watch = ClusterWatch(
            cluster, clock, CLUSTER_API, parse_cluster, kind="clusterapi", namespace=fleet.namespace
        )
        watch.is_enabled = False
        identities = TargetIdentities(cluster)
        inventory = ClusterInventory(watch, identities=identities)
        yield Targets(env, inventory, identities, servers, uids, tmp_path)


async def test_identity_is_what_kubeconfig_reaches(targets: Targets) -> None:
    assert await targets.identity() is None
    for name in ("east", "west"):
        await targets.use(targets.kubeconfig(name))
        assert await targets.identity() == targets.uids[name]
    await targets.servers["west"].stop()
    assert await targets.identity() == targets.uids["west"], "one that is silent keeps its identity"


async def test_wrong_cluster_is_never_acted_on(targets: Targets) -> None:
    await targets.use(targets.kubeconfig("east"))
    runner = targets.open_runner(await targets.identity())
    assert isinstance((await ended(runner, await runner.start(targets.env.request("r1")))).result, Ok)
    await targets.use(targets.kubeconfig("west"))
    result = (await ended(runner, await runner.start(targets.env.request("r2", values={"a": "b"})))).result
    assert isinstance(result, Failed)
    assert (result.code, targets.uids["west"] in result.text) == (FailureCode.NEVER_STARTED, True)
    assert [each.run for each in targets.env.flux.applied["east-apps"]] == ["r1"]


async def test_wrong_cluster_gets_no_object_again(targets: Targets) -> None:
    await targets.use(targets.kubeconfig("east"))
    runner = targets.open_runner(await targets.identity())
    await runner.start(targets.env.request("r1", ENDLESS))
    await until_says(runner, "r1", "Progressing")
    await targets.use(targets.kubeconfig("west"))
    await targets.env.fleet.delete("kustomizations", "east-apps")
    result = (await ended(runner, "r1")).result
    assert isinstance(result, Failed)
    assert (result.code, targets.uids["west"] in result.text) == (FailureCode.INTERFERENCE, True)
    assert not await targets.env.fleet.find("kustomizations", "east-apps")


async def test_run_waits_for_missing_secret(targets: Targets) -> None:
    runner = targets.open_runner(targets.uids["east"])
    await runner.start(targets.env.request("r1"))
    await until_says(runner, "r1", "its kubeconfig cannot be checked: 404")
    await targets.use(targets.kubeconfig("east"))
    assert isinstance((await ended(runner, "r1")).result, Ok)


async def test_target_without_identity_waits_alone(targets: Targets) -> None:
    await targets.use(targets.kubeconfig("east"))
    runner = targets.open_runner("")
    with pytest.raises(RunnerUnavailable, match="first identity is waited for") as raised:
        await runner.start(targets.env.request("r1"))
    assert raised.value.part == "east"
    targets.env.identity = targets.uids["east"]
    await runner.start(targets.env.request("r1"))
    assert isinstance((await ended(runner, "r1")).result, Ok)


async def test_run_waits_for_target_that_is_silent(targets: Targets) -> None:
    await targets.use(targets.kubeconfig("east"))
    runner = targets.open_runner(await targets.identity())
    await targets.servers["east"].stop()
    await runner.start(targets.env.request("r1"))
    await until_says(runner, "r1", "its kubeconfig cannot be checked")
    await targets.servers["east"].start()
    assert isinstance((await ended(runner, "r1")).result, Ok)


async def test_keys_of_secret_stay_in_no_file(
    targets: Targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    encoded = {}
    openssl = ("openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
    files = {"-keyout": tmp_path / "key", "-out": tmp_path / "certificate"}
    options = [str(each) for pair in files.items() for each in pair]
    subprocess.run([*openssl, "-subj", "/CN=east", *options], check=True, capture_output=True)
    for path in files.values():
        encoded[path.name] = base64.b64encode(path.read_bytes()).decode()
    certificate, key = encoded["certificate"], encoded["key"]
    user = f"client-certificate-data: {certificate}\n    client-key-data: {key}\n    token:"
    server = f"certificate-authority-data: {certificate}\n    server: https:"
    text = targets.kubeconfig("east").replace("token:", user).replace("server: http:", server)
    await targets.use(text)
    with pytest.raises(ClusterUnreachable, match="does not answer"):
        await targets.identities.read(f"{targets.env.fleet.namespace}/east")
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("token:", "exec: {command: touch}\n    old:"),
        ("token:", "tokenFile:"),
        ("server:", "certificate-authority: /etc/shadow\n    server:"),
        ("clusters:", "other: ["),
        ("users:", "nobody:"),
    ],
)
async def test_kubeconfig_of_secret_names_no_file(targets: Targets, before: str, after: str) -> None:
    await targets.use(targets.kubeconfig("east").replace(before, after))
    with pytest.raises(ApiError):
        await targets.identities.read(f"{targets.env.fleet.namespace}/east")
    assert await targets.identity() is None
