"""Rare answers of an API server that once made the Kubernetes adapter believe something false."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from machines.model.node import NodeHealth
from rolloutd.adapters.kubernetes import cluster as cluster_module
from rolloutd.adapters.kubernetes import list_watch
from rolloutd.adapters.kubernetes.api_errors import ApiError, ClusterUnreachable
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.cluster_registry import ClusterRegistry
from rolloutd.adapters.kubernetes.drain import Evicted, EvictionBlocked, evict
from rolloutd.adapters.kubernetes.inventory import KubernetesInventory
from rolloutd.adapters.kubernetes.isolator import MAX_BLOCKER_WATCHES, KubernetesIsolator
from rolloutd.adapters.kubernetes.node_watch import NodeWatch
from rolloutd.adapters.kubernetes.nodes import parse_node
from rolloutd.adapters.kubernetes.progress import CONDITION
from rolloutd.adapters.timers import SystemClock
from rolloutd.errors import SourceFailed
from rolloutd.ports import Ok, ProgressKind, ProgressReport
from tests.contracts.kubernetes.steps import step_context
from tests.rolloutd.adapters.kubernetes.test_faults import (
    JSON,
    add_node,
    add_pod,
    cluster,
    fake,
    watching,
    with_cluster,
)
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.fake_kubernetes.errors import ApiRefusal, conflict
from tests.support.fake_kubernetes.server import ApiRequest
from tests.support.waiting import wait_in_loop_until

__all__ = ["cluster", "fake"]

DEFAULT_MAX_PARALLEL = 64


async def test_conflict_on_pod_named_uid_is_not_its_end(fake: FakeKubernetes, cluster: Cluster) -> None:
    """A conflict's message has the pod's name, and `druid` has `uid` in it."""
    pod = add_pod(fake, "druid-1", "n1")

    def refuse(asked: ApiRequest) -> None:
        if asked.subresource == "eviction":
            raise conflict("pods", asked.name)

    fake.server.interceptors.append(refuse)
    assert isinstance(await evict(cluster, pod), EvictionBlocked)
    fake.server.interceptors.clear()
    fake.objects.remove("pods", fake.objects.get("pods", "shop", "druid-1"))
    add_pod(fake, "druid-1", "n1")
    assert await evict(cluster, pod) is Evicted.GONE


async def test_list_with_unreadable_node_removes_no_node(
    fake: FakeKubernetes, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(list_watch, "INITIAL_BACKOFF_S", 0.05)
    for name in ("n1", "n2"):
        add_node(fake, name)
    watch = NodeWatch(cluster, SystemClock())
    inventory = KubernetesInventory(cluster, watch=watch)
    async with watching(watch) as core:
        await wait_in_loop_until(lambda: core.sight("n2") is NodeHealth.UP)
        await fake.stop()
        await wait_in_loop_until(lambda: core.sight("n2") is NodeHealth.UNKNOWN)
        [metadata] = [n["metadata"] for n in fake.objects.all("nodes") if n["metadata"]["name"] == "n2"]
        uid = metadata.pop("uid")
        add_node(fake, "n3")
        fake.objects.compact()
        await fake.start()
        await wait_in_loop_until(lambda: any("unexpected shape" in each for each in core.tries))
        tries = len(core.tries)
        await wait_in_loop_until(lambda: len(core.tries) > tries)
        with pytest.raises(SourceFailed, match="unexpected shape"):
            await inventory.refresh()
        assert core.sight("n1") is NodeHealth.UNKNOWN
        metadata["uid"] = uid
        await wait_in_loop_until(lambda: core.sight("n2") is NodeHealth.UP)
        assert [each.name for each in await inventory.refresh()] == ["n1", "n2", "n3"]


async def test_requests_are_not_starved_by_many_drains(fake: FakeKubernetes, cluster: Cluster) -> None:
    """Each drain watches its pods, each blocked node too, and the nodes and budgets are watched."""
    add_node(fake, "n1")
    watches = DEFAULT_MAX_PARALLEL + MAX_BLOCKER_WATCHES + 2
    async with AsyncExitStack() as stack:
        for _ in range(watches):
            await stack.enter_async_context(cluster.watch("/api/v1/pods", {}, idle_timeout_s=60.0))
        async with asyncio.timeout(10.0):
            assert await cluster.get("/api/v1/nodes/n1")


async def test_concurrent_requests_survive_token_renewal(tmp_path: Path) -> None:
    """A request that is refused after another one has renewed the token uses the new one."""
    renewed, is_new = asyncio.Event(), "Bearer new"

    async def answer(request: web.BaseRequest) -> web.Response:
        if request.headers["Authorization"] == is_new:
            renewed.set()
            return web.json_response({"metadata": {}})
        if request.path == "/slow":
            await renewed.wait()
        return web.json_response({"kind": "Status", "message": "Unauthorized"}, status=401)

    runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    kubeconfig = tmp_path / "k"
    _write_kubeconfig(kubeconfig, {"server": f"http://{host}:{port}"}, {"token": "old"})
    cluster = Cluster("ams", kubeconfig)
    try:
        with pytest.raises(Exception, match="renew them"):
            await cluster.get("/first")
        _write_kubeconfig(kubeconfig, {"server": f"http://{host}:{port}"}, {"token": "new"})
        async with asyncio.timeout(10.0):
            assert await asyncio.gather(cluster.get("/slow"), cluster.get("/fast"))
    finally:
        await cluster.close()
        await runner.cleanup()


def _write_kubeconfig(path: Path, server: JSON, user: JSON) -> None:
    document = {
        "clusters": [{"name": "c", "cluster": server}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.write_text(yaml.safe_dump(document))


async def test_certificate_renewed_in_its_file_is_used(tmp_path: Path) -> None:
    """A rotated certificate keeps its file's name, so the kubeconfig stays the same."""
    certificates = [_make_certificate(tmp_path, name) for name in ("old", "new")]
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificates[1], tmp_path / "new.key")

    async def answer(request: web.BaseRequest) -> web.Response:
        return web.json_response({"metadata": {}})

    runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    authority = tmp_path / "ca.crt"
    authority.write_bytes(certificates[0].read_bytes())
    server = {
        "server": f"https://127.0.0.1:{runner.addresses[0][1]}",
        "certificate-authority": str(authority),
    }
    _write_kubeconfig(tmp_path / "k", server, {"token": "t"})
    cluster = Cluster("ams", tmp_path / "k")
    try:
        with pytest.raises(ClusterUnreachable):
            await cluster.get("/")
        authority.write_text("half a certificate")
        with pytest.raises(ClusterUnreachable):
            await cluster.get("/")
        with pytest.raises(ClusterUnreachable, match="gives no access"):
            await cluster.get("/")
        authority.write_bytes(certificates[1].read_bytes())
        assert await cluster.get("/")
    finally:
        await cluster.close()
        await runner.cleanup()


