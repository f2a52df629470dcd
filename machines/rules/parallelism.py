"""How many nodes may be in flight at once: by the disk, and by the limits of fleet, rollout and wave."""

from __future__ import annotations

from machines.facts.availability import observed_unavailability
from machines.facts.index import Index
from machines.model.plan import WaveDef
from machines.model.reasons import Params, Reason, ReasonCode, Remedy, RemedyKind
from machines.model.rollout import Rollout, Target
from machines.rules import pools
from machines.states import IN_FLIGHT_PHASES, Outcome, Phase


def capacity_blocker(
    index: Index,
    rollout: Rollout,
    wave: WaveDef,
    capacity: pools.Capacity,
    *,
    node: str,
    joins: bool = False,
    is_rollback: bool = False,
) -> Reason | None:
    """Return what allows the node no start: the disk, or a limit of the fleet, rollout or wave.

    `joins`: the node is in flight in another rollout, and the fleet's limit counts it already.  A
    rollback makes no further target unready.
    """
    if (shortage := index.disk_shortage) is not None:
        sizes: Params = {"free_bytes": shortage.free_bytes, "needed_bytes": shortage.needed_bytes}
        remedy = Remedy(RemedyKind.FREE_DISK)
        return Reason(ReasonCode.DISK_FULL, "rolloutd", sizes, shortage.since, remedy)
    for scope, limit, in_flight in _parallelism_limits(
        index, rollout, wave, capacity, node=node, is_rollback=is_rollback
    ):
        if limit is not None and in_flight >= limit and not (joins and scope == "fleet"):
            params: Params = {
                "scope": scope,
                "wave": wave.name,
                "in_flight": in_flight,
                "max_parallel": limit,
            }
            remedy = Remedy(RemedyKind.WAIT_FOR_CAPACITY)
            if scope == "unready":
                others = _other_unready_nodes(index, rollout, node)
                params = {**params, "nodes": tuple(others[: pools.MAX_NAMED_NODES])}
                # Without work in flight none will be done: the first must be ready, or be decided about.
                remedy = _unready_remedy(index, rollout, others[0]) if in_flight == len(others) else remedy
            return Reason(ReasonCode.MAX_PARALLEL, rollout.id, params, remedy=remedy)
    return None


def remaining_capacity(
    index: Index,
    rollout: Rollout,
    wave: WaveDef | None,
    capacity: pools.Capacity,
    *,
    node: str | None = None,
    is_rollback: bool = False,
) -> int:
    """Return how many more nodes of the wave, None for the rollout, may be in flight.

    `node`: the next to start, None for one that is ready.
    """
    # A run that cannot write its files would fail its node for a reason that is not the node's.
    if index.disk_shortage is not None:
        return 0
    limits = _parallelism_limits(index, rollout, wave, capacity, node=node, is_rollback=is_rollback)
    return max(0, min(most - in_flight for _, most, in_flight in limits if most is not None))


def _parallelism_limits(
    index: Index,
    rollout: Rollout,
    wave: WaveDef | None,
    capacity: pools.Capacity,
    *,
    node: str | None,
    is_rollback: bool,
) -> tuple[tuple[str, int | None, int], ...]:
    """Return each limit on nodes in flight: whose it is, how many may be, how many are."""
    admitted = capacity.admitted_by_rollout[rollout.id]
    counters = index.counters(rollout.id)
    limits: tuple[tuple[str, int | None, int], ...] = (
        ("fleet", index.limits.max_parallel, index.in_flight() + len(capacity.nodes)),
        ("rollout", rollout.plan.max_parallel, len(counters.in_flight) + admitted),
    )
    if rollout.plan.max_unready is not None and not is_rollback:
        others = _other_unready_nodes(index, rollout, node)
        unready = len(counters.in_flight) + admitted + len(others)
        limits = (*limits, ("unready", rollout.plan.max_unready, unready))
    if wave is None:
        return limits
    phases = counters.waves.get(wave.name)
    in_wave = 0 if phases is None else sum(phases[phase] for phase in IN_FLIGHT_PHASES)
    return (*limits, ("wave", wave.max_parallel, in_wave + admitted))


def unready_nodes(index: Index, rollout: Rollout) -> list[str]:
    """Return the nodes of targets that have failed, or are not ready after their change."""
    return [
        target.node
        for target in index.targets(rollout.id)
        if target.phase is Phase.FAILED or _is_unready(index, target)
    ]


def _other_unready_nodes(index: Index, rollout: Rollout, node: str | None) -> list[str]:
    # One that may start although it is down, as a new cluster does, must not wait for itself.
    return [other for other in unready_nodes(index, rollout) if other != node]


def _unready_remedy(index: Index, rollout: Rollout, node: str) -> Remedy:
    """Return who or what makes an unready node ready."""
    is_pending = index.target(rollout.id, node).phase is Phase.PENDING
    found = observed_unavailability(index, node) if is_pending else index.unavailability(node)
    return Remedy(RemedyKind.WAIT_FOR_HEALTH, {"node": node}) if found is None else found.remedy


def _is_unready(index: Index, target: Target) -> bool:
    # One that this rollout did not change must not stop the others.
    if target.node not in index.nodes or (not target.attempt and target.outcome in (None, Outcome.SKIPPED)):
        return False
    if target.phase is Phase.DONE:
        found = index.unavailability(target.node)
    elif target.phase is Phase.PENDING:
        found = observed_unavailability(index, target.node)
    else:
        return False
    # One that was ready when it was last observed is taken for ready, or all would be observed at each start.
    return found is not None and (found.confirmed or found.last_seen_down or found.cause is None)
