"""A management cluster: that of ROLLOUTD_TEST_MANAGEMENT_KUBECONFIG, else a fake.

A real one needs the definitions of Cluster API, ClusterProfile and Flux, and no controllers of theirs in the
namespace of the test: the tests play them.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rolloutd.adapters.kubernetes.cluster import Cluster
from rolloutd.adapters.timers import SystemClock
from rolloutd.ports import Clock
from tests.support.cluster_fleet import ClusterFleet


@pytest.fixture
async def kubeconfig(tmp_path: Path) -> AsyncIterator[Path]:
    named = os.environ.get("ROLLOUTD_TEST_MANAGEMENT_KUBECONFIG")
    if named:
        # A copy: tests change it to make the server silent.
        copied = tmp_path / "kubeconfig"
        copied.write_text(Path(named).read_text())
        yield copied
        return
    from tests.support.fake_kubernetes import FakeKubernetes

    async with FakeKubernetes() as fake:
        yield fake.kubeconfig(tmp_path / "kubeconfig")


@pytest.fixture
async def fleet(kubeconfig: Path) -> AsyncIterator[ClusterFleet]:
    """Objects of this test alone, in a namespace of its own."""
    async with ClusterFleet(kubeconfig, f"rolloutd-{secrets.token_hex(4)}") as fleet:
        yield fleet


@pytest.fixture
async def cluster(kubeconfig: Path) -> AsyncIterator[Cluster]:
    """The management cluster as the adapters see it."""
    cluster = Cluster("hub", kubeconfig)
    yield cluster
    await cluster.close()


@pytest.fixture
def clock() -> Clock:
    return SystemClock()
