"""Locks of other tools are seen as holders: kured's annotation of a node, and leases that end by time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from machines.model.node import NodeHealth, Observation
from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.kubernetes.inventory import KubernetesInventory
from rolloutd.adapters.kubernetes.node_watch import NO_END, LeaseWatch, NodeWatch, parse_lease
from rolloutd.adapters.timers import SystemClock
from tests.contracts.kubernetes.test_watch import WatchRecorder, watching
from tests.machines.builders import T0, index_of, nodes_of, reason_of, submit
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.fake_kubernetes.access import ALL_RULES

KURED = "weave.works/kured-reboot-in-progress"
NAMESPACE = "medik8s-leases"
LIMIT_S = 6.0
READY = {"conditions": [{"type": "Ready", "status": "True"}]}
CORDONED = {"unschedulable": True, "taints": [{"key": "node.kubernetes.io/unschedulable"}]}


@dataclass
class Locks:
    kubernetes: FakeKubernetes
    core: WatchRecorder
    leases: LeaseWatch

    def annotate(self, value: str | None, key: str = KURED) -> None:
        objects = self.kubernetes.objects

        def change(node: Any) -> None:
            node["metadata"]["annotations"] = {} if value is None else {key: value}

        objects.modify("nodes", objects.get("nodes", "", "n1"), change)

    def lease(self, node: str = "n1", **spec: Any) -> Any:
        name = {"name": f"node-{node}", "namespace": NAMESPACE}
        return self.kubernetes.objects.create("leases", {"metadata": name, "spec": spec})

    async def until_locked(self, is_locked: bool) -> Observation:
        async with asyncio.timeout(LIMIT_S):
            while "n1" not in self.core.last or self.core.last["n1"].is_locked != is_locked:
                await asyncio.sleep(0.01)
        return self.core.last["n1"]


@asynccontextmanager
async def locks(tmp_path: Path) -> AsyncIterator[Locks]:
    async with FakeKubernetes() as kubernetes:
        kubernetes.objects.create("namespaces", {"metadata": {"name": NAMESPACE}, "spec": {}})
        kubernetes.objects.create("nodes", {"metadata": {"name": "n1"}, "spec": {}, "status": READY})
        config = kubernetes.kubeconfig(tmp_path / "kubeconfig")
        cluster = Cluster("prod", config, lock_annotations=[KURED])
        watch = NodeWatch(cluster, SystemClock())
        watch.leases = leases = LeaseWatch(cluster, NAMESPACE)
        async with watching(watch) as core:
            made = Locks(kubernetes, core, leases)
            await made.until_locked(False)
            yield made
        await cluster.close()


async def test_annotation_of_kured_locks_node(tmp_path: Path) -> None:
    async with locks(tmp_path) as made:
        made.annotate("2026-11-26T01:00:00Z")
        seen = await made.until_locked(True)
        assert (seen.sight, seen.is_up, seen.cordoned_by_other) == (NodeHealth.UP, False, True)
        assert KURED in seen.why
        made.annotate(None)
        assert (await made.until_locked(False)).is_up


async def test_lock_is_seen_beside_cordon(tmp_path: Path) -> None:
    async with locks(tmp_path) as made:
        # As kured does: it annotates, then cordons and drains.
        objects = made.kubernetes.objects
        objects.modify("nodes", objects.get("nodes", "", "n1"), lambda node: node["spec"].update(CORDONED))
        made.annotate("2026-11-26T01:00:00Z")
        seen = await made.until_locked(True)
        assert KURED in seen.why


async def test_hold_by_annotation_locks_node(tmp_path: Path) -> None:
    async with locks(tmp_path) as made:
        made.annotate("new disk, alice", "rolloutd.io/hold")
        assert "new disk, alice" in (await made.until_locked(True)).why


async def test_lease_of_same_name_frees_no_lock(tmp_path: Path) -> None:
    async with locks(tmp_path) as made:
        made.lease(holderIdentity="node-healthcheck")
        await made.until_locked(True)
        other = {"metadata": {"name": "n1", "namespace": NAMESPACE}, "spec": {"holderIdentity": "x"}}
        made.kubernetes.objects.remove("leases", made.kubernetes.objects.create("leases", other))
        made.lease("n2", holderIdentity="last")
        async with asyncio.timeout(LIMIT_S):
            while made.leases.holder_of("n2", 0.0) != "last":
                await asyncio.sleep(0.01)
        assert made.leases.holder_of("n1", 0.0) == "node-healthcheck"


async def test_node_is_unknown_until_leases_are_read(tmp_path: Path) -> None:
    async with FakeKubernetes() as kubernetes:
        kubernetes.objects.create("nodes", {"metadata": {"name": "n1"}, "spec": {}, "status": READY})
        token = kubernetes.token(({"apiGroups": [""], "resources": ["nodes"], "verbs": ["*"]},))
        cluster = Cluster("prod", kubernetes.kubeconfig(tmp_path / "kubeconfig", token=token))
        watch = NodeWatch(cluster, SystemClock())
        watch.leases = LeaseWatch(cluster, NAMESPACE)
        missing = await KubernetesInventory(cluster, watch=watch).find_missing_prerequisites()
        assert [each for each in missing if "may not list leases (coordination.k8s.io)" in each]
        async with watching(watch) as core:
            async with asyncio.timeout(LIMIT_S):
                while NAMESPACE not in getattr(core.last.get("n1"), "why", ""):
                    await asyncio.sleep(0.01)
            assert core.last["n1"].sight is NodeHealth.UNKNOWN
            kubernetes.access.tokens[token] = ALL_RULES
            async with asyncio.timeout(LIMIT_S):
                while not core.last["n1"].is_up:
                    await asyncio.sleep(0.01)
        await cluster.close()


async def test_lease_locks_node_until_it_is_given_back(tmp_path: Path) -> None:
    async with locks(tmp_path) as made:
        lease = made.lease(holderIdentity="node-healthcheck")
        assert (await made.until_locked(True)).why == "node-healthcheck holds its lease"
        made.kubernetes.objects.remove("leases", lease)
        await made.until_locked(False)


@pytest.mark.parametrize(
    ("spec", "is_held"),
    [
        ({"holderIdentity": "a", "leaseDurationSeconds": 3600}, True),
        ({"holderIdentity": "a", "leaseDurationSeconds": 10}, False),
        ({"holderIdentity": "", "leaseDurationSeconds": 3600}, False),
        ({"leaseDurationSeconds": 3600}, False),
    ],
)
def test_lease_that_is_not_renewed_ends(spec: Any, is_held: bool) -> None:
    now = 1_800_000_000.0
    renewed = datetime.fromtimestamp(now - 60.0, UTC).isoformat(timespec="microseconds")
    lease = parse_lease({"metadata": {"name": "node-n1"}, "spec": {**spec, "renewTime": renewed}})
    assert (lease is not None and now < lease.until) is is_held


@pytest.mark.parametrize(
    "spec",
    [
        {"renewTime": "yesterday", "leaseDurationSeconds": 10},
        {"renewTime": 7, "leaseDurationSeconds": 10},
        {"renewTime": "2020-01-01T00:00:00Z", "leaseDurationSeconds": "long"},
        {"leaseDurationSeconds": 10},
    ],
)
def test_lease_without_readable_end_has_none(spec: Any) -> None:
    lease = parse_lease({"metadata": {"name": "node-n1"}, "spec": {"holderIdentity": "a", **spec}})
    assert lease is not None
    assert lease.until == NO_END


def test_lease_never_renewed_ends_after_acquisition() -> None:
    spec = {"holderIdentity": "a", "acquireTime": "2020-01-01T00:00:00Z", "leaseDurationSeconds": 10}
    lease = parse_lease({"metadata": {"name": "node-n1"}, "spec": spec})
    assert lease is not None
    assert lease.until < 1_800_000_000.0


def test_lease_of_something_else_is_no_lock() -> None:
    assert parse_lease({"metadata": {"name": "kube-scheduler"}, "spec": {"holderIdentity": "a"}}) is None


def test_locked_node_waits_and_takes_slot() -> None:
    index = index_of(nodes_of({"payments": ("n1", "n2")}))
    submit(index)
    locked = Observation("n1", NodeHealth.UP, T0, "kured has it", cordoned_by_other=True, is_locked=True)
    index.record_observations([locked], T0)
    assert reason_of(index, "R", "n1", T0).code == "foreign-lock"
    peer = reason_of(index, "R", "n2", T0)
    assert (peer.code, peer.params["cause"]) == ("peer-down", "locked-by-other")
