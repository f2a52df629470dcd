"""Commands on a rollout and its nodes.

Each command is a function from facts, caller and arguments to events; it writes
nothing.  A refusal says what the caller could do instead.  The rules of slots,
gates and transitions are the core's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from machines.facts.availability import failure_remedy
from machines.facts.preparations import BUILD_NODE
from machines.model import events
from machines.model.reasons import Reason
from machines.model.rollout import Hold, NodeOrder, Rollout, Target
from machines.rules.rollbacks import due_rollbacks, order_blocker
from machines.states import IN_FLIGHT_PHASES, Outcome, Phase, Trigger
from machines.workflow.phase_transitions import transition
from rolloutd.commands.execution import Events, Principal
from rolloutd.engine.state import State
from rolloutd.errors import NotAllowed, NotFound, Refused
from rolloutd.texts.formats import suggest_name
from rolloutd.texts.reason_text import describe, describe_remedy, lifted_by

PERSON_SOURCE = "person"

LEFT_ISOLATED_SOURCE = "left"
"""The source of the hold on a node that was skipped and left isolated."""

FLEETLOCK_SOURCE = "fleetlock"
"""The source of the holds of machines that reboot themselves; their ids are GROUP/ID."""

# -- permissions --------------------------------------------------------------


def require_plan_owner(who: Principal, rollout: Rollout, verb: str) -> None:
    """Raise NotAllowed unless the caller is an admin or a member of the team that owns the plan."""
    require_member(who, rollout.plan.owner, f"{verb} {rollout.id}")


def require_member(who: Principal, team: str | None, action: str) -> None:
    """Raise NotAllowed unless the caller is an admin or a member of the team."""
    if not who.admin and (team is None or team not in who.teams):
        allowed = "an admin" if team is None else f"a member of {team} or an admin"
        raise NotAllowed(f"{who.user} may not {action}; ask {allowed}")


def require_team_member(who: Principal, action: str) -> None:
    """Raise NotAllowed unless the caller is an admin or a member of any team."""
    if not who.admin and not who.teams:
        raise NotAllowed(f"{who.user} may not {action}; ask a member of a team in the settings or an admin")


# -- a whole rollout ----------------------------------------------------------


def pause(state: State, who: Principal, rollout: Rollout, reason: str, *, stop: bool = False) -> Events:
    """Start no node of the rollout until a person resumes it; with `stop`, also stop running work."""
    require_plan_owner(who, rollout, "pause")
    _require_open(rollout)
    paused = events.RolloutPaused(rollout.id, who.actor, reason, state.now())
    stops = _stop_orders(state, who, rollout, reason) if stop else ()
    return stops if rollout.paused is not None else (paused, *stops)


def resume(state: State, who: Principal, rollout: Rollout, reason: str) -> Events:
    """Lift a person's pause; raises Refused if there is none."""
    require_plan_owner(who, rollout, "resume")
    _require_open(rollout)
    if rollout.paused is None:
        raise Refused(
            "not-paused",
            f"{rollout.id}: not paused by a person; resolve its failures (proceed, retry, skip, rollback), "
            "or withdraw the vote that rejected a gate",
        )
    return (events.RolloutResumed(rollout.id, who.actor, reason, state.now()),)


def cancel(state: State, who: Principal, rollout: Rollout, reason: str, *, stop: bool = False) -> Events:
    """Start none of the rollout's nodes again; nodes in flight finish, unless `stop` stops them."""
    require_plan_owner(who, rollout, "cancel")
    stops = _stop_orders(state, who, rollout, reason) if stop else ()
    if rollout.cancelled is not None:
        return stops
    _require_open(rollout)
    return (events.RolloutCancelled(rollout.id, who.actor, reason, state.now()), *stops)


def cancel_own(state: State, who: Principal, rollout: Rollout, reason: str) -> Events:
    """Cancel a rollout on behalf of its submitter, whose request is withdrawn."""
    if rollout.closed:
        return ()
    return (events.RolloutCancelled(rollout.id, rollout.submitted_by, reason, state.now()),)


