"""An upgrade by Cluster API is done when every machine has the version, and never by an older status."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from machines.model.rollout import FailureCode
from rolloutd.adapters.clusters.topology import TopologyRunner
from rolloutd.ports import Failed, Ok, PinnedSource, RunRequest
from tests.contracts.flux.environment import FluxEnvironment, ended, until_says
from tests.support.cluster_fleet import GROUPS, READY, ClusterFleet, condition
from tests.support.flux_controllers import FluxControllers

OLD, NEW = "v1.30.0", "v1.31.0"


@pytest.fixture
async def env(
    fleet: ClusterFleet, kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FluxEnvironment]:
    monkeypatch.setattr(TopologyRunner, "settles_s", 0.01)
    environment = FluxEnvironment(fleet, FluxControllers(fleet), tmp_path, kubeconfig, TopologyRunner)
    yield environment
    await environment.close()


def request(env: FluxEnvironment, run: str, version: str) -> RunRequest:
    params = {"version": version, "failing_for": 0.0}
    return RunRequest(
        run, env.host, PinnedSource("", ""), "", timeout_s=300.0, kind="clusterapi", params=params
    )


async def apply_cluster(env: FluxEnvironment, topology: dict[str, object]) -> None:
    """Apply the cluster as a person does who keeps it in git."""
    body = {
        "apiVersion": GROUPS["clusters"],
        "kind": "Cluster",
        "metadata": {"name": "east", "namespace": env.fleet.namespace},
        "spec": {"topology": topology},
    }
    await env.fleet.api.apply(env.fleet.path("clusters", "east"), body)


async def show(env: FluxEnvironment, replicas: tuple[int, int], *, reason: str = "", **changes: str) -> None:
    """Set the status as the controllers do: how many machines are up to date, of three and two."""
    generation = (await env.fleet.get("clusters", "east"))["metadata"]["generation"]
    conditions = [
        condition(kind, status, reason, "", generation) for kind, status in {**READY, **changes}.items()
    ]
    status = {
        "conditions": conditions,
        "controlPlane": {"desiredReplicas": 3, "replicas": 3, "upToDateReplicas": replicas[0]},
        "workers": {"desiredReplicas": 2, "replicas": 2, "upToDateReplicas": replicas[1]},
    }
    await env.fleet.set_status("clusters", "east", status)


async def hand_over(env: FluxEnvironment) -> None:
    """Give the version to rolloutd: it applies the present one, then the person's manifest drops it."""
    await apply_cluster(env, {"classRef": {"name": "base"}, "version": OLD})
    await show(env, (3, 2))
    runner = env.open_runner()
    assert isinstance((await ended(runner, await runner.start(request(env, "r0", OLD)))).result, Ok)
    await apply_cluster(env, {"classRef": {"name": "base"}})
    assert (await env.fleet.get("clusters", "east"))["spec"]["topology"]["version"] == OLD


async def test_version_is_followed_to_all_machines(env: FluxEnvironment) -> None:
    await hand_over(env)
    runner = env.open_runner()
    handle = await runner.start(request(env, "r1", NEW))
    # The conditions of the version before are all good, and of an older generation.
    await until_says(runner, handle, "no controller has judged generation 2")
    pending = {"TopologyReconciled": "False", "RollingOut": "True"}
    for reason in ("ControlPlaneUpgradePending", "MachineDeploymentsUpgradePending", "LifecycleHookBlocking"):
        await show(env, (1, 0), reason=reason, **pending)
        await until_says(runner, handle, reason)
    await show(env, (3, 1), WorkerMachinesUpToDate="False")
    await until_says(runner, handle, "WorkerMachinesUpToDate")
    await show(env, (3, 1))
    state = await until_says(runner, handle, "machines of workers have not v1.31.0 yet")
    assert state.percent == 78.0
    await show(env, (3, 2))
    assert isinstance((await ended(runner, handle)).result, Ok)


async def test_conditions_that_follow_later_are_awaited(
    env: FluxEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topology is reconciled, and the machines' controllers have not seen the version yet."""
    await hand_over(env)
    monkeypatch.setattr(TopologyRunner, "settles_s", 300.0)
    runner = env.open_runner()
    handle = await runner.start(request(env, "r1", NEW))
    await show(env, (3, 2))
    await until_says(runner, handle, "it must last for 300 s")
    await show(env, (3, 2), RollingOut="True")
    await until_says(runner, handle, "RollingOut is True")
    await show(env, (3, 2), TopologyReconciled="False", reason="Paused")
    await until_says(runner, handle, "Paused")
    await show(env, (3, 2))
    await until_says(runner, handle, "it must last for 300 s")
    monkeypatch.setattr(TopologyRunner, "settles_s", 0.01)
    assert isinstance((await ended(env.open_runner(), handle)).result, Ok)


async def test_version_of_another_writer_is_not_forced(env: FluxEnvironment) -> None:
    await apply_cluster(env, {"classRef": {"name": "base"}, "version": OLD})
    runner = env.open_runner()
    result = (await ended(runner, await runner.start(request(env, "r1", NEW)))).result
    assert isinstance(result, Failed)
    assert (result.code, "kubectl" in result.text) == (FailureCode.NEVER_STARTED, True)
    assert (await env.fleet.get("clusters", "east"))["spec"]["topology"]["version"] == OLD


async def test_failed_reconciliation_fails(env: FluxEnvironment) -> None:
    await hand_over(env)
    runner = env.open_runner()
    handle = await runner.start(request(env, "r1", NEW))
    await show(env, (3, 2), reason="ReconcileFailed", TopologyReconciled="False")
    result = (await ended(runner, handle)).result
    assert isinstance(result, Failed)
    assert "ReconcileFailed" in result.text


async def test_paused_cluster_is_waited_for(env: FluxEnvironment) -> None:
    await hand_over(env)
    await env.fleet.edit("clusters", "east", {"spec": {"paused": True}})
    runner = env.open_runner()
    handle = await runner.start(request(env, "r1", NEW))
    await until_says(runner, handle, "is paused")
    assert (await env.fleet.get("clusters", "east"))["spec"]["topology"]["version"] == OLD
    await env.fleet.edit("clusters", "east", {"spec": {"paused": False}})
    await until_says(runner, handle, "no controller has judged")
    await show(env, (3, 2))
    assert isinstance((await ended(runner, handle)).result, Ok)
