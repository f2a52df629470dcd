"""Each class of blocking work has its own threads, and rolloutd leaves the loop's own pool alone."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from rolloutd.concurrency import threads

ROOT = Path(__file__).resolve().parents[3]
POOLS = {name: pool for name, pool in vars(threads).items() if isinstance(pool, threads.ThreadPool)}
MANY = 40
"""More calls than any pool has threads."""


@pytest.fixture
def answered() -> Iterator[Event]:
    event = Event()
    yield event
    event.set()


@pytest.mark.parametrize("hanging", POOLS)
async def test_class_that_hangs_delays_no_other(hanging: str, answered: Event) -> None:
    calls = [asyncio.create_task(POOLS[hanging].run(answered.wait)) for _ in range(MANY)]
    others = [pool.run(str, name) for name, pool in POOLS.items() if name != hanging]
    async with asyncio.timeout(60):
        assert await asyncio.gather(*others) == [name for name in POOLS if name != hanging]
        await asyncio.get_running_loop().getaddrinfo("localhost", 22)
    assert not any(call.done() for call in calls)
    answered.set()
    assert await asyncio.gather(*calls) == [True] * MANY


async def test_call_in_thread_raises_its_error() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        await threads.FILES.run(int, "x")


OWN_THREADS = {Path("rolloutd/store/postgresql/backend.py")}
"""A connection to PostgreSQL has one thread of its own, as one to SQLite has: no other work waits for it."""


def test_no_call_uses_default_pool() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for package in ("rolloutd", "tui", "machines")
        for path in sorted((ROOT / package).rglob("*.py"))
        if path != Path(threads.__file__) and path.relative_to(ROOT) not in OWN_THREADS
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute | ast.Name)
        and (node.attr if isinstance(node, ast.Attribute) else node.id)
        in ("to_thread", "run_in_executor", "ThreadPoolExecutor")
    ]
    assert found == [], "threads.py has a pool for each class of work"
