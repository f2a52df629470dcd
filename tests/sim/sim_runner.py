"""The daemon's playbook runs over the world: claims, wrappers and handles, less the processes."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Collection

from machines.model.plan import PLAYBOOK_RUN
from rolloutd.errors import AdapterFailed, NotFound
from rolloutd.ports import (
    Failed,
    Host,
    Ok,
    RunEvent,
    RunnerStatus,
    RunRequest,
    RunState,
    Unknown,
    handle_of_start,
    id_of,
)
from tests.sim.fault_injection import FaultyAccess, PlantedError
from tests.sim.hostile_values import judge_variables
from tests.sim.sim_node import SimRun

CLAIM_LIMIT_S = 30.0
"""How long a wrapper may take to claim its run, as with the real runner."""


class SimRunner:
    """ports.Runner: claims, wrappers and handles as the real one has them, less the processes."""

    def __init__(self, access: FaultyAccess) -> None:
        self._access = access
        self.statuses = {"local": RunnerStatus(parallel=16)}

    def run_id_for(self, name: str, node: str, kind: str = "") -> str:
        return name

    def is_elsewhere(self, handle: str) -> bool:
        return False

    async def start(self, request: RunRequest) -> str:
        """Start the run, or find it by its claim; without a claim it is begun under another handle."""
        world = self._access.world
        judge_variables(world, request.host.variables)
        if id_of(request.run_id) != request.run_id:
            raise ValueError(f"{request.run_id!r} is a handle and not a run id")
        for number in itertools.count(1):
            handle = handle_of_start(request.run_id, number)
            run = world.runs.get(handle)
            if run is None:
                break
            if run.claimed_by == "wrapper":
                return handle
            run.claimed_by = "daemon"
        world.checker.uncertain_runs.discard(handle)
        try:
            await self._access.run_effect(
                f"start {handle}",
                lambda: world.spawn(handle, request),
                on_refused=self._raise_disk_full,
                already_started=request.check_only,  # it changes nothing, so who starts it does not matter
            )
        except (TimeoutError, OSError):
            world.checker.uncertain_runs.add(handle)
            raise
        until = asyncio.get_running_loop().time() + CLAIM_LIMIT_S
        while not world.runs[handle].claimed_by and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.1)
        return handle

    async def read_previous(self, request: RunRequest) -> str | None:
        """Return what a note says now; a playbook records nothing of the kind."""
        if request.kind == PLAYBOOK_RUN:
            return None
        machine = await self._access.connect(request.node)
        previous = json.dumps({"text": machine.version})
        self._access.world.checker.changes.on_state_read(request, previous)
        return previous

    async def get_state(self, handle: str) -> RunState:
        """Say where the run stands; one without a claim never begins, as with the real runner."""
        run, world = self._find(handle), self._access.world
        run.claimed_by = run.claimed_by or "daemon"
        if run.claimed_by == "daemon" and run.result is None:
            text = f"the run on {run.request.node} was prepared and never began"
            later = (world.runs.get(f"{handle.partition('~')[0]}~{number}") for number in range(2, 17))
            has_begun = any(each is not None and each.claimed_by != "daemon" for each in later)
            return RunState(Unknown(text), has_begun=has_begun)
        if run.result is None and not run.has_wrapper:
            return RunState(Unknown(f"the run on {run.request.node} was lost"), run.percent)
        if isinstance(run.result, Ok) and not run.request.check_only:
            world.checker.on_run_succeeded(handle)
        return RunState(run.result, run.percent, "a task" if run.percent else "")

    async def wait_for_change(self, handle: str) -> RunState:
        """Return a moment later."""
        world = self._access.world
        await asyncio.sleep(world.poll_s * (0.5 + world.streams.latency.random()))
        return await self.get_state(handle)

    async def read_events(self, handle: str, offset: int = 0) -> AsyncIterator[RunEvent]:
        """Yield what a run in check mode says; of the others only a pilot's evidence is read."""
        run = self._find(handle)
        if not run.request.check_only and self._access.world.fault_plan.chance("evidence-breaks", 0.5):
            raise PlantedError(f"{handle}: its log is not what the runner expects")
        if run.request.check_only and isinstance(run.result, Ok):
            yield RunEvent(1, 0.0, "changed" if run.would_change else "ok", "set version")

    async def keep_connections(self, nodes: Collection[str]) -> None:
        """Do nothing: no node here has connections."""

    async def discard(self, handle: str) -> None:
        """Forget a run that is over."""
        self._access.world.runs.pop(handle, None)

    async def cancel(self, handle: str) -> None:
        """End every process of the run."""
        run = self._access.world.runs.get(handle)
        if run is None:
            return
        world = self._access.world

        def raise_left() -> None:
            raise AdapterFailed(f"{run.request.node}: processes of {handle} do not end")

        await self._access.run_effect(f"cancel {handle}", lambda: world.cancel(run), on_refused=raise_left)
        if handle in world.machines[run.request.node].runs and run.ignored_signals:
            raise_left()

    async def clean_up_stale_runs(
        self, host: Host, *, timeout_s: float, fencing_token: str = ""
    ) -> Ok | Failed | Unknown:
        """End what older runs left on the node."""
        world = self._access.world
        self._access.check_leadership(f"clear {host.name}")
        await self._access.connect(host.name)

        def sweep() -> Ok | Failed:
            left = world.kill_stale_runs(host.name, "its processes were ended")
            if left:
                return Failed(f"{host.name}: processes of {', '.join(left)} do not end")
            return Ok("nothing is left")

        result: Ok | Failed = await self._access.run_effect(
            f"clear {host.name}",
            sweep,
            on_refused=lambda: Failed(f"{host.name}: connection refused"),
            already_started=True,
        )
        return result

    def _find(self, handle: str) -> SimRun:
        try:
            return self._access.world.runs[handle]
        except KeyError:
            raise NotFound(f"there is no run {handle}") from None

    def _raise_disk_full(self) -> None:
        raise OSError("no space left on device")
