"""A canary that fails during a long soak, in virtual time: the rollout pauses and says why."""

from __future__ import annotations

from typing import Any

from machines.model.reasons import ReasonCode
from machines.scheduler.progress import RolloutProgress, RolloutState, rollout_progress
from tests.sim import plans
from tests.sim.fault_plan import ScriptedFaults
from tests.sim.random_streams import RandomStreams
from tests.sim.sim_node import SimNode
from tests.sim.simulation import Scenario, Simulation
from tests.sim.workspace import temporary_state_dir

SOAK_S = 7200.0
BAD_AFTER_S = 600.0
NOTICED_WITHIN_S = 180.0
"""One interval of the soak's checks and two confirmations."""


def test_canary_bad_ten_minutes_into_soak_pauses_rollout() -> None:
    spec: dict[str, Any] = {**plans.SMALL, "soak": "2h", "canary": {"select": "canary=true"}}
    machines = [
        SimNode(f"n{number}", {"team": "a", "rack": "r1", "canary": "true" if number == 1 else "false"})
        for number in (1, 2)
    ]
    scenario = Scenario(machines, plans.default_settings(), [spec], 86_400.0)
    seen: dict[str, float] = {}
    progress: list[RolloutProgress] = []
    with temporary_state_dir() as state_dir:
        simulation = Simulation(
            "soak", RandomStreams.of(0), lambda marks: ScriptedFaults({}, marks, {}), scenario, state_dir
        )
        loop, world = simulation.loop, simulation.world
        world.job_faults = None  # no user deletes this rollout

        def begin_soak() -> None:
            seen.setdefault("soak", loop.time())
            if len(seen) == 1:
                loop.call_from_world(BAD_AFTER_S, lambda: setattr(machines[0], "fails_checks", True))

        def read_progress() -> None:
            daemon = simulation.newest_daemon()
            assert daemon is not None
            assert daemon.state is not None
            progress.append(rollout_progress(daemon.state.index, "R1", daemon.state.now()))
            machines[0].fails_checks = False

        def fail() -> None:
            seen["failed"] = loop.time()
            loop.call_from_world(1.0, read_progress)

        world.triggers["commit verified:n1"] = begin_soak
        world.triggers["commit soak-check-failed:n1 VerdictRecorded"] = fail
        world.triggers["commit admitted:n2"] = lambda: seen.setdefault("fleet", loop.time())
        result = simulation.run()
    assert result.violations == []
    assert BAD_AFTER_S <= seen["failed"] - seen["soak"] <= BAD_AFTER_S + NOTICED_WITHIN_S
    found = progress[0]
    assert found.state is RolloutState.PAUSED
    assert found.reason is not None
    assert (found.reason.code, found.reason.subject) == (ReasonCode.NODE_FAILED, "n1")
    assert found.reason.params["step"] == "soak.verify.0.reachable"
    assert seen["fleet"] >= seen["failed"] + SOAK_S, "the soak begins again after the canary"
