"""The contract of ports.Runner over AWX."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from rolloutd.contracts.runner import RunnerBackend, RunnerContract
from tests.contracts.awx.backend import open_backend

pytestmark = [pytest.mark.servers, pytest.mark.long]


class TestAwxRunner(RunnerContract):
    """The AWX runner over the fake AWX, whose jobs are real."""

    def open_backend(self, directory: Path) -> AbstractAsyncContextManager[RunnerBackend]:
        return open_backend(directory)