def _make_certificate(directory: Path, name: str) -> Path:
    certificate = directory / f"{name}.crt"
    command = (
        *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-keyout", str(directory / f"{name}.key"), "-out", str(certificate)),
    )
    subprocess.run(command, check=True, capture_output=True)
    return certificate


async def test_credential_plugin_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "CREDENTIALS_TIMEOUT_S", 0.5)
    script = f"echo $$ >> {tmp_path}/pids; exec sleep 300"
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": ["-c", script]}
    _write_kubeconfig(tmp_path / "k", {"server": "http://127.0.0.1:9"}, {"exec": plugin})
    cluster = Cluster("ams", tmp_path / "k")
    with pytest.raises(ClusterUnreachable, match="gives no access"):
        await cluster.get("/")
    [pid] = (tmp_path / "pids").read_text().split()
    await wait_in_loop_until(lambda: not Path(f"/proc/{pid}").exists())
    await cluster.close()


def _count_runs(directory: Path, output: str) -> dict[str, Any]:
    """Return a credential plugin that adds a line to `runs`, reports two that run at once, and prints."""
    script = (
        f"echo run >> {directory}/runs; mkdir {directory}/running || echo two >> {directory}/overlaps; "
        f"sleep 0.1; rmdir {directory}/running; {output}"
    )
    return {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": ["-c", script]}


def _runs(directory: Path) -> int:
    return len((directory / "runs").read_text().splitlines())


async def test_failing_plugin_runs_once_for_many_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "PLUGIN_PAUSES_S", (1000.0, 1000.0))
    plugin = _count_runs(tmp_path, "exit 1")
    _write_kubeconfig(tmp_path / "k", {"server": "http://127.0.0.1:9"}, {"exec": plugin})
    cluster = Cluster("ams", tmp_path / "k")
    answers = await asyncio.gather(*(cluster.get("/") for _ in range(20)), return_exceptions=True)
    assert [type(answer) for answer in answers] == [ClusterUnreachable] * 20
    assert {str(answer) for answer in answers} == {str(answers[0])}
    assert _runs(tmp_path) == 1
    # An edited kubeconfig is read at once.
    _write_kubeconfig(tmp_path / "k", {"server": "http://127.0.0.1:10"}, {"exec": plugin})
    with pytest.raises(ClusterUnreachable):
        await cluster.get("/")
    assert _runs(tmp_path) == 2
    await cluster.close()


