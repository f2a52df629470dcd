"""A management cluster with Flux's controllers, one target, and runners of the change `flux` over it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from machines.model.node import NodeKind
from rolloutd.adapters.clusters.object_runner import ObjectRunner
from rolloutd.adapters.flux.runner import FluxRunner
from rolloutd.adapters.timers import SystemClock
from rolloutd.ports import Host, InventorySnapshot, PinnedSource, RunnerContext, RunRequest, RunState
from tests.contracts.fakes.shell import FakeShell
from tests.support.cluster_fleet import ClusterFleet
from tests.support.flux_controllers import Content, FluxControllers

JSON = Any

WAIT_S = 60.0
URL = "https://git.example/apps.git"
GOOD, NEWER, BAD, SICK, ENDLESS = (digit * 40 for digit in "abcde")
CONTENT = {
    GOOD: Content.GOOD,
    NEWER: Content.GOOD,
    BAD: Content.BUILD_FAILS,
    SICK: Content.UNHEALTHY,
    ENDLESS: Content.NEVER_ENDS,
}
CREATE = {
    "path": "./",
    "interval": 600.0,
    "prune": True,
    "wait": True,
    "health_timeout": 300.0,
    "depends_on": [],
}


@dataclass
class FluxEnvironment:
    """One target; each runner is that of a daemon that has just started."""

    fleet: ClusterFleet
    flux: FluxControllers
    directory: Path
    kubeconfig: Path
    runner_type: Callable[[RunnerContext], ObjectRunner] = FluxRunner
    contexts: list[RunnerContext] = field(default_factory=list)
    identity: str = ""
    """The identity that is pinned for the target."""
    inventory: list[SimpleNamespace] = field(default_factory=list)
    """Inventories of the settings before that of the management cluster."""

    def open_runner(self, machine: str = "one") -> ObjectRunner:
        """Return a runner over the records of a machine."""
        state_dir = self.directory / machine
        (state_dir / "runners").mkdir(parents=True, exist_ok=True)
        params = {"name": "hub", "kubeconfig": self.kubeconfig, "namespace": self.fleet.namespace}
        source = SimpleNamespace(kind="clusterapi", params={**params, "prefix": "", "labels": {}})
        settings = SimpleNamespace(inventory=[*self.inventory, source], state_dir=state_dir)
        context = RunnerContext(
            "", FakeShell(), SystemClock(), lambda: InventorySnapshot({}), settings, lambda _: self.directory
        )
        runner = self.runner_type(context)
        self.contexts.append(context)
        return runner

    @property
    def host(self) -> Host:
        connection = {
            "cluster_management": "hub",
            "cluster_namespace": self.fleet.namespace,
            "cluster_name": "east",
            "cluster_id": self.identity,
        }
        return Host("east", NodeKind.CLUSTER, connection=connection)

    def request(
        self,
        run: str,
        pin: str = GOOD,
        *,
        token: str = "",
        timeout_s: float = 300.0,
        previous: str = "",
        **params: JSON,
    ) -> RunRequest:
        given: Mapping[str, JSON] = {
            "kustomization": "east-apps",
            "create": CREATE,
            "values": {},
            "failing_for": 0.0,
            **params,
        }
        return RunRequest(
            run,
            self.host,
            PinnedSource("git", pin, URL),
            "",
            timeout_s=timeout_s,
            fencing_token=token,
            kind="flux",
            params=given,
            previous=previous,
        )

    async def close(self) -> None:
        for context in self.contexts:
            for shared in context.shared.values():
                await shared.close()


@asynccontextmanager
async def flux_environment(
    fleet: ClusterFleet, kubeconfig: Path, directory: Path
) -> AsyncIterator[FluxEnvironment]:
    flux = FluxControllers(fleet, dict(CONTENT))
    task = asyncio.create_task(flux.run())
    environment = FluxEnvironment(fleet, flux, directory, kubeconfig)
    try:
        yield environment
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await environment.close()


async def ended(runner: ObjectRunner, handle: str) -> RunState:
    async with asyncio.timeout(WAIT_S):
        state = await runner.get_state(handle)
        while state.result is None:
            state = await runner.wait_for_change(handle)
        return state


async def until_says(runner: ObjectRunner, handle: str, text: str) -> RunState:
    """Return the state of a run that is not over, once it says this."""
    async with asyncio.timeout(WAIT_S):
        state = await runner.get_state(handle)
        while text not in state.task:
            assert state.result is None, state.result
            state = await runner.wait_for_change(handle)
        return state
