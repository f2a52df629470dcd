"""Waits, stoppable tasks and background jobs of the daemon.

It knows neither nodes nor adapters.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Hashable,
    Iterable,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, Protocol, TypeVar

from rolloutd.concurrency import garbage, threads
from rolloutd.ports import Clock

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
P = ParamSpec("P")

JOB_RETRY_S = 60.0
"""Pause after a job's unexpected error, which mostly comes again: the daemon must not spin."""


async def wait_for_first(signal: Awaitable[Any], awaitable: Awaitable[Any]) -> None:
    """Wait until the signal or the awaitable ends, cancel the other; raises the awaitable's error."""
    triggered = asyncio.ensure_future(signal)
    waited = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({triggered, waited}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        # Both: a wait that is left behind stays registered at its event for ever.
        triggered.cancel()
        waited.cancel()
    if waited.done() and not waited.cancelled():
        waited.result()


@dataclass(slots=True)
class ThreadTime:
    """CPU seconds that a task's computations have taken in threads."""

    used_s: float = 0.0


_thread_time: ContextVar[ThreadTime] = ContextVar("thread_time")


def count_thread_time() -> ThreadTime:
    """Return what counts the time of the computations that this task begins from now on."""
    _thread_time.set(counted := ThreadTime())
    return counted


async def compute(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a long computation without I/O gives; it runs in a thread."""
    counted = _thread_time.get(ThreadTime())

    def measured() -> T:
        began_s = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            counted.used_s += time.thread_time() - began_s

    with garbage.uncollected():
        return await threads.COMPUTATIONS.run(measured)


async def compute_in_parts(part: Callable[[], bool]) -> None:
    """Call `part` until it returns False; between two parts the loop continues."""
    if not part():
        return
    with garbage.uncollected():
        is_unfinished = True
        while is_unfinished:
            await asyncio.sleep(0)
            is_unfinished = part()


async def free(values: list[Any]) -> None:
    """Drop the last references to large values in a thread: many objects take a tenth of a second."""
    await threads.COMPUTATIONS.run(values.clear)


async def for_each(items: Iterable[T], work: Callable[[T], Awaitable[object]], *, at_once: int) -> None:
    """Do the work for each item, for so many at once; an item is taken when its turn comes.

    Results are not kept.  The first error ends the rest and is raised.
    """
    iterator = iter(items)

    async def work_off() -> None:
        for item in iterator:
            await work(item)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(at_once):
                tasks.create_task(work_off())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


FEW_ROWS = 200
"""Rows over which a computation holds the loop for some milliseconds at most."""


async def compute_over(rows: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what a computation over so many rows gives; over many it runs in a thread."""
    if rows <= FEW_ROWS:
        return function(*args, **kwargs)
    return await compute(function, *args, **kwargs)


class Wakeup:
    """A signal that ends one wait: the current one, or the next one if there is none."""

    def __init__(self) -> None:
        self._is_triggered = False
        # Not an event: each wait for one is one more task, and a node in flight waits some ten times.
        self._signal: asyncio.Future[None] | None = None

    def trigger(self) -> None:
        """End the current wait, or the next one."""
        self._is_triggered = True
        if self._signal is not None and not self._signal.done():
            self._signal.set_result(None)

    async def wait_for(self, awaitable: Awaitable[Any]) -> None:
        """Wait for the awaitable or for the signal; raises the awaitable's error."""
        self._signal = asyncio.get_running_loop().create_future()
        if self._is_triggered:
            self._signal.set_result(None)
        await wait_for_first(self._signal, awaitable)
        # After the wait, so that a signal between two waits ends the second one.
        self._is_triggered = False


class JobReports(Protocol):
    """Where a job's failure is reported, and the clock of its next try."""

    @property
    def clock(self) -> Clock: ...

    def report_job(self, kind: str, name: str, error: str) -> None:
        """Show the failure of a job until it is tried again; an empty error ends that."""


class BackgroundJobs(Generic[K]):
    """Jobs that run concurrently with the loop, at most one at a time for each key.

    A job that fails is reported and its keys wait: it never ends the daemon.  `concurrency` limits how many
    run at once; `on_done` is called after each job.
    """

    def __init__(
        self,
        kind: str,
        reports: JobReports,
        on_done: Callable[[], None] = lambda: None,
        concurrency: int | None = None,
    ) -> None:
        self._kind, self._reports, self._on_done = kind, reports, on_done
        self._slot: AbstractAsyncContextManager[Any] = (
            nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)
        )
        self._running: set[K] = set()

    def start(
        self, tasks: asyncio.TaskGroup, job: Callable[..., Coroutine[Any, Any, None]], *keys: K, name: str
    ) -> None:
        new = [key for key in keys if key not in self._running]
        if new:
            # Here and not in the task: the loop may request the same keys before the task begins.
            self._running.update(new)
            tasks.create_task(self._run_reported(job, new, name), name=name)

    async def run(self, job: Callable[..., Coroutine[Any, Any, None]], *keys: K) -> None:
        """Run a job for these keys and wait for its end; raises its error."""
        self._running.update(keys)
        try:
            async with self._slot:
                await job(*keys)
        finally:
            self._running.difference_update(keys)
            self._on_done()

    async def _run_reported(
        self, job: Callable[..., Coroutine[Any, Any, None]], keys: Sequence[K], name: str
    ) -> None:
        try:
            async with self._slot:
                await job(*keys)
        except Exception as error:
            log.exception("%s: unexpected error", name)
            self._reports.report_job(self._kind, name, f"unexpected {type(error).__name__}: {error}")
            # The keys stay taken: the loop would start the same job again at once.
            await self._reports.clock.sleep(JOB_RETRY_S)
            self._reports.report_job(self._kind, name, "")
        finally:
            self._running.difference_update(keys)
            self._on_done()


class CancellableTask:
    """Runs one task at a time; `cancel` ends the task and not the caller of `run`."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False

    def cancel(self) -> None:
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


async def wait_until_done(task: asyncio.Task[Any]) -> None:
    """Wait for the end of a task, however often the wait is cancelled."""
    while not task.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # retrieved, else asyncio logs it as never retrieved


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
