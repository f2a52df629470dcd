"""What consoles cost the daemon: ten of them on 10,000 nodes, with a thousand events a second.

    python -m bench consoles [--json] [--nodes 10000] [--consoles 10] [--seconds 20]

The state, the store and the API's server are real and in this process; its nodes are moved through their
phases by committed events.  Each console is the console's own connection, requests and model, in a process of
its own and without its screen, and has the rollout's page open.  The loop's CPU time is that of its thread,
and what the consoles cost is the difference to the same events without them.  An event is on the screen when
the model has a status with its number, or a later one.  Of that time, `event to version` ends when the daemon
has made that status and `event to console` when a console's process has read it.  `timer late` says what the
machine adds to each of these steps: how much longer than asked for a console that has nothing to do sleeps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping
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
from rolloutd.control.status_feed import StatusFeed, StatusVersion
from tui.__main__ import tune_interpreter
from tui.app import FRAME_INTERVAL_S, TICK_INTERVAL_S
from tui.connection.streams import (
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
    "event to version p50": ("ms", None),
    "event to version p99": ("ms", None),
    "event to console p50": ("ms", None),
    "event to console p99": ("ms", None),
    "event to screen p50": ("ms", None),
    "event to screen p99": ("ms", 150.0),
    "timer late p50": ("ms", None),
    "timer late p99": ("ms", None),
    "events": ("per second", None),
    "events loop cpu": ("% of a core", None),
    "one console's cpu": ("% of a core", None),
    "requests": ("per second", None),
}
"""Unit and limit of each figure; the costs are of all consoles together."""

WARM_S = 2.0

END_LIMIT_S = 30.0
"""When an event that is not on a screen counts as lost."""

MaintainStage = list[tuple[float, int]]
"""When a status came to a stage of its way (monotonic), and its latest entry."""

# -- a console without a screen ----------------------------------------------------


class TimedClient(Client):
    """The API's client, which notes when its stream has brought a status."""

    def __init__(self, socket: Path) -> None:
        super().__init__(socket)
        self.read: MaintainStage = []

    def stream_parts(self, *args: Any, **options: Any) -> Generator[list[dict[str, Any]], None, None]:
        for lines in super().stream_parts(*args, **options):
            at = time.monotonic()
            seqs = [each.get("change", each.get("status", {})).get("seq") for each in lines]
            self.read += [(at, seq) for seq in seqs if seq is not None]
            yield lines


class HeadlessConsole:
    """The console's connection, requests and model, with its frames and ticks."""

    def __init__(self, socket: Path) -> None:
        self.model = Model()
        self.client = TimedClient(socket)
        self.shown: MaintainStage = []
        self.late_s: list[float] = []
        self.requests: Counter[str] = Counter()
        self.connections = 0
        self._messages = MessageQueue()
        self._listener = EventListener(self.client, self._messages, time.time)
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
        await asyncio.gather(self._draw_frames(), self._tick(), self._note_late_timers())

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
                self.connections += 1
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

    async def _note_late_timers(self) -> None:
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self.late_s.append(time.monotonic() - due)

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
    """Be a console until it has shown the entry that the input names, then print when it had what."""

    async def run() -> None:
        console = HeadlessConsole(socket)
        task = asyncio.create_task(console.run())
        while not console.has_nodes:
            await asyncio.sleep(TICK_S)
        print("ready", flush=True)
        began, began_cpu_s = time.monotonic(), time.process_time()
        last = int(await asyncio.to_thread(sys.stdin.buffer.read))
        with suppress(TimeoutError):
            async with asyncio.timeout(END_LIMIT_S):
                while console.model.seq < last:
                    await asyncio.sleep(TICK_S)
        passed, cpu_s = time.monotonic() - began, time.process_time() - began_cpu_s
        task.cancel()
        console.stop()
        report = {name: getattr(console, name) for name in ("shown", "late_s", "connections")}
        report |= {"read": console.client.read, "requests": console.requests.total() / passed}
        print(json.dumps(report | {"cpu": cpu_s / passed}))

    tune_interpreter()
    asyncio.run(run())


# -- the daemon ----------------------------------------------------------------------


class TimedFeed(StatusFeed):
    """Versions of the status, with when each was made."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: MaintainStage = []

    async def newer(self, *args: Any) -> StatusVersion:
        version = await super().newer(*args)
        if not self.versions or self.versions[-1][1] < version.status["seq"]:
            self.versions.append((time.monotonic(), version.status["seq"]))
        return version


class Mover:
    """Moves nodes of a rollout through their phases, a thousand events a second."""

    def __init__(self, fleet: Fleet, rollout: str) -> None:
        self.committed: MaintainStage = []
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
    mover, feed = Mover(fleet, rollout), TimedFeed()
    async with served(fleet, feed) as socket:
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
            last = b"%d" % mover.committed[-1][1]
            answers = await asyncio.gather(*(each.communicate(last) for each in processes))
            reports = [json.loads(each) for each, _ in answers]
        finally:
            for each in processes:
                with suppress(ProcessLookupError):
                    each.kill()
    if (connections := sum(each["connections"] for each in reports)) > consoles:
        raise RuntimeError(f"the consoles lost {connections - consoles} streams")
    loop_s, process_s = (a - 2 * b for a, b in zip(with_consoles, without, strict=True))
    stages = {"version": [feed.versions]}
    stages["console"], stages["screen"] = ([each[key] for each in reports] for key in ("read", "shown"))
    times = {
        f"event to {name}": chain.from_iterable(_latencies(mover.committed, each) for each in found)
        for name, found in stages.items()
    }
    times["timer late"] = chain.from_iterable(each["late_s"] for each in reports)
    percentiles: dict[str, float] = {}
    for name, values in times.items():
        in_order = sorted(values)
        for percent in (50, 99):
            percentiles[f"{name} p{percent}"] = in_order[len(in_order) * percent // 100] * 1000
    return percentiles | {
        "consoles loop cpu": loop_s / seconds * 100,
        "consoles process cpu": process_s / seconds * 100,
        "events": len(mover.committed) / seconds,
        "events loop cpu": without[0] * 2 / seconds * 100,
        "one console's cpu": statistics.mean(each["cpu"] for each in reports) * 100,
        "requests": sum(each["requests"] for each in reports),
    }


def _latencies(committed: MaintainStage, stage: MaintainStage) -> Iterator[float]:
    """Yield for each entry the seconds until it came to a stage; raises RuntimeError if it never did."""
    place = 0
    for at, seq in committed:
        while place < len(stage) and stage[place][1] < seq:
            place += 1
        if place == len(stage):
            raise RuntimeError(
                f"entry {seq} did not come in {END_LIMIT_S:.0f} s; the last one is {stage[-1][1]}"
            )
        yield max(0.0, stage[place][0] - at)


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
