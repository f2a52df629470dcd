"""Why a node does not move: one that waits to start, that failed, and that waits in the middle.

Why nodes do not start is the core's to say; what one at work waits for is known
from what its isolators and checks said last, and from what can be seen of it.
"""

from __future__ import annotations

from machines.index import Index
from machines.moments import stamp
from machines.node import Observation, Sight
from machines.rollout import Reason, Target
from machines.stands import sight
from machines.states import BUSY, Phase
from rolloutd.state import Live


def standstill(index: Index, target: Target, block: Reason | None, live: Live) -> Reason | None:
    """Return the reason of a node that stands still; None for one that moves or is done."""
    if target.phase in (Phase.PENDING, Phase.FAILED):
        return block
    if target.phase not in BUSY:
        return None
    if live.waits is not None:
        return Reason("not-isolated-yet", live.waits.text, live.waits.at, _until(index, target))
    if live.red:
        text = f"{live.step} has not passed yet: {live.red}"
        return Reason("not-passed-yet", text, live.since, f"time: it may take until {stamp(live.red_until)}")
    seen = sight(index, target.node)
    if seen is None or not isinstance(seen.by, Observation) or seen.by.sight is not Sight.UNKNOWN:
        return None
    return Reason("node-unknown", seen.text, seen.since, seen.lifted_by)


def _until(index: Index, target: Target) -> str:
    if target.phase is not Phase.ISOLATING:
        return ""
    limit_s = index.rollout(target.rollout).plan.isolate_timeout_s
    return f"whoever it names; or time: at {stamp(target.since + limit_s)} it is put back and tried later"
