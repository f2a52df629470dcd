"""Looks whether client traffic runs on a node, as its rollout's plan says, and tells the core.

Whatever goes wrong on the way means that nobody can say.  What becomes of the
answer is decided elsewhere.
"""

from __future__ import annotations

import asyncio

from machines.plan import StepSpec
from machines.traffic import Traffic
from rolloutd.driving.contexts import step_context
from rolloutd.driving.gear import Gear
from rolloutd.errors import RolloutdError
from rolloutd.ports import Busy, Ok, Unknown
from rolloutd.ports.border import answer_of, answering_for
from rolloutd.state import State


async def look_for_traffic(
    state: State, gear: Gear, rollout: str, node: str, spec: StepSpec, *, number: int = 1
) -> Ok | Busy | Unknown:
    """Look once by one probe; what keeps the node from starting is known to the core from then on."""
    found = await _look(state, gear, rollout, node, spec, number)
    if not isinstance(found, Ok):
        busy = True if isinstance(found, Busy) else None
        state.index.probed(Traffic(rollout, node, busy, state.now(), found.text))
    return found


async def look_by_all(state: State, gear: Gear, rollout: str, node: str) -> None:
    """Look by every probe of the plan, up to the first that finds something; the core knows it then."""
    began_at = state.now()
    for spec in state.index.rollout(rollout).plan.traffic:
        if rollout not in state.index.rollouts:
            return  # deleted while an earlier probe was asked
        if not isinstance(await look_for_traffic(state, gear, rollout, node, spec), Ok):
            return
    # What the first probe saw is as old as its look, however long the others took; the clock may have jumped.
    at = min(began_at, state.now())
    state.index.probed(Traffic(rollout, node, False, at, f"no traffic was found on {node}"))


async def _look(
    state: State, gear: Gear, rollout: str, node: str, spec: StepSpec, number: int
) -> Ok | Busy | Unknown:
    try:
        async with asyncio.timeout(spec.timeout_s):
            ctx = await step_context(state, gear, rollout, node, spec, step=spec.name, number=number)
            with answering_for(f"probe {spec.kind}"):
                said = await gear.probes[spec.kind].look(ctx)
            return answer_of(f"probe {spec.kind}", said, Ok, Busy, Unknown)
    except TimeoutError:
        why = f"no answer within {spec.timeout_s:.0f} s"
    except (RolloutdError, OSError) as error:
        why = str(error)
    return Unknown(f"nobody can say whether {node} is busy: {why}")
