"""The daemon's playbook runs over the world: claims, wrappers and handles, less the processes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator

from rolloutd.errors import NotFound
from rolloutd.ports import Failed, Host, Ok, RunEvent, RunRequest, RunState, Unknown
from tests.sim.reach import Reach
from tests.sim.world import Run

POLL_S = 3.0
"""How long a look at a run's progress takes, about."""

CLAIM_LIMIT_S = 30.0
"""How long a wrapper may take to claim its run, as with the real runner."""


class SimRunner:
    """ports.Runner: claims, wrappers and handles as the real one has them, less the processes."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach

    async def start(self, request: RunRequest) -> str:
        """Start the run, or find it by its claim; without a claim it is begun under another handle."""
        world = self._reach.world
        for number in itertools.count(1):
            handle = request.run if number == 1 else f"{request.run}~{number}"
            run = world.runs.get(handle)
            if run is None:
                break
            if run.claimed_by == "wrapper":
                return handle
            run.claimed_by = "daemon"
        world.court.fallible.discard(handle)
        try:
            await self._reach.effect(
                f"start {handle}", lambda: world.spawn(handle, request), refused=self._no_room
            )
        except (TimeoutError, OSError):
            world.court.fallible.add(handle)
            raise
        until = asyncio.get_running_loop().time() + CLAIM_LIMIT_S
        while not world.runs[handle].claimed_by and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.1)
        return handle

    async def observe(self, handle: str) -> RunState:
        """Say where the run stands."""
        run = self._find(handle)
        if run.result is None and not run.wrapper:
            return RunState(Unknown(f"the run on {run.request.node} was lost"), run.percent)
        if isinstance(run.result, Ok):
            self._reach.world.court.ended_well(handle)
        return RunState(run.result, run.percent, "a task" if run.percent else "")

    async def wait(self, handle: str) -> RunState:
        """Return a moment later."""
        await asyncio.sleep(POLL_S * (0.5 + self._reach.world.chances.latency.random()))
        return await self.observe(handle)

    async def events(self, handle: str, offset: int = 0) -> AsyncIterator[RunEvent]:
        """Nobody reads them here."""
        nothing: tuple[RunEvent, ...] = ()
        for event in nothing:
            yield event

    async def cancel(self, handle: str) -> None:
        """End every process of the run."""
        run = self._reach.world.runs.get(handle)
        if run is None:
            return

        world = self._reach.world
        await self._reach.effect(f"cancel {handle}", lambda: world.cancel(run), refused=lambda: None)

    async def clear(self, host: Host, *, keep: str | None, timeout_s: float) -> Ok | Failed:
        """End what older runs left on the node."""
        world = self._reach.world
        self._reach.mind_tenure(f"clear {host.name}")
        await self._reach.ask(host.name)

        def sweep() -> Ok | Failed:
            world.sweep(host.name, keep, "its processes were ended")
            return Ok("nothing is left")

        result: Ok | Failed = await self._reach.effect(
            f"clear {host.name}",
            sweep,
            refused=lambda: Failed(f"{host.name}: connection refused"),
            on_its_way=True,
        )
        return result

    def _find(self, handle: str) -> Run:
        try:
            return self._reach.world.runs[handle]
        except KeyError:
            raise NotFound(f"there is no run {handle}") from None

    def _no_room(self) -> None:
        raise OSError("no space left on device")
