"""A seeded event loop under a virtual clock: no selector, no threads, no wall clock.

Everything asyncio does passes through call_soon and call_at, so a loop that owns
those two owns every interleaving.  The only randomness is the draw of the next
ready callback: the seed names the whole execution.

Several processes share the loop.  A callback belongs to the process in whose
context it was made, and a process that was cut off is never stepped again; its
tasks are kept, because collecting them would run their `finally`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any, Self, TypeVar

T = TypeVar("T")

CLEANUP_STEPS = 20_000
"""Steps in which the tasks of the dead are ended once all is over: each needs a handful."""


MANY_TASKS = 10_000
"""Tasks of a process from which those that are done are dropped; most simulations have fewer."""

_LEAKED_TASKS: list[asyncio.Task[Any]] = []
"""Tasks that would not end, kept for ever: to collect one would run its `finally` in another's life."""


class SimProcess:
    """What dies together: everything that was begun in its context."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.lived_until = 0.0
        """When it last did anything, by the monotonic clock."""
        self.tasks: list[asyncio.Task[Any]] = []
        self._prune_at = MANY_TASKS
        self.dropped_handles: list[SimHandle] = []

    def keep_task(self, task: asyncio.Task[Any]) -> None:
        """Keep a task until it is done, however the process ends."""
        self.tasks.append(task)
        if len(self.tasks) >= self._prune_at:
            self.tasks = [each for each in self.tasks if not each.done()]
            self._prune_at = max(MANY_TASKS, 2 * len(self.tasks))


CURRENT: ContextVar[SimProcess | None] = ContextVar("process", default=None)


class SimTask(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address: a task group cancels the tasks of a set."""

    number: int

    def __new__(cls, coro: Any, *, loop: SimLoop, **named: Any) -> Self:
        task = super().__new__(cls)
        task.number = next(loop.task_numbers)
        return task

    def __hash__(self) -> int:
        return self.number


class SimHandle:
    """A callback to be run.  asyncio's own handle asks its loop about debugging each time one is made."""

    __slots__ = ("args", "callback", "context", "due_at", "is_cancelled", "owner")

    def __init__(self, callback: Any, args: tuple[Any, ...], context: Context, due_at: float) -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.due_at = due_at
        self.owner = context.get(CURRENT)
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True
        self.callback, self.args = None, ()  # what they refer to may end now

    def cancelled(self) -> bool:
        return self.is_cancelled

    def when(self) -> float:
        return self.due_at


class SimLoop(asyncio.AbstractEventLoop):
    """An event loop that is stepped; what it does not offer raises NotImplementedError."""

    def __init__(self, order: random.Random) -> None:
        self.steps = 0
        self.failures: list[dict[str, Any]] = []
        self._draw = order.random
        self._now = 0.0
        self._ready: list[SimHandle] = []
        self._timers: list[tuple[float, int, SimHandle]] = []
        self._serial = itertools.count()
        self.task_numbers = itertools.count()
        self._tasks: list[asyncio.Task[Any]] = []
        self._processes: list[SimProcess] = []
        self._running = False

    # -- stepping

    def step(self) -> bool:
        """Run one callback, letting time pass where none is ready; say whether there was one."""
        ready = self._ready
        while ready or self._advance_time():
            position = int(self._draw() * len(ready))
            handle, last = ready[position], ready.pop()
            if handle is not last:
                ready[position] = last
            if handle.is_cancelled:
                continue
            owner = handle.owner
            if owner is not None:
                if not owner.alive:
                    owner.dropped_handles.append(handle)
                    continue
                owner.lived_until = self._now
            self.steps += 1
            try:
                handle.context.run(handle.callback, *handle.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.failures.append({"message": f"in {handle.callback!r}", "exception": error})
            return True
        return False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be the running loop."""
        asyncio._set_running_loop(self)
        self._running = True
        try:
            yield
        finally:
            self._running = False
            asyncio._set_running_loop(None)

    def start_in(self, process: SimProcess, coro: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin something in a process of its own."""
        if process not in self._processes:
            self._processes.append(process)
        context = Context()
        context.run(CURRENT.set, process)
        return self.create_task(coro, context=context)

    def lived_until(self, besides: SimProcess) -> float | None:
        """Return when a process other than this one last did anything; None if there was none."""
        return max((each.lived_until for each in self._processes if each is not besides), default=None)

    def call_from_world(self, seconds: float, action: Callable[[], object]) -> None:
        """Let the world, which no crash ends, do something after so many seconds."""
        self.call_at(self._now + seconds, action, context=Context())

    def end_all_tasks(self) -> None:
        """End all tasks, also those of dead processes, so that nothing is left to be collected.

        Returns when nothing stirs; by then the verdict must have been spoken.
        """
        for process in self._processes:
            process.alive = True
            self._ready += process.dropped_handles
            process.dropped_handles.clear()
        tasks = [*self._tasks, *(task for process in self._processes for task in process.tasks)]
        with self.entered():
            left = tasks.copy()
            for _ in range(CLEANUP_STEPS):
                while left and left[-1].done():
                    left.pop()
                if not left:
                    break
                if not self._ready:
                    for task in left:
                        task.cancel()
                if not self.step():
                    break
        for task in tasks:
            if not task.done():
                _LEAKED_TASKS.append(task)
            elif not task.cancelled():
                task.exception()  # retrieved, so that nobody complains of it

    def _advance_time(self) -> bool:
        """Jump to the earliest timer and make everything due then ready."""
        timers = self._timers
        while timers and timers[0][2].is_cancelled:
            heapq.heappop(timers)
        if not timers:
            return False
        self._now = max(self._now, timers[0][0])
        while timers and timers[0][0] <= self._now:
            self._ready.append(heapq.heappop(timers)[2])
        return True

    # -- the part of AbstractEventLoop that asyncio without I/O needs

    def time(self) -> float:
        """Return the virtual monotonic clock, seconds."""
        return self._now

    def call_soon(  # type: ignore[override]  # asyncio itself is the only caller
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> SimHandle:
        handle = SimHandle(callback, args, copy_context() if context is None else context, self._now)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> SimHandle:
        handle = SimHandle(callback, args, copy_context() if context is None else context, when)
        heapq.heappush(self._timers, (when, next(self._serial), handle))
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> SimHandle:
        handle = SimHandle(callback, args, copy_context() if context is None else context, self._now + delay)
        heapq.heappush(self._timers, (handle.due_at, next(self._serial), handle))
        return handle

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run it in a later step, like a thread whose end other callbacks overtake."""
        future = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except Exception as error:
                found: Callable[[], None] = partial(future.set_exception, error)
            else:
                found = partial(future.set_result, result)
            self.call_soon(lambda: None if future.done() else found())

        self.call_soon(run)
        return future

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None, **_: Any
    ) -> asyncio.Task[Any]:
        context = copy_context() if context is None else context
        task = SimTask(coro, loop=self, name=name, context=context)
        owner = context.get(CURRENT)
        if owner is None:
            self._tasks.append(task)
        else:
            owner.keep_task(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.failures.append(context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return False