def delete(state: State, who: Principal, rollout: Rollout, targets: Sequence[Target]) -> Events:
    """Delete a closed rollout; its audit entries stay.

    A node that left the inventory while it was isolated gets a hold in the caller's
    name: if it comes back, nothing else records that it is isolated.
    """
    require_plan_owner(who, rollout, "delete")
    if not rollout.closed:
        raise Refused("not-closed", f"{rollout.id}: not closed; cancel it first")
    hold_events: list[events.Event] = []
    for target in targets:
        if (
            target.phase in IN_FLIGHT_PHASES
            or target.order is not None
            or (rollout.id, target.node) in state.step_progress
        ):
            next_step = "wait until its work has ended"
        elif target.node not in state.index.nodes:
            hold_events += _convert_to_person_hold(state, who, target)
            continue
        elif target.isolated and target.phase is Phase.PENDING:
            next_step = f"rolloutctl skip {rollout.id} {target.node} --return first"
        elif target.isolated or _is_left_isolated(state, target):
            next_step = f"rolloutctl return {target.node} first"
        elif target.phase is Phase.FAILED:
            next_step = f"rolloutctl skip {rollout.id} {target.node} first"
        else:
            continue
        raise Refused(
            "not-settled", f"{target.node} is {_describe_phase(target)} in {rollout.id}; {next_step}"
        )
    preparations = state.index.preparations(rollout.id)
    # Without the rollout nothing would follow its stage, and another rollout would work on the same node.
    for node, stage in sorted(preparations.active if preparations else ()):
        place = rollout.node_of_stage(node, stage) or "the daemon's machine"
        raise Refused(
            "not-settled", f"{place} still runs stage {stage} of {rollout.id}; wait until it has ended"
        )
    return (*hold_events, events.RolloutDeleted(rollout.id, who.actor, state.now()))


# -- one node -----------------------------------------------------------------


def advance(state: State, who: Principal, rollout: Rollout, target: Target, reason: str) -> Events:
    """Move a waiting node to the front of its wave; the rules of starting still apply."""
    if target.team is None or target.team not in who.teams:
        require_plan_owner(who, rollout, f"advance {target.node} of")
    _require_open(rollout)
    if target.phase is not Phase.PENDING:
        raise Refused(
            "not-now", f"{target.node}: {_describe_phase(target)}; only pending nodes can be advanced"
        )
    positions = [each.position for each in state.index.targets(rollout.id) if each.wave == target.wave]
    if target.position == min(positions):
        return ()
    return (events.NodeAdvanced(rollout.id, target.node, min(positions) - 1, who.actor, reason, state.now()),)


def retry(state: State, who: Principal, rollout: Rollout, target: Target, reason: str) -> Events:
    """Retry a failed node when its turn comes; it stays isolated until then.

    A pending node whose prepare stage failed is prepared again at once.
    """
    require_plan_owner(who, rollout, f"retry {target.node} of")
    if (retried := _retry_preparation(state, rollout, target.node)) is not None:
        return (retried,)
    _require_failed(rollout, target)
    _require_open(rollout, target)
    # A retried node keeps its slots, and its failure keeps it from starting: the other rollbacks would wait.
    if any(each.node == target.node for each in due_rollbacks(state.index, rollout).targets):
        raise Refused(
            "rollback-due",
            f"{target.node}: its rollback is due; approve proceed, which ends the rollbacks, then retry",
        )
    return (transition(target, Trigger.RETRIED, state.now(), text=reason),)


def retry_build(state: State, who: Principal, rollout: Rollout, reason: str) -> Events:
    require_plan_owner(who, rollout, "retry the build of")
    if (retried := _retry_preparation(state, rollout, BUILD_NODE)) is None:
        _require_open(rollout)
        raise Refused("not-failed", f"{rollout.id}: no build of it has failed; name the node to retry")
    return (retried,)


def rollback(state: State, who: Principal, rollout: Rollout, target: Target, reason: str) -> Events:
    """Run the plan's rollback playbook on a failed node now, on a changed one once its pools have a slot.

    It ignores windows and freezes, and it may follow the end of the rollout.
    """
    require_rollback(state, who, rollout, f"roll back {target.node} of")
    if target.order is NodeOrder.ROLLBACK or (target.rolling_back and target.phase in IN_FLIGHT_PHASES):
        return ()
    if target.phase is not Phase.FAILED and target.outcome is not Outcome.CHANGED:
        raise Refused(
            "not-changed",
            f"{target.node}: {_describe_phase(target)} in {rollout.id}; "
            "only failed and changed nodes can be rolled back",
        )
    _require_no_order(target)
    if (blocker := order_blocker(state.index, target, state.now())) is not None:
        raise occupied(blocker, str(blocker.params.get("cause", blocker.code)))
    if target.phase is Phase.FAILED:
        return (transition(target, Trigger.ROLLBACK_ORDERED, state.now(), text=reason),)
    return (rollback_order(state, who, target, reason),)


