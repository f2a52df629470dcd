"""The contract of ports.Runner, by Jobs of a fake cluster whose pods run real Ansible."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from rolloutd.contracts import RunnerBackend, RunnerContract
from tests.contracts.kubernetes_jobs.backend import open_jobs_backend

pytestmark = pytest.mark.servers


class TestKubernetesRunner(RunnerContract):
    def open_backend(self, directory: Path) -> AbstractAsyncContextManager[RunnerBackend]:
        return open_jobs_backend(directory)
