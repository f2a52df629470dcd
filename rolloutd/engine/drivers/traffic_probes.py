"""Traffic probes of nodes, and the results that the core keeps.

Each error means that the traffic is unknown.  The core decides which nodes are probed, a few at a time, and
what follows from a result.
"""

from __future__ import annotations

import asyncio

from machines.model.decision import ProbeTraffic
from machines.model.plan import StepDef
from machines.model.traffic import TrafficResult
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession
from rolloutd.engine.state import State
from rolloutd.errors import RolloutdError
from rolloutd.ports import Busy, Ok, Unknown
from rolloutd.ports.guards import adapter_errors, validate_result


async def probe_traffic(session: NodeSession, spec: StepDef, *, number: int = 1) -> Ok | Busy | Unknown:
    """Probe once; the core keeps a result that stops the node from starting."""
    result = session.without_hidden(await _probe_once(session, spec, number))
    if not isinstance(result, Ok):
        busy, count = (True, result.count) if isinstance(result, Busy) else (None, None)
        _record(session, busy, session.state.now(), result.text, count)
    return result


async def probe_node(state: State, adapters: AdapterSet, request: ProbeTraffic) -> None:
    """Run the plan's probes in order, until one finds traffic or is unknown."""
    session, began_at = NodeSession(state, adapters, request.rollout, request.node), state.now()
    for spec in session.node_plan().traffic:
        if session.rollout not in state.index.rollouts:
            return  # the rollout was deleted during an earlier probe
        if not isinstance(await probe_traffic(session, spec), Ok):
            return
    # "Idle" is as old as the first probe; min(), because the clock may have been set back since.
    _record(session, False, min(began_at, state.now()), f"no traffic was found on {session.node}")


def _record(session: NodeSession, busy: bool | None, at: float, text: str, count: int | None = None) -> None:
    result = TrafficResult(session.rollout, session.node, busy, at, text, count=count)
    session.state.index.record_traffic(result)


async def _probe_once(session: NodeSession, spec: StepDef, number: int) -> Ok | Busy | Unknown:
    session.state.require_leadership()
    try:
        async with asyncio.timeout(spec.timeout_s):
            ctx = await session.step_context(spec, number=number)
            with adapter_errors(f"probe {spec.kind}"):
                result = await session.adapters.probes[spec.kind].probe(ctx)
            return validate_result(f"probe {spec.kind}", result, Ok, Busy, Unknown)
    except TimeoutError:
        why = f"no answer within {spec.timeout_s:.0f} s"
    except (RolloutdError, OSError) as error:
        why = str(error)
    return Unknown(f"{session.node}: traffic is unknown: {why}")
