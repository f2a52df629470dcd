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
from typing import Any, TypeVar

T = TypeVar("T")

CLEANUP_STEPS = 20_000
"""Steps in which the tasks of the dead are ended once all is over: each needs a handful."""


_LEAKED_TASKS: list[asyncio.Task[Any]] = []
"""Tasks that would not end, kept for ever: to collect one would run its `finally` in another's life."""


class SimProcess:
    """What dies together: everything that was begun in its context."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.tasks: list[asyncio.Task[Any]] = []
        self.dropped_handles: list[asyncio.Handle] = []


CURRENT: ContextVar[SimProcess | None] = ContextVar("process", default=None)


class SimLoop(asyncio.AbstractEventLoop):
    """An event loop that is stepped; what it does not offer raises NotImplementedError."""

    def __init__(self, order: random.Random) -> None:
        self.steps = 0
        self.failures: list[dict[str, Any]] = []
        self._draw = order.random
        self._now = 0.0
        self._ready: list[tuple[asyncio.Handle, SimProcess | None]] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle, SimProcess | None]] = []
        self._serial = itertools.count()
        self._tasks: list[asyncio.Task[Any]] = []
        self._processes: list[SimProcess] = []
        self._running = False

    # -- stepping

    def step(self) -> bool:
        """Run one callback, letting time pass where none is ready; say whether there was one."""
        while self._ready or self._advance_time():
            ready = self._ready
            position = int(self._draw() * len(ready))
            ready[position], ready[-1] = ready[-1], ready[position]
            handle, owner = ready.pop()
            if handle.cancelled():
                continue
            if owner is not None and not owner.alive:
                owner.dropped_handles.append(handle)
                continue
            self.steps += 1
            handle._run()
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

    def call_from_world(self, seconds: float, action: Callable[[], object]) -> None:
        """Let the world, which no crash ends, do something after so many seconds."""
        self.call_at(self._now + seconds, action, context=Context())

    def end_all_tasks(self) -> None:
        """End all tasks, also those of dead processes, so that nothing is left to be collected.

        Returns when nothing stirs; by then the verdict must have been spoken.
        """
        for process in self._processes:
            process.alive = True
            self._ready += [(handle, process) for handle in process.dropped_handles]
            process.dropped_handles.clear()
        tasks = [*self._tasks, *(task for process in self._processes for task in process.tasks)]
        with self.entered():
            for _ in range(CLEANUP_STEPS):
                left = [task for task in tasks if not task.done()]
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
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)
        if not self._timers:
            return False
        self._now = max(self._now, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self._now:
            _, _, handle, owner = heapq.heappop(self._timers)
            self._ready.append((handle, owner))
        return True

    # -- the part of AbstractEventLoop that asyncio without I/O needs

    def time(self) -> float:
        """Return the virtual monotonic clock, seconds."""
        return self._now

    def call_soon(  # type: ignore[override]  # asyncio itself is the only caller
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        context = copy_context() if context is None else context
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append((handle, context.get(CURRENT)))
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        context = copy_context() if context is None else context
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._serial), handle, context.get(CURRENT)))
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None, **_: Any
    ) -> asyncio.Task[Any]:
        context = copy_context() if context is None else context
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        owner = context.get(CURRENT)
        (self._tasks if owner is None else owner.tasks).append(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.failures.append(context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing: a cancelled timer is passed over when its time comes."""

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return False
