"""A fleet in memory for prepare stages: what is on its nodes, and what their runs do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from machines.model.decision import CompareStaged, Prepare
from machines.scheduler.decide import decide
from rolloutd.adapters.directory_store import DirectoryStore
from rolloutd.engine.drivers.node_session import AdapterSet, PreparationAdapters
from rolloutd.engine.preparation.builds import ARTIFACTS_DIRECTORY
from rolloutd.errors import NodeUnreachable, NotFound
from rolloutd.ports import (
    Checkpoint,
    Failed,
    Host,
    Ok,
    PinnedSource,
    RunRequest,
    RunState,
    Unknown,
    without_rollout,
)
from tests.contracts.fakes.runner import FakeRunner
from tests.contracts.fakes.sources import SOURCE
from tests.contracts.fakes.stager import FakeStager
from tests.rolloutd.control_environment import PLAN, ControlEnvironment
from tests.rolloutd.decided_jobs import carry_out

IDLE = {"boot-id": "b1", "unit/app.service": "pid 7", "sysctl/net.core.somaxconn": "128"}


def plan_with(*stages: str) -> str:
    items = ", ".join(f"{{install: {{name: {name}, playbook: site.yml}}}}" for name in stages)
    return PLAN.replace("  soak:", f"  prepare: [{items}]\n  soak:")


@dataclass
class Fleet:
    """What is on the nodes: snapshots and checkpoints; `disturb` is what a run does, `cut` ends a login.

    So many snapshots after a run get no answer as `silent` says; `cleaned` has the nodes on which lost runs
    were ended.
    """

    state: dict[str, dict[str, str]] = field(default_factory=dict)
    facts: dict[str, dict[tuple[str, str], Checkpoint]] = field(default_factory=dict)
    disturb: Mapping[str, str] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    silent: int = 0
    cleaned: list[str] = field(default_factory=list)
    during_clean_up: Callable[[], Awaitable[None]] | None = None
    before_start: Callable[[], None] = field(default=lambda: None)
    after_start: Callable[[], None] = field(default=lambda: None)
    """What happens around each start of a run; a CancelledError is a kill of the daemon."""
    runs: list[str] = field(default_factory=list)
    edited: bool = False
    result: Failed | None = None
    """How each run ends, None for as the runner says."""
    faults: int = 0
    """So many questions about a run fail on the daemon's machine."""
    stager: FakeStager = field(default_factory=FakeStager)
    tree: Path = Path("/tree")
    build: Callable[[Path], None] = field(default=lambda manifest: None)
    """What a build's playbook does, given the path of its manifest."""

    async def snapshot(self, host: Host, *, timeout_s: float) -> Mapping[str, str]:
        if self.silent and self.runs:
            self.silent -= 1
            raise NodeUnreachable(f"{host.name}: no answer")
        return dict(self.state.setdefault(host.name, dict(IDLE)))

    async def read(self, host: Host, *, timeout_s: float) -> Mapping[tuple[str, str], Checkpoint] | None:
        return None if self.edited else dict(self.facts.setdefault(host.name, {}))

    async def write(self, host: Host, checkpoint: Checkpoint, *, timeout_s: float) -> None:
        if checkpoint.stage in self.cut:
            raise NodeUnreachable(f"{host.name}: the connection was lost")
        self.facts[host.name][checkpoint.plan, checkpoint.stage] = checkpoint

    async def remove(self, host: Host, rollout: str, *, timeout_s: float) -> None:
        self.facts[host.name] = without_rollout(self.facts[host.name], rollout)


class InstallingRunner(FakeRunner):
    """A runner whose runs change the node as the fleet says, and end at once."""

    def __init__(self, inside: ControlEnvironment, fleet: Fleet) -> None:
        super().__init__(inside.run_host)
        self._fleet = fleet

    async def start(self, request: RunRequest) -> str:
        node = request.node
        self._fleet.before_start()
        self._fleet.runs.append(f"{node}.{request.step}.{request.attempt}")
        if "rolloutd_manifest" in request.variables:
            self._fleet.build(Path(str(request.variables["rolloutd_manifest"])))
        else:
            self._fleet.state[node].update(self._fleet.disturb)
        handle = await super().start(request)
        self._fleet.after_start()
        return handle

    async def clean_up_stale_runs(
        self, host: Host, *, timeout_s: float, fencing_token: str = ""
    ) -> Ok | Failed | Unknown:
        self._fleet.cleaned.append(host.name)
        if self._fleet.during_clean_up is not None:
            await self._fleet.during_clean_up()
        return await super().clean_up_stale_runs(host, timeout_s=timeout_s, fencing_token=fencing_token)

    async def wait_for_change(self, handle: str) -> RunState:
        await asyncio.sleep(0)
        return await self.get_state(handle)

    async def get_state(self, handle: str) -> RunState:
        if self._fleet.faults:
            self._fleet.faults -= 1
            raise OSError("no memory left")
        result = self._fleet.result
        return await super().get_state(handle) if result is None else RunState(result)


def preparing_adapters(inside: ControlEnvironment, fleet: Fleet, tree_failure: str = "") -> AdapterSet:
    """Return adapters over the fleet."""

    async def find_source(rollout: str) -> PinnedSource:
        if tree_failure:
            raise NotFound(tree_failure)
        return SOURCE

    built = DirectoryStore(inside.state.settings.files_dir / ARTIFACTS_DIRECTORY)
    stager = fleet.stager
    ports = PreparationAdapters({"ssh": stager}, fleet, fleet, stager, lambda source: fleet.tree, built)
    return AdapterSet(InstallingRunner(inside, fleet), {}, {}, find_source, preparation=ports)


async def prepare_all(inside: ControlEnvironment, fleet: Fleet, tree_failure: str = "") -> None:
    """Carry out what the core decides, until it decides nothing more."""
    adapters = preparing_adapters(inside, fleet, tree_failure)
    while True:
        wanted = decide(inside.state.index, inside.clock.now())
        commands = [*wanted.of(Prepare), *wanted.of(CompareStaged)]
        if not commands:
            return
        await carry_out(inside.state, adapters, commands)
