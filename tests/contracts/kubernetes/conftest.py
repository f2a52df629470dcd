"""A cluster to test on: that of ROLLOUTD_TEST_KUBECONFIG, else a fake; the tests cannot tell which."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.timers import SystemClock
from rolloutd.ports import Clock
from tests.support.cluster_sandbox import ClusterSandbox, KubernetesApi


@pytest.fixture
async def kubeconfig(tmp_path: Path) -> AsyncIterator[Path]:
    """The way to a cluster."""
    named = os.environ.get("ROLLOUTD_TEST_KUBECONFIG")
    if named:
        yield Path(named)
        return
    from tests.support.fake_kubernetes import FakeKubernetes
    from tests.support.fake_kubernetes.access import ALL_RULES

    async with FakeKubernetes() as fake:
        fake.access.anonymous = ALL_RULES  # kubectl sends no token without TLS
        yield fake.kubeconfig(tmp_path / "kubeconfig")


@pytest.fixture
async def api(kubeconfig: Path) -> AsyncIterator[KubernetesApi]:
    """A person with kubectl."""
    api = KubernetesApi(kubeconfig)
    await api.open()
    yield api
    await api.close()


@pytest.fixture
async def sandbox(api: KubernetesApi) -> AsyncIterator[ClusterSandbox]:
    """Nodes and workloads of this test alone."""
    async with ClusterSandbox(api) as sandbox:
        yield sandbox


@pytest.fixture
async def cluster(kubeconfig: Path) -> AsyncIterator[Cluster]:
    """The cluster as the adapter sees it."""
    cluster = Cluster("test", kubeconfig)
    yield cluster
    await cluster.close()


@pytest.fixture
def clock() -> Clock:
    """The machine's clock."""
    return SystemClock()
