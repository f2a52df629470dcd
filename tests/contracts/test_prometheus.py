"""The probe and the observer `prometheus` against a real Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from machines.model.node import NodeHealth
from rolloutd.adapters.prometheus.check import PrometheusTrafficProbe
from rolloutd.adapters.prometheus.observer import PrometheusObserver
from rolloutd.adapters.prometheus.query import MAX_RESPONSE_BYTES, Queries, QueryFailed, ServerSilent
from rolloutd.adapters.prometheus.registration import ServerParams
from rolloutd.contracts import (
    ObserverBackend,
    ObserverContract,
    SystemClock,
    TrafficProbeBackend,
    TrafficProbeContract,
    step_context,
)
from rolloutd.ports import AdapterContext, Busy, Host, InventorySnapshot
from tests.contracts.fakes.runner import FakeRunHost, FakeRunner
from tests.contracts.fakes.shell import FakeShell
from tests.contracts.ssh_fixtures import serve_connections
from tests.support.prometheus import Prometheus

pytestmark = pytest.mark.servers

JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
RUNNING: list[Prometheus] = []
NUMBERS = count(1)


@pytest.fixture(scope="module", autouse=True)
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    server = Prometheus().start(tmp_path_factory.mktemp("prometheus"))
    RUNNING.append(server)
    yield server
    RUNNING.remove(server)
    server.stop()


def context_of(*urls: str, token_file: Path | None = None, **params: Any) -> AdapterContext:
    """Return the context of a daemon whose settings name these servers: s0, s1, ..."""
    named = {f"s{number}": {"url": url} for number, url in enumerate(urls)}
    servers = {name: ServerParams.model_validate(each) for name, each in named.items()}
    if token_file is not None:
        servers = {key: each.model_copy(update={"token_file": token_file}) for key, each in servers.items()}
    settings = SimpleNamespace(section={"prometheus": servers}.__getitem__)
    runner = FakeRunner(FakeRunHost({}))
    return AdapterContext(
        FakeShell(), SystemClock(), runner, lambda: InventorySnapshot({}), settings, params=params
    )


class ProbeBackend:
    """A node whose requests are a metric; a metric that ended is not zero."""

    def __init__(self, server: Prometheus) -> None:
        self._server, self.clock, self.host = server, SystemClock(), Host(f"web-{next(NUMBERS)}")
        self._series = f'requests{{node="{self.host.name}"}}'
        self.params = {"query": self._series, "max": 2.0}
        self.probe = PrometheusTrafficProbe(context_of(server.url))

    async def start_traffic(self) -> None:
        await self._server.set_metric(self._series, 7.0)

    async def stop_traffic(self) -> None:
        await self._server.set_metric(self._series, 2.0)

    async def hide_traffic(self) -> None:
        await self._server.set_metric(self._series, None)


class TestProbe(TrafficProbeContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[TrafficProbeBackend]:
        backend = ProbeBackend(RUNNING[0])
        await backend.stop_traffic()
        yield backend


class Nodes:
    def __init__(self, observer: PrometheusObserver) -> None:
        self.observer, self.clock = observer, SystemClock()
        labels = [{"job": name} for name in ("serving", "broken", "unmonitored")]
        self.up, self.down, self.unclear = (Host(each["job"], labels=each) for each in labels)


class TestObserver(ObserverContract):
    @asynccontextmanager
    async def open_backend(self, directory: Path) -> AsyncIterator[ObserverBackend]:
        await RUNNING[0].set_metric('healthy{job="serving"}', 1.0)
        await RUNNING[0].set_metric('healthy{job="broken"}', 0.0)
        query = 'healthy{job="{{ node.labels.job }}"}'
        yield Nodes(PrometheusObserver(context_of(RUNNING[0].url, query=query, up="== 1")))


@pytest.mark.parametrize(
    ("up", "value", "health"),
    [
        ("> 0.5", 1.0, NodeHealth.UP),
        (">=1", 1.0, NodeHealth.UP),
        ("!= 1", 1.0, NodeHealth.DOWN),
        ("<= 0", 1.0, NodeHealth.DOWN),
    ],
)
async def test_comparison_decides_health(up: str, value: float, health: NodeHealth) -> None:
    observer = PrometheusObserver(context_of(RUNNING[0].url, query=f"vector({value})", up=up))
    (seen,) = await observer.observe([Host("n1")])
    assert seen.sight is health


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("absent_metric", "the result is empty; the metric is missing or stale"),
        ("scalar(absent_metric)", "the result is NaN"),
        ("requests[", "the query failed: invalid parameter"),
        ("up[1m]", "the result is not a number; use an instant query"),
        ('label_replace(vector(1), "a", "b", "", "") or vector(2)', "the result has 2 series"),
    ],
)
async def test_unusable_result_is_not_a_number(query: str, problem: str) -> None:
    with pytest.raises(QueryFailed) as failed:
        await Queries(context_of(RUNNING[0].url)).query(query, None, timeout_s=30.0)
    assert f"prometheus s0: {problem}" in str(failed.value)


async def test_busy_names_number_and_query() -> None:
    backend = ProbeBackend(RUNNING[0])
    await backend.start_traffic()
    assert await backend.probe.probe(step_context(backend.host, backend.params, backend.clock)) == Busy(
        f"{backend.host.name} is busy: {backend.params['query']} is 7, more than 2", count=7
    )


async def test_server_is_chosen_by_name_or_alone() -> None:
    two = Queries(context_of(RUNNING[0].url, "http://127.0.0.1:9"))
    assert await two.query("vector(3)", "s0", timeout_s=30.0) == 3.0
    for name, problem in ((None, "the plan names no `server`"), ("s9", "there is no server s9")):
        with pytest.raises(QueryFailed, match=f"{problem}; servers of the settings: s0, s1"):
            await two.query("vector(3)", name, timeout_s=30.0)
    with pytest.raises(QueryFailed, match="prometheus s1: Cannot connect"):
        await two.query("vector(3)", "s1", timeout_s=30.0)


async def test_remark_on_counter_name_leaves_result_usable() -> None:
    """Prometheus 2.48 to 2.53, as in Debian 13, answers `rate(busy[1m])` like this."""

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(
            JSON
            + b"\r\n"
            + b'{"status": "success", "warnings": ["PromQL info: metric might not be a counter, name '
            b'does not end in _total/_sum/_count/_bucket: \\"busy\\" (1:6)"], '
            b'"data": {"resultType": "vector", "result": [{"value": [1, "0.5"]}]}}'
        )
        await writer.drain()

    async with serve_connections(reply) as port:
        queries = Queries(context_of(f"http://127.0.0.1:{port}"))
        assert await queries.query("rate(busy[1m])", None, timeout_s=30.0) == 0.5


async def test_observer_without_its_server_raises() -> None:
    observer = PrometheusObserver(context_of("http://127.0.0.1:9", query="vector(1)", up="== 1"))
    with pytest.raises(ServerSilent, match="prometheus s0: Cannot connect"):
        await observer.observe([Host("n1"), Host("n2")])


async def test_token_is_sent_and_never_shown(tmp_path: Path) -> None:
    token, seen = tmp_path / "token", asyncio.get_running_loop().create_future()
    token.write_text("s3cret\n")

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.set_result(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    async with serve_connections(refuse) as port:
        queries = Queries(context_of(f"http://127.0.0.1:{port}", token_file=token))
        with pytest.raises(QueryFailed) as failed:
            await queries.query("up", None, timeout_s=30.0)
    assert b"Authorization: Bearer s3cret" in await seen
    assert "401; set token_file to a valid token" in str(failed.value)
    assert "s3cret" not in str(failed.value)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 2\r\n\r\nhi", "without JSON"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n", "302"),
        (
            JSON + b"\r\n" + b" " * (MAX_RESPONSE_BYTES + 1),
            "too long",
        ),
        (
            JSON + b"Content-Length: 2\r\n\r\n[]",
            "not an object",
        ),
        (
            JSON + b"Content-Length: 2\r\n\r\n{]",
            "prometheus s0",
        ),
        (
            JSON + b"\r\n" + b'{"status": "success", "warnings": ["No StoreAPIs matched for this query"], '
            b'"data": {"resultType": "vector", "result": [{"value": [1, "0"]}]}}',
            "incomplete: .*No StoreAPIs",
        ),
        (b"", "prometheus s0"),
    ],
    ids=["page", "redirect", "flood", "list", "broken", "partial", "silence"],
)
async def test_foreign_answer_is_no_result(answer: bytes, problem: str) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()

    async with serve_connections(reply) as port:
        with pytest.raises(QueryFailed, match=problem):
            await Queries(context_of(f"http://127.0.0.1:{port}")).query("up", None, timeout_s=30.0)
