"""Rollbacks of several nodes by hand: a wave, or all that a rollout has changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from machines.model.events import Event, NodeOrdered, RolloutPaused
from machines.model.rollout import NodeOrder, Rollout, Target
from machines.states import IN_FLIGHT_PHASES, Outcome, Phase
from rolloutd.commands import rollout_commands
from rolloutd.commands.execution import Events, Principal
from rolloutd.engine.state import State
from rolloutd.errors import Refused


def roll_back_nodes(
    state: State,
    who: Principal,
    rollout: Rollout,
    targets: Iterable[Target],
    reason: str,
    changed_since: Mapping[str, str],
) -> Events:
    """Order the rollback of named nodes; `changed_since` has nodes that a later rollout changed again."""
    chosen = tuple(targets)
    _require_latest(chosen, changed_since)
    return tuple(
        event for target in chosen for event in rollout_commands.rollback(state, who, rollout, target, reason)
    )


def roll_back_wave(
    state: State,
    who: Principal,
    rollout: Rollout,
    wave: str | None,
    reason: str,
    changed_since: Mapping[str, str],
) -> Events:
    """Order the rollback of all changed and failed nodes of a wave, or of the rollout.

    An open rollout is paused, so that none of its nodes is changed meanwhile.
    """
    rollout_commands.require_rollback(state, who, rollout, "roll back nodes of")
    _require_known_wave(rollout, wave)
    chosen = [
        target
        for target in state.index.targets(rollout.id)
        if (wave is None or target.wave == wave) and _can_be_ordered(target)
    ]
    if not chosen:
        where = rollout.id if wave is None else f"wave {wave} of {rollout.id}"
        raise Refused(
            "nothing-changed",
            f"{where}: no changed or failed node without a rollback; list them with rolloutctl nodes",
        )
    _require_latest(chosen, changed_since)
    events: list[Event] = [rollout_commands.rollback_order(state, who, each, reason) for each in chosen]
    if not rollout.closed and rollout.paused is None:
        events.insert(0, RolloutPaused(rollout.id, who.actor, reason, state.now()))
    return tuple(events)


def withdraw(
    state: State, who: Principal, rollout: Rollout, nodes: Collection[str], wave: str | None, reason: str
) -> Events:
    """Withdraw the orders of rollbacks that have not begun: of named nodes, a wave, or all."""
    rollout_commands.require_plan_owner(who, rollout, "withdraw rollbacks of")
    _require_known_wave(rollout, wave)
    return tuple(
        NodeOrdered(rollout.id, target.node, None, who.actor, reason, state.now())
        for target in state.index.targets(rollout.id)
        if target.order is NodeOrder.ROLLBACK
        and target.phase not in IN_FLIGHT_PHASES
        and (not nodes or target.node in nodes)
        and (wave is None or target.wave == wave)
    )


def _require_known_wave(rollout: Rollout, wave: str | None) -> None:
    names = [spec.name for spec in rollout.plan.waves]
    if wave is not None and wave not in names:
        raise Refused("no-wave", f"{rollout.id}: no wave {wave}; name one of {', '.join(names)}")


def _can_be_ordered(target: Target) -> bool:
    """Return whether the node was changed, or failed, and has no order yet."""
    is_failed = target.phase is Phase.FAILED and not target.rolling_back
    return target.order is None and (is_failed or target.outcome is Outcome.CHANGED)


def _require_latest(targets: Iterable[Target], changed_since: Mapping[str, str]) -> None:
    """Raise Refused for a node that a later rollout of the plan has changed again."""
    for target in targets:
        if (later := changed_since.get(target.node)) is not None:
            raise Refused(
                "changed-since",
                f"{target.node}: {later} has changed it since {target.rollout}; roll back {later} first",
            )
