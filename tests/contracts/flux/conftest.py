"""The change `flux` over a management cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contracts.clusters.conftest import fleet, kubeconfig
from tests.contracts.flux.environment import FluxEnvironment, flux_environment
from tests.support.cluster_fleet import ClusterFleet

__all__ = ["env", "fleet", "kubeconfig"]


@pytest.fixture
async def env(fleet: ClusterFleet, kubeconfig: Path, tmp_path: Path) -> AsyncIterator[FluxEnvironment]:
    async with flux_environment(fleet, kubeconfig, tmp_path) as environment:
        yield environment
