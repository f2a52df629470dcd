"""Waits, stoppable tasks and background jobs of the daemon.

It knows neither nodes nor adapters.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Hashable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Any, Generic, ParamSpec, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
P = ParamSpec("P")


async def wait_for_first(event: asyncio.Event, awaitable: Awaitable[Any]) -> None:
    """Wait until the event is set or the awaitable ends, cancel the other; raises the awaitable's error."""
    triggered = asyncio.ensure_future(event.wait())
    waited = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({triggered, waited}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        # Both: a wait that is left behind stays registered at its event for ever.
        triggered.cancel()
        waited.cancel()
    if waited.done() and not waited.cancelled():
        waited.result()


async def compute(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a long computation without I/O gives; it runs in a thread.

    Meanwhile cycles are not collected: one collection stops the loop for longer than the computation does.
    """
    gc.disable()
    _computations.add(computation := object())
    try:
        return await asyncio.to_thread(function, *args, **kwargs)
    finally:
        _computations.remove(computation)
        # Computations may overlap; only the last one to end turns the collection on again.
        if not _computations:
            gc.enable()


_computations: set[object] = set()


class Wakeup:
    """A signal that ends one wait: the current one, or the next one if there is none."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.trigger = self._event.set

    async def wait_for(self, awaitable: Awaitable[Any]) -> None:
        """Wait for the awaitable or for the signal; raises the awaitable's error."""
        await wait_for_first(self._event, awaitable)
        # After the wait, so that a signal between two waits ends the second one.
        self._event.clear()


class BackgroundJobs(Generic[K]):
    """Jobs that run concurrently with the loop, at most one at a time for each key.

    `concurrency` limits how many run at once; `on_done` is called after each job.
    """

    def __init__(self, on_done: Callable[[], None] = lambda: None, concurrency: int | None = None) -> None:
        self._on_done = on_done
        self._slot: AbstractAsyncContextManager[Any] = (
            nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
        )
        self._running: set[K] = set()

    def start(
        self, tasks: asyncio.TaskGroup, job: Callable[..., Coroutine[Any, Any, None]], *keys: K, name: str
    ) -> None:
        """Start one job for the keys that no running job has."""
        new = [key for key in keys if key not in self._running]
        if new:
            # Here and not in the task: the loop may request the same keys before the task begins.
            self._running.update(new)
            tasks.create_task(self.run(job, *new), name=name)

    async def run(self, job: Callable[..., Coroutine[Any, Any, None]], *keys: K) -> None:
        """Run a job for these keys and wait for its end."""
        self._running.update(keys)
        try:
            async with self._slot:
                await job(*keys)
        finally:
            self._running.difference_update(keys)
            self._on_done()


class CancellableTask:
    """Runs one task at a time; `cancel` ends the task and not the caller of `run`."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
        """Cancel the running task, if there is one."""
        if self._task is not None and not self._is_cancelled:
            self._is_cancelled = True
            self._task.cancel()

    async def run(self, coroutine: Coroutine[Any, Any, None], name: str) -> bool:
        """Run the coroutine; return whether it was not cancelled."""
        self._task = asyncio.create_task(coroutine, name=name)
        try:
            await self._task
        except asyncio.CancelledError:
            cancelled_by_us = self._is_cancelled and self._task.cancelled()
            caller = asyncio.current_task()
            # A caller that is cancelled at the same moment must end too, so its cancellation is raised.
            if not cancelled_by_us or (caller is not None and caller.cancelling()):
                await _cancel_and_wait(self._task)
                raise
            return False
        finally:
            self._task, self._is_cancelled = None, False
        return True


@asynccontextmanager
async def running_in_background(coroutine: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Run a coroutine while the body runs, then cancel it; if it failed before, raise its error."""
    task = asyncio.create_task(coroutine)
    try:
        yield task
        if task.done():
            task.result()
    finally:
        await _cancel_and_wait(task)


async def _cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end, so that it does not outlive its parent."""
    task.cancel()
    await asyncio.wait((task,))