async def test_plugin_with_refused_token_runs_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "PLUGIN_PAUSES_S", (1000.0, 1000.0))
    credential = {
        "apiVersion": "client.authentication.k8s.io/v1",
        "kind": "ExecCredential",
        "status": {"token": "old"},
    }

    async def answer(request: web.BaseRequest) -> web.Response:
        return web.json_response({"metadata": {}}, status=401)

    runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    plugin = _count_runs(tmp_path, f"echo '{json.dumps(credential)}'")
    server = {"server": f"http://127.0.0.1:{runner.addresses[0][1]}"}
    _write_kubeconfig(tmp_path / "k", server, {"exec": plugin})
    cluster = Cluster("ams", tmp_path / "k")
    try:
        answers = await asyncio.gather(*(cluster.get("/") for _ in range(20)), return_exceptions=True)
        assert [getattr(answer, "status", answer) for answer in answers] == [401] * 20
        assert _runs(tmp_path) == 2, "once for the client, once after the first 401"
        assert not (tmp_path / "overlaps").exists()
    finally:
        await cluster.close()
        await runner.cleanup()


async def test_condition_is_removed_once_server_is_back(fake: FakeKubernetes, cluster: Cluster) -> None:
    add_node(fake, "n1")
    isolator = KubernetesIsolator(ClusterRegistry([cluster]), SystemClock())
    ctx = with_cluster(step_context("n1"), "ams")
    assert isinstance(await isolator.isolate(ctx), Ok)
    refusals = [503, 503]

    def refuse(asked: ApiRequest) -> Awaitable[None] | None:
        if asked.full_resource == "nodes/status" and refusals:
            raise ApiRefusal(refusals.pop(), "etcdserver: leader changed", reason="ServiceUnavailable")
        return None

    fake.server.interceptors.append(refuse)
    assert isinstance(await isolator.return_to_service(ctx), Ok)
    conditions = fake.objects.get("nodes", "", "n1")["status"]["conditions"]
    assert CONDITION not in [each["type"] for each in conditions]


async def test_missing_right_to_events_keeps_condition_right(fake: FakeKubernetes, cluster: Cluster) -> None:
    add_node(fake, "n1")
    isolator = KubernetesIsolator(ClusterRegistry([cluster]), SystemClock())
    ctx = with_cluster(step_context("n1"), "ams")
    assert isinstance(await isolator.isolate(ctx), Ok)

    def refuse(asked: ApiRequest) -> None:
        if asked.resource == "events":
            raise ApiRefusal(403, "events is forbidden")

    fake.server.interceptors.append(refuse)
    with pytest.raises(ApiError, match="events is forbidden"):
        await isolator.report(
            ctx.host, ProgressReport(ProgressKind.FAILED, ctx.rollout, ctx.attempt, 1.0, "it is not Ready")
        )
    conditions = {each["type"]: each for each in fake.objects.get("nodes", "", "n1")["status"]["conditions"]}
    assert conditions[CONDITION]["reason"] == "Failed"


