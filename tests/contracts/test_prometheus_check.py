"""The check `prometheus` against a real Prometheus: pass, fail and inconclusive."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolloutd.adapters.prometheus.check import PrometheusCheck
from rolloutd.contracts import CheckBackend, CheckContract, SystemClock, step_context
from rolloutd.ports import Failed, Host, Ok, Unknown
from tests.contracts.test_prometheus import NUMBERS, context_of
from tests.support.prometheus import Prometheus

pytestmark = pytest.mark.servers

RUNNING: list[Prometheus] = []


@pytest.fixture(scope="module", autouse=True)
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    server = Prometheus().start(tmp_path_factory.mktemp("prometheus"))
    RUNNING.append(server)
    yield server
    RUNNING.remove(server)
    server.stop()


class Backend:
    """A node whose error rate is a metric."""

    def __init__(self, server: Prometheus) -> None:
        self._server, self.clock, self.host = server, SystemClock(), Host(f"web-{next(NUMBERS)}")
        self._series = f'errors{{node="{self.host.name}"}}'
        self.params: dict[str, Any] = {"query": self._series, "max": 0.01}
        self.check = PrometheusCheck(context_of(server.url))

    async def set(self, value: float | None) -> None:
        await self._server.set_metric(self._series, value)

    async def break_node(self) -> None:
        await self.set(0.5)

    async def repair_node(self) -> None:
        await self.set(0.0)

    async def state(self) -> object:
        return None

    async def judge(self, **changed: Any) -> Ok | Failed | Unknown:
        compared = {key: changed.pop(key) for key in ("baseline", "is_baseline") if key in changed}
        ctx = step_context(self.host, {**self.params, **changed}, self.clock)
        return await self.check.check(replace(ctx, **compared))


class TestPrometheusCheck(CheckContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[CheckBackend]:
        backend = Backend(RUNNING[0])
        await backend.repair_node()
        yield backend


async def test_result_compared_with_value_before(prometheus: Prometheus) -> None:
    node = Backend(prometheus)
    await node.set(0.02)
    before = await node.judge(ratio=1.2, is_baseline=True)
    assert isinstance(before, Ok)
    assert before.value == 0.02
    await node.set(0.023)
    assert isinstance(await node.judge(ratio=1.2, baseline=before.value), Ok)
    assert isinstance(await node.judge(difference=0.001, baseline=before.value), Failed)
    worse = await node.judge(ratio=1.1, baseline=before.value)
    assert isinstance(worse, Failed)
    assert "is 0.023, more than 0.022; before the change it was 0.02" in worse.text
    assert isinstance(await node.judge(max=0.5, ratio=1.1, baseline=before.value), Ok), "within max"


async def test_missing_metric_or_value_before_is_inconclusive(prometheus: Prometheus) -> None:
    node = Backend(prometheus)
    missing = await node.judge()
    assert isinstance(missing, Unknown)
    assert node.host.name in missing.text
    await node.set(0.02)
    assert isinstance(await node.judge(ratio=1.2), Unknown)
