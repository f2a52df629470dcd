"""A daemon that may no longer lead calls no adapter that acts on a node."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from machines.model.plan import StepDef
from machines.model.step_record import Ok
from rolloutd.engine.background.checks_outside_attempts import check_outside_attempt
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession
from rolloutd.engine.drivers.traffic_probes import probe_traffic
from rolloutd.engine.outcomes import capture_errors
from rolloutd.errors import LeadershipLost
from tests.contracts.fakes.runner import FakeRunner
from tests.contracts.fakes.sources import find_source
from tests.rolloutd.control_environment import control_environment
from tests.rolloutd.decided_jobs import checks_of


class CalledAdapter:
    """A check and a traffic probe that keep how often they were called."""

    def __init__(self) -> None:
        self.calls = 0

    async def check(self, ctx: Any) -> Ok:
        self.calls += 1
        return Ok()

    probe = check


async def check(session: NodeSession) -> object:
    spec = session.state.index.rollout(session.rollout).plan.verify[0]
    return await check_outside_attempt(checks_of(session), spec)


async def probe(session: NodeSession) -> object:
    return await probe_traffic(session, StepDef("traffic.0.reachable", "reachable"))


async def act_in_prepare_stage(session: NodeSession) -> object:
    acting = session.adapters.checks["reachable"].check(None)  # type: ignore[arg-type]
    return await capture_errors(session.state, session.node, acting)


@pytest.mark.parametrize("act", [check, probe, act_in_prepare_stage])
async def test_lost_leader_calls_no_adapter(
    tmp_path: Path, act: Callable[[NodeSession], Awaitable[object]]
) -> None:
    async with control_environment(tmp_path) as inside:
        rollout, adapter = await inside.start(), CalledAdapter()
        adapters = AdapterSet(
            FakeRunner(inside.run_host), {}, {"reachable": adapter}, find_source, {"reachable": adapter}
        )
        session = NodeSession(inside.state, adapters, rollout, "p1")
        await act(session)
        assert adapter.calls == 1

        def lost() -> None:
            raise LeadershipLost("another daemon has taken over")

        inside.state.require_leadership = lost
        with pytest.raises(LeadershipLost):
            await act(session)
        assert adapter.calls == 1