async def test_condition_names_each_rollout_that_shares_isolation(
    fake: FakeKubernetes, cluster: Cluster
) -> None:
    add_node(fake, "n1")
    isolator = KubernetesIsolator(ClusterRegistry([cluster]), SystemClock())
    ctx = with_cluster(step_context("n1"), "ams")
    assert isinstance(await isolator.isolate(ctx), Ok)

    async def shown(rollout: str, *isolated_for: str) -> tuple[str, str]:
        report = ProgressReport(ProgressKind.MAINTAINED, rollout, 1, 1.0, "maintained in 9s", isolated_for)
        await isolator.report(ctx.host, report)
        found = fake.objects.get("nodes", "", "n1")["status"]["conditions"]
        condition = next(each for each in found if each["type"] == CONDITION)
        return condition["reason"], condition["message"]

    joined = f"isolated for {ctx.rollout}, r-2; r-2, attempt 1: maintained in 9s"
    assert await shown("r-2", ctx.rollout, "r-2") == ("Verifying", joined)
    assert await shown("r-0", "r-0") == ("Verifying", joined), "a late report of an earlier isolation"


@pytest.mark.parametrize(
    ("taint", "is_leaving"),
    [
        ("ToBeDeletedByClusterAutoscaler", True),
        ("karpenter.sh/disrupted", True),
        ("karpenter.sh/disruption", True),
        ("DeletionCandidateOfClusterAutoscaler", False),  # it only may be removed, later
    ],
)
def test_node_that_an_autoscaler_removes_is_leaving(taint: str, is_leaving: bool) -> None:
    ready = {"type": "Ready", "status": "True"}
    node = {
        "metadata": {"name": "n1", "uid": "u"},
        "spec": {"taints": [{"key": taint, "effect": "NoSchedule"}]},
        "status": {"conditions": [ready]},
    }
    seen = parse_node(node).to_observation("n1", 0.0, "ams")
    assert (seen.is_leaving, seen.cordoned_by_other) == (is_leaving, is_leaving)


async def test_cancelled_report_asks_server_nothing_more(fake: FakeKubernetes, cluster: Cluster) -> None:
    """A daemon that ends, or the report's time limit, must not wait for another request."""
    add_node(fake, "n1")
    ctx = with_cluster(step_context("n1"), "ams")
    isolator = KubernetesIsolator(ClusterRegistry([cluster]), SystemClock())
    assert isinstance(await isolator.isolate(ctx), Ok)
    asked_for_event, later = asyncio.Event(), []

    async def hold_back(asked: ApiRequest) -> None:
        if asked.resource == "events":
            asked_for_event.set()
            await asyncio.Event().wait()
        if asked_for_event.is_set():
            later.append(asked.full_resource)

    fake.server.interceptors.append(hold_back)
    report = ProgressReport(ProgressKind.FAILED, ctx.rollout, ctx.attempt, 1.0, "it is not Ready")
    reporting = asyncio.create_task(isolator.report(ctx.host, report))
    await asked_for_event.wait()
    reporting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reporting
    assert later == []


async def test_reinstalled_machine_changes_inventory(fake: FakeKubernetes, cluster: Cluster) -> None:
    """A reinstalled machine may register under the node object of the old one: uid and address stay."""
    add_node(fake, "n1")
    async with watching(NodeWatch(cluster, SystemClock())) as core:
        await wait_in_loop_until(lambda: core.sight("n1") is NodeHealth.UP and core.changes > 0)
        changes = core.changes
        fake.objects.modify(
            "nodes",
            fake.objects.get("nodes", "", "n1"),
            lambda node: node["status"]["nodeInfo"].update(machineID="another"),
        )
        await wait_in_loop_until(lambda: core.changes > changes)
