"""What consoles cost the daemon: ten of them on 10,000 nodes, with a thousand events a second.

    python -m bench consoles [--json] [--nodes 10000] [--consoles 10] [--seconds 20]

The state, the store and the API's server are real and in this process; its nodes are moved through their
phases by committed events.  Each console is the console's own connection, requests and model, in a process of
its own and without its screen, and has the rollout's page open.  The loop's CPU time is that of its thread,
and what the consoles cost is the difference to the same events without them.  An event is on the screen when
the model has a status with its number, or a later one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from bench._scale_clients import served
from bench._scale_fleet import Fleet, with_fleet
from bench.scale import Figure
from machines.model.events import PhaseMoved
from machines.model.node import NodeHealth, Observation
from machines.states import Outcome, Phase, Trigger
from rolloutd.control.client import Client
from tui.app import FRAME_INTERVAL_S, TICK_INTERVAL_S
from tui.connection.event_stream import (
    REQUEST_TIMEOUT_S,
    Connected,
    EventListener,
    MessageQueue,
    RequestRunner,
)
from tui.state.fetch_queue import Fetch, FetchQueue
from tui.state.model import Model

EVENTS_PER_S = 1_000
TICK_S = 0.02
"""Between two commits: the steps of many nodes that end meanwhile share one."""

MAX_BATCH = 50
"""Events of one commit; one of a hundred rows would be judged in a thread, as no step of a node is."""

IN_FLIGHT = 400

EDGES = (
    (Trigger.ADMITTED, Phase.PENDING, Phase.ISOLATING, None),
    (Trigger.ISOLATED, Phase.ISOLATING, Phase.MAINTAINING, None),
    (Trigger.MAINTAINED, Phase.MAINTAINING, Phase.VERIFYING, None),
    (Trigger.VERIFIED, Phase.VERIFYING, Phase.DONE, Outcome.CHANGED),
)

FIGURES: dict[str, tuple[str, float | None]] = {
    "consoles loop cpu": ("% of a core", 10.0),
    "consoles process cpu": ("% of a core", None),
    "event to screen p50": ("ms", None),
    "event to screen p99": ("ms", 150.0),
    "events": ("per second", None),
    "events loop cpu": ("% of a core", None),
    "one console's cpu": ("% of a core", None),
    "requests": ("per second", None),
}
"""Unit and limit of each figure; the costs are of all consoles together."""

WARM_S = 2.0

END_S = 2.0
"""Until the last events have come to the screens."""

# -- a console without a screen ----------------------------------------------------


class HeadlessConsole:
    """The console's connection, requests and model, with its frames and ticks."""

    def __init__(self, socket: Path) -> None:
        self.model = Model()
        self.shown: list[tuple[float, int]] = []
        """When the console would have drawn which latest entry (monotonic)."""
        self.requests: Counter[str] = Counter()
        self._messages = MessageQueue()
        self._listener = EventListener(Client(socket), self._messages, time.time)
        self._fetches = FetchQueue(
            self.model, Client(socket, REQUEST_TIMEOUT_S), RequestRunner().run, time.time, lambda: 0.0
        )
        self._frame_requested = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def has_nodes(self) -> bool:
        return any(each.nodes for each in self.model.rollouts.values())

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self._messages.on_message = partial(loop.call_soon_threadsafe, self._frame_requested.set)
        self._listener.start()
        await asyncio.gather(self._draw_frames(), self._tick())

    def stop(self) -> None:
        """Ask the listening thread to end, before the loop that it wakes."""
        self._messages.on_message = lambda: None
        self._listener.stop()

    async def _draw_frames(self) -> None:
        while True:
            await self._frame_requested.wait()
            self._frame_requested.clear()
            self._drain_messages()
            await asyncio.sleep(FRAME_INTERVAL_S)

    def _drain_messages(self) -> None:
        lines: list[Mapping[str, Any]] = []
        for message in self._messages.take_all():
            if isinstance(message, Connected):
                self.model.apply_status(message.initial_state["status"], message.at)
                for rollout in self.model.rollouts:
                    self.model.track_nodes(rollout)
            elif isinstance(message, Mapping):
                lines.append(message)
        self.model.apply_stream_lines(lines, time.time())
        self._send_due()
        self._draw()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_INTERVAL_S)
            self.model.refresh(time.time())
            self._send_due()

    def _send_due(self) -> None:
        for fetch in self._fetches.due_fetches():
            self.requests[fetch.args[1].resource] += 1  # type: ignore[attr-defined]
            task = asyncio.create_task(self._fetch(fetch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _fetch(self, fetch: Fetch) -> None:
        pause = await fetch()
        self._draw()
        asyncio.get_running_loop().call_later(pause, self._send_due)

    def _draw(self) -> None:
        if not self.shown or self.shown[-1][1] < self.model.seq:
            self.shown.append((time.monotonic(), self.model.seq))


def be_console(socket: Path) -> None:
    """Be a console until the input ends, then print what it has shown."""

    async def run() -> None:
        console = HeadlessConsole(socket)
        task = asyncio.create_task(console.run())
        while not console.has_nodes:
            await asyncio.sleep(TICK_S)
        print("ready", flush=True)
        began_s = time.process_time()
        await asyncio.to_thread(sys.stdin.buffer.read)
        cpu_s = time.process_time() - began_s
        task.cancel()
        console.stop()
        print(json.dumps({"shown": console.shown, "requests": console.requests, "cpu_s": cpu_s}))

    asyncio.run(run())


# -- the daemon ----------------------------------------------------------------------


class Mover:
    """Moves nodes of a rollout through their phases, a thousand events a second."""

    def __init__(self, fleet: Fleet, rollout: str) -> None:
        self.committed: list[tuple[float, int]] = []
        """When which entry was committed (monotonic)."""
        self._fleet, self._rollout = fleet, rollout
        self._pending = iter(list(fleet.state.index.nodes))
        self._in_flight: deque[tuple[str, int]] = deque()

    async def run(self, seconds: float) -> tuple[float, float]:
        """Move nodes for so long; return the CPU seconds of the loop's thread and of the process."""
        self._observe_all()
        began, thread_s, process_s = time.monotonic(), time.thread_time(), time.process_time()
        moved = 0
        while (passed := time.monotonic() - began) < seconds:
            while moved < int(passed * EVENTS_PER_S):
                moved += await self._commit(min(MAX_BATCH, int(passed * EVENTS_PER_S) - moved))
            self._fleet.state.changes.notify_progress()
            await asyncio.sleep(TICK_S)
        return time.thread_time() - thread_s, time.process_time() - process_s

    def _observe_all(self) -> None:
        index, now = self._fleet.state.index, self._fleet.state.now()
        index.record_observations([Observation(each, NodeHealth.UP, now) for each in index.nodes], now)

    async def _commit(self, events: int) -> int:
        state = self._fleet.state
        async with state.exclusive_commit() as commit:
            now = state.now()
            entries = await commit([self._next(now) for _ in range(events)], "bench", now)
        self.committed += [(time.monotonic(), each.seq) for each in entries]
        return events

    def _next(self, now: float) -> PhaseMoved:
        """Let the node that has been in its phase for longest take its next edge, or another one begin."""
        if len(self._in_flight) < IN_FLIGHT:
            node, step = next(self._pending), 0
        else:
            node, step = self._in_flight.popleft()
        trigger, source, target, outcome = EDGES[step]
        if outcome is None:
            self._in_flight.append((node, step + 1))
        return PhaseMoved(self._rollout, node, trigger, source, target, 1, now, outcome, isolated=False)


async def measure_consoles(fleet: Fleet, consoles: int, seconds: float) -> dict[str, float]:
    """Return what the consoles cost the loop and the process, and the way of an event to a screen."""
    rollout = await fleet.submit("sat", 1)
    await fleet.open_start_gate(rollout)
    fleet.running.cancel()  # the daemon decides nothing itself
    await asyncio.wait((fleet.running,))
    await fleet.open_window()
    mover = Mover(fleet, rollout)
    async with served(fleet) as socket:
        await mover.run(WARM_S)
        without = await mover.run(seconds / 2)
        command = (sys.executable, "-m", "bench.consoles", "--be-console", str(socket))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        processes = [await asyncio.create_subprocess_exec(*command, **pipes) for _ in range(consoles)]
        try:
            for each in processes:
                await each.stdout.readline()
            await mover.run(WARM_S)
            mover.committed.clear()
            with_consoles = await mover.run(seconds)
            await asyncio.sleep(END_S)
            reports = [json.loads((await each.communicate(b""))[0]) for each in processes]
        finally:
            for each in processes:
                with suppress(ProcessLookupError):
                    each.kill()
    late = sorted(chain.from_iterable(_latencies(mover.committed, each["shown"]) for each in reports))
    loop_s, process_s = (a - 2 * b for a, b in zip(with_consoles, without, strict=True))
    console_s = sum(each["cpu_s"] for each in reports) / (WARM_S + seconds + END_S)
    requests = sum(sum(each["requests"].values()) for each in reports)
    return {
        "consoles loop cpu": loop_s / seconds * 100,
        "consoles process cpu": process_s / seconds * 100,
        "event to screen p50": late[len(late) // 2] * 1000,
        "event to screen p99": late[len(late) * 99 // 100] * 1000,
        "events": len(mover.committed) / seconds,
        "events loop cpu": without[0] * 2 / seconds * 100,
        "one console's cpu": console_s / consoles * 100,
        "requests": requests / (WARM_S + seconds + END_S),
    }


def _latencies(committed: list[tuple[float, int]], shown: list[tuple[float, int]]) -> Iterator[float]:
    """Yield for each entry the seconds until a console had shown it; raises RuntimeError if it never had."""
    place = 0
    for at, seq in committed:
        while place < len(shown) and shown[place][1] < seq:
            place += 1
        if place == len(shown):
            raise RuntimeError(f"entry {seq} was never shown")
        yield max(0.0, shown[place][0] - at)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what consoles cost the daemon.")
    parser.add_argument("--be-console", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--consoles", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=16.0)
    options = parser.parse_args()
    if options.be_console:
        be_console(options.be_console)
        return
    logging.disable(logging.ERROR)
    measure = partial(measure_consoles, consoles=options.consoles, seconds=options.seconds)
    values = asyncio.run(with_fleet(options.nodes, measure))
    figures = [Figure(name, options.nodes, round(values[name], 2), *FIGURES[name]) for name in FIGURES]
    if options.json:
        print(json.dumps([asdict(each) for each in figures]))
        return
    for each in figures:
        limit = "" if each.limit is None else f"(at most {each.limit:g})"
        print(f"{each.figure:22}{each.value:10.1f} {each.unit} {limit}")


if __name__ == "__main__":
    main()