def require_rollback(state: State, who: Principal, rollout: Rollout, verb: str) -> None:
    """Raise NotAllowed or Refused unless the caller may roll nodes of the rollout back."""
    require_plan_owner(who, rollout, verb)
    _require_not_observe_only(state)
    if not rollout.plan.rollback:
        raise Refused(
            "no-rollback", f"{rollout.id}: its plan has no rollback playbook; retry or skip its nodes"
        )


def rollback_order(state: State, who: Principal, target: Target, reason: str) -> events.NodeOrdered:
    """Return the order to roll a node back as soon as its pools have a slot for it."""
    return events.NodeOrdered(target.rollout, target.node, NodeOrder.ROLLBACK, who.actor, reason, state.now())


def skip(
    state: State, who: Principal, rollout: Rollout, target: Target, reason: str, isolation_choice: str | None
) -> Events:
    """Leave a pending or failed node out.

    An isolated node needs `isolation_choice`: `return` returns it to service after its
    checks, `leave` keeps its slots taken by a hold in the caller's name.
    """
    require_plan_owner(who, rollout, f"skip {target.node} of")
    if target.phase not in (Phase.PENDING, Phase.FAILED):
        raise Refused(
            "not-now",
            f"{target.node}: {_describe_phase(target)}; only pending and failed nodes can be skipped",
        )
    _require_no_order(target)
    text = f"by {who.actor.name}: {reason}"
    skipped = transition(target, Trigger.SKIPPED, state.now(), outcome=Outcome.SKIPPED, text=text)
    if not target.isolated:
        return (skipped,)
    held = events.HoldTaken(_left_isolated_hold(state, who, target, reason))
    match isolation_choice:
        case "leave":
            return (skipped, held)
        case "return":
            _require_not_observe_only(state)
            ordered = _return_order(state, who, target, reason)
            # A pending node could start while it is being returned, so it is skipped at once.
            return (ordered,) if target.phase is Phase.FAILED else (skipped, held, ordered)
        case _:
            raise Refused(
                "return-needed",
                f"{target.node}: isolated; use --return (back to service after its infra checks) "
                "or --leave (it stays isolated and keeps its slots)",
            )


def isolated_target(state: State, node: str) -> Target:
    """Return the target whose rollout has isolated the node; raises NotFound, Refused if there is none."""
    targets = tuple(state.index.targets_on(node))
    if not targets and node not in state.index.nodes:
        raise unknown_node(state, node)
    isolated = [target for target in targets if target.isolated or _is_left_isolated(state, target)]
    if not isolated:
        raise Refused("not-isolated", f"{node}: not isolated by rolloutd; nothing to return")
    return isolated[0]


def return_node(state: State, who: Principal, node: str, reason: str) -> Events:
    """Return the order to return an isolated node; none if there is one already.

    Raises NotFound for an unknown node, Refused if it cannot be returned.
    """
    target = isolated_target(state, node)
    rollout = state.index.rollout(target.rollout)
    require_plan_owner(who, rollout, f"return {node} of")
    if target.phase in IN_FLIGHT_PHASES:
        raise Refused(
            "not-now",
            f"{node} is {_describe_phase(target)} in {rollout.id}; wait until its work has ended",
        )
    if target.phase is Phase.PENDING:
        raise Refused(
            "pending",
            f"{node} waits for a retry in {rollout.id}; rolloutctl skip {rollout.id} {node} --return",
        )
    if target.order is not None:
        return ()
    if node not in state.index.nodes:
        raise Refused("node-gone", f"{node}: not in the inventory; add it again, or delete {rollout.id}")
    _require_not_observe_only(state)
    return (_return_order(state, who, target, reason),)


# -- what commands share ------------------------------------------------------


def unknown_node(state: State, node: str) -> NotFound:
    action = suggest_name(node, state.index.nodes, "list them with rolloutctl inventory")
    return NotFound(f"{node}: no such node; {action}")


