"""One simulation of a large fleet to its end, without faults and with the invariants on.

    python -m tests.sim --nodes 100000

What a seed judges after each commit by the whole fleet is judged here by the daemon's own invariants for each
event, and by a recount of the running counts now and then.  Seeds cover what does not happen here: a run
that is polled while it runs, observations that expire, votes while nodes are in flight.

A node costs some 6 to 8 ms of CPU time, at 3,000 nodes as at 100,000. The first answer of the inventory of
100,000 and their submit take 40 s more and leave 0.8 GB in memory.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from machines.states import Outcome
from rolloutd.settings import Settings
from tests.sim import plans
from tests.sim.fault_plan import NoFaults
from tests.sim.random_streams import RandomStreams
from tests.sim.scenario import Scenario, SimResult
from tests.sim.sim_node import SimNode
from tests.sim.simulation import Simulation
from tests.sim.workspace import temporary_state_dir
from tests.support.recount import wrong_counts

POOL_SIZE = 100
"""Nodes of a pool: a thousand pools of a hundred thousand nodes."""

PARALLEL = 1000
"""Nodes in flight at once, in all pools together."""

CANARIES = 10

COMMIT_S = 1.0
"""A slow disk: the steps that end meanwhile are written together, as on a busy machine."""

RUN_S, POLL_S = (2.0, 8.0), 10.0
"""A run is over at the first poll, before its isolation is inspected: without faults none is lost."""

OBSERVE_WITHIN = "1d"
"""A fleet of this size has a watch, which confirms its nodes without reporting them again: none expires."""

TRACE_LINES = 10_000
"""The last lines of the trace that are kept: a node writes some sixty."""

RECOUNTS = 2
"""How often the counts are counted again: as often as half of the nodes is done."""

STEPS_PER_NODE = 400
"""Steps after which a fleet of so many nodes is not getting anywhere; a node takes some hundred."""


@dataclass(frozen=True, slots=True)
class LargeRun:
    """How a large run went."""

    result: SimResult
    done: int
    seconds: float


class LargeSimulation(Simulation):
    """A simulation that submits one plan, approves it and waits for its end."""

    done = 0

    async def _script(self) -> None:
        self.world.commit_s, self.world.poll_s, self.world.run_s = COMMIT_S, POLL_S, RUN_S
        self.start_daemon()
        while not await self._try_submit_all():
            await asyncio.sleep(10.0)
        await self._recovery_user.approve_and_resume()
        recounted = 0
        while True:
            await asyncio.sleep(60.0)
            life = self.newest_daemon()
            if life is None or life.state is None:
                error = self._daemons[-1].task.exception() if self._daemons[-1].task.done() else None
                self.world.checker.report_violation(f"the daemon has ended: {error!r}")
                return
            del self.world.trace[:-TRACE_LINES]
            index = life.state.index
            counters = index.counters("R1")
            self.done = counters.outcomes[Outcome.CHANGED]
            if self.done * RECOUNTS >= recounted * counters.phases.total():
                recounted += 1
                for text in wrong_counts(index):
                    self.world.checker.report_violation(text)
            if index.rollout("R1").closed:
                return
            # A gate waits for the last node in flight, and each look at the gates is over all targets.
            if not counters.in_flight:
                await self._recovery_user.approve_and_resume()

    async def _try_submit_all(self) -> bool:
        self._contents["R1"] = plans.content_of("plan1", self._scenario.specs[0])
        self.world.isolators["R1"] = ("command",)
        return await self._try_submit("R1")


def run_large_fleet(nodes: int) -> LargeRun:
    """Run a rollout over so many nodes."""
    began = time.process_time()
    machines = [
        SimNode(
            f"n{number}", {"team": f"t{number // POOL_SIZE}", "canary": "true" if number < 10 else "false"}
        )
        for number in range(nodes)
    ]
    settings = Settings.model_validate(
        {
            "inventory_refresh": "1h",
            "observe_within": OBSERVE_WITHIN,
            "max_parallel": PARALLEL,
            "pools": {"team": {"max_unavailable": 5}},
            "teams": {"infra": {}, "a": {}, "b": {}},
        }
    )
    spec: dict[str, Any] = {
        **plans.SMALL,
        "canary": {"select": "canary=true", "max_parallel": CANARIES},
        "soak": "1m",
    }
    with temporary_state_dir() as state_dir:
        simulation = LargeSimulation(
            f"{nodes} nodes",
            RandomStreams.of(0),
            lambda coverage: NoFaults(),
            Scenario(machines, settings, [spec], 0.0),
            state_dir,
            judges_whole_fleet=False,
            max_steps=nodes * STEPS_PER_NODE,
        )
        result = simulation.run()
    return LargeRun(result, simulation.done, time.process_time() - began)