def _stop_orders(state: State, who: Principal, rollout: Rollout, reason: str) -> Events:
    return tuple(
        events.NodeOrdered(rollout.id, each.node, NodeOrder.STOP, who.actor, reason, state.now())
        for each in state.index.targets(rollout.id)
        if each.phase in IN_FLIGHT_PHASES and each.order is not NodeOrder.STOP
    )


def _return_order(state: State, who: Principal, target: Target, reason: str) -> events.NodeOrdered:
    return events.NodeOrdered(target.rollout, target.node, NodeOrder.RETURN, who.actor, reason, state.now())


def _is_left_isolated(state: State, target: Target) -> bool:
    """Return whether a skipped node still has its `left` hold: its return may have failed."""
    name = f"{target.rollout}/{target.node}"
    return any(
        hold.source == LEFT_ISOLATED_SOURCE and hold.id == name for hold in state.index.holds_on(target.node)
    )


def _convert_to_person_hold(state: State, who: Principal, target: Target) -> Sequence[events.Event]:
    """Return the events that turn an isolation of a deleted rollout into the caller's hold."""
    left_hold, now = _left_isolated_hold(state, who, target, ""), state.now()
    is_left = _is_left_isolated(state, target)
    if not (target.isolated or is_left):
        return ()
    reason = (
        f"{target.rollout} left it isolated and was deleted while the node was not in the inventory; "
        "return it to service by hand, then release it"
    )
    released = events.HoldReleased(left_hold.node, LEFT_ISOLATED_SOURCE, left_hold.id, who.actor, now)
    taken = events.HoldTaken(Hold(target.node, PERSON_SOURCE, left_hold.id, who.actor, reason, now))
    return (released, taken) if is_left else (taken,)


def _left_isolated_hold(state: State, who: Principal, target: Target, reason: str) -> Hold:
    return Hold(
        target.node, LEFT_ISOLATED_SOURCE, f"{target.rollout}/{target.node}", who.actor, reason, state.now()
    )


def _require_open(rollout: Rollout, failed: Target | None = None) -> None:
    """Raise Refused for a closed rollout; with a failed node, say how it can still be settled."""
    if rollout.cancelled is not None:
        left = None if failed is None else describe_remedy(failure_remedy(failed, rollout))
        hint = "; submit the plan again" if left is None else f"; what is left is {left}"
        by = rollout.cancelled.by.name
        raise Refused("cancelled", f"{rollout.id}: cancelled by {by}{hint}")
    if rollout.ended_at is not None:
        raise Refused("ended", f"{rollout.id}: ended; submit the plan again with --again")


def _retry_preparation(state: State, rollout: Rollout, node: str) -> events.PreparationRecorded | None:
    """Return the event by which a failed prepare stage is tried at once; None if none has failed."""
    known = state.index.preparations(rollout.id)
    failed = None if known is None else known.failed_row(node)
    if failed is None:
        return None
    _require_open(rollout)
    # It stays failed: its row has the snapshot and the run that the next try deals with first.
    return events.PreparationRecorded(replace(failed, not_before=state.now()))


def _require_failed(rollout: Rollout, target: Target) -> None:
    if target.phase is not Phase.FAILED:
        raise Refused(
            "not-failed",
            f"{target.node}: {_describe_phase(target)} in {rollout.id}; only failed nodes can be retried",
        )
    _require_no_order(target)


def _require_no_order(target: Target) -> None:
    if target.order is not None:
        by = "a person" if target.order_by is None else target.order_by.name
        raise Refused("ordered", f"{target.node}: {by} ordered its {target.order}; wait for that")


def occupied(reason: Reason, code: str) -> Refused:
    """Return the refusal for a node that another user or rollout has: why, and what ends it."""
    return Refused(code, f"{describe(reason)}; lifted by {lifted_by(reason)}")


def _require_not_observe_only(state: State) -> None:
    if state.index.limits.observe_only:
        raise Refused(
            "observe-only", "rolloutd only observes and changes no node; unset observe_only in its settings"
        )


def _describe_phase(target: Target) -> str:
    if target.outcome is not None:
        return f"{target.phase} ({target.outcome})"
    return (
        f"{target.phase} and isolated"
        if target.isolated and target.phase not in IN_FLIGHT_PHASES
        else str(target.phase)
    )
